"""How are the layers differentiated? Once, and in the dtypes of the forward pass."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ringspan.runtime.arithmetic import without_autocast

_Gradients = TypeVar("_Gradients")


def differentiable_once(
    backward: Callable[[Any, torch.Tensor], _Gradients],
) -> Callable[[Any, torch.Tensor], _Gradients]:
    """Make a backward pass that refuses a second derivative and that ignores autocast around `backward()`."""

    def run(ctx: Any, dout: torch.Tensor) -> _Gradients:
        with without_autocast(dout.device.type):
            return backward(ctx, dout)

    return once_differentiable(run)

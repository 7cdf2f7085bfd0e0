"""How are the layers differentiated: in the types they were computed in, and once."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ringspan.runtime.arithmetic import without_autocast

_Gradients = TypeVar("_Gradients")


def differentiable_once(
    backward: Callable[[Any, torch.Tensor], _Gradients],
) -> Callable[[Any, torch.Tensor], _Gradients]:
    """A backward pass that has no derivative, and that autocast does not change wherever `backward()` is called."""

    def run(ctx: Any, dout: torch.Tensor) -> _Gradients:
        with without_autocast(dout.device.type):
            return backward(ctx, dout)

    return once_differentiable(run)

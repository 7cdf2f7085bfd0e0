"""Attention that spreads heads and sequence over the ranks of the runtime."""

from collections.abc import Callable
from typing import Any

import torch

from ringspan.compat.ringmaster.config import RotateMethod, auto_select
from ringspan.compat.ringmaster.runtime import get_runtime

__all__ = ["auto_select", "make_usp_attention"]


def make_usp_attention(
    provider: str, attn_implementation: str, rotate_method: RotateMethod | str
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Return what the runtime registers; kernels and transport are chosen here."""
    del provider, attn_implementation, rotate_method

    def attend(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return get_runtime().attend(*args, **options)

    return attend

"""Do the tensors of a reproducible call fit the layout and each other on this rank?"""

import torch

from ringspan.errors import ShapeError
from ringspan.runtime.checks import check_tensor


def check_tokens(name: str, x: torch.Tensor, shard_len: int) -> None:
    """Check that x is (batch, seq, …) with this rank's tokens."""
    check_tensor(name, x)
    if x.ndim < 2 or x.shape[1] != shard_len or x.shape[0] < 1:
        raise ShapeError(
            f"{name}.shape={tuple(x.shape)}: {name} is (batch, seq, …) with a batch of 1 or more, and the layout gives "
            f"this rank {shard_len} positions along dim 1"
        )


def check_weights(x: torch.Tensor, **weights: torch.Tensor | None) -> None:
    """Check that weights are floating point and have the dtype and device of x."""
    for name, weight in weights.items():
        if weight is None:
            continue
        check_tensor(name, weight)
        if weight.dtype != x.dtype or weight.device != x.device or not x.is_floating_point():
            raise ShapeError(
                f"x is {x.dtype} on {x.device}, {name} is {weight.dtype} on {weight.device}: both need one "
                "floating-point dtype and device; convert one of them (autocast does not)"
            )

"""How do two partial results over different keys become one?

Attention over a part of the keys gives a normalised output and the log-sum-exp of its scores. Two such parts over
different keys merge exactly: each has the weight exp(lse - joint lse). The outputs cannot be added, because each was
divided by its own sum.

Accumulators are float32 (float64 for float64 inputs) for every input dtype, so that the error of half dtypes does not
grow with the number of parts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

LANES = 64
"""A vectorised loop over a multiple of this many numbers has no remainder, for every vector width."""

ONE_THREAD = 2**15
"""PyTorch never splits a loop of this many numbers between threads."""


class Partial(NamedTuple):
    """`out` (batch, heads, seq, dim), normalised; `lse` (batch, heads, seq), natural log, -inf where no key is seen."""

    out: torch.Tensor
    lse: torch.Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept and sent."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(into: Partial, part: Partial) -> None:
    """Merge a part over other keys into `into`, in place. Two parts that saw no key give out = 0 and lse = -inf."""
    share, part_share = _shares(into.lse, part.lse)
    torch.logaddexp(into.lse, part.lse, out=into.lse)
    # lerp would subtract the two outputs, and infinity minus infinity is NaN.
    into.out.mul_(share.unsqueeze(-1)).addcmul_(part.out.to(into.out.dtype), part_share.unsqueeze(-1))


def merged(one: Partial, other: Partial) -> Partial:
    """Merge two parts into new tensors; here `lse` has a last dim of 1."""
    share, other_share = _shares(one.lse, other.lse)
    out = (one.out * share).addcmul_(other.out.to(one.lse.dtype), other_share)
    return Partial(out, torch.logaddexp(one.lse, other.lse))


def _shares(lse: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of both parts; a part that saw no key has weight 0 unless both saw none."""
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # -inf - -inf would be NaN
    return torch.sigmoid(finite - other), torch.sigmoid(other - finite)


def merge_steadily(into: Partial, part: Partial) -> None:
    """Merge like `merge_`, so that each row's bits depend on its own numbers only."""
    lse = steadily(torch.logaddexp, into.lse, part.lse)
    # Not 1 - share: its rounding error can matter times a large number, and 0 · infinity is NaN.
    share, part_share = (steadily(torch.exp, x - lse).nan_to_num_(nan=0.0).unsqueeze(-1) for x in (into.lse, part.lse))
    into.lse.copy_(lse)
    # Products, sums and the fused addcmul round the same in the body and the remainder of a vectorised loop.
    into.out.mul_(share).addcmul_(part.out.to(into.out.dtype), part_share)


def steadily(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to operands of one shape, with no element in the remainder of a vectorised loop.

    PyTorch's vectorised functions give other bits in the remainder of a loop, and in strided memory.
    """
    shape, size = operands[0].shape, operands[0].numel()
    dense = [x.contiguous() for x in operands]
    if size % LANES == 0 and size <= ONE_THREAD:
        return function(*dense)
    flat = [torch.nn.functional.pad(x.view(-1), (0, -size % LANES)) for x in dense]
    chunks = range(0, max(1, size), ONE_THREAD)
    return torch.cat([function(*(x[at : at + ONE_THREAD] for x in flat)) for at in chunks])[:size].view(shape)

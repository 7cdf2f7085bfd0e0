"""Partial attention and how two parts of it become one.

Attention over some of the keys is a normalised output and the log of the sum it was divided by. Two such parts over
different keys merge exactly: each counts by its share of the joint sum, exp(lse - joint lse). Outputs cannot just be
added, because each was divided by its own sum.

Accumulators are float32 (float64 for float64 inputs) whatever the inputs are, so that the error of half types does not
grow with the number of parts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

LANES = 64
"""No loop over a multiple of this many numbers has a remainder, however wide the vectors are."""

ONE_THREAD = 2**15
"""As many numbers as PyTorch never divides between threads."""


class Partial(NamedTuple):
    """`out` (batch, heads, seq, dim), normalised; `lse` (batch, heads, seq), natural log, -inf where no key is seen."""

    out: torch.Tensor
    lse: torch.Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept and sent in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(into: Partial, part: Partial) -> None:
    """Take a part over other keys into `into`, in place. Nothing merged with nothing stays nothing, never NaN."""
    share, part_share = _shares(into.lse, part.lse)
    torch.logaddexp(into.lse, part.lse, out=into.lse)
    # Not lerp: it subtracts the two, and the difference of an infinity and anything is no average of them.
    into.out.mul_(share.unsqueeze(-1)).addcmul_(part.out.to(into.out.dtype), part_share.unsqueeze(-1))


def merged(one: Partial, other: Partial) -> Partial:
    """The same in new tensors; here `lse` has a last dim of 1."""
    share, other_share = _shares(one.lse, other.lse)
    out = (one.out * share).addcmul_(other.out.to(one.lse.dtype), other_share)
    return Partial(out, torch.logaddexp(one.lse, other.lse))


def _shares(lse: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How much each counts: all and nothing where one saw no key, and where neither did."""
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # infinity less infinity would be NaN
    return torch.sigmoid(finite - other), torch.sigmoid(other - finite)


def merge_steadily(into: Partial, part: Partial) -> None:
    """`merge_`, and each row's bits depend on its own numbers only."""
    lse = steadily(torch.logaddexp, into.lse, part.lse)
    # Not 1 less the other: what is rounded away there may count, times a large number, and 0 times infinity is NaN.
    share, part_share = (steadily(torch.exp, x - lse).nan_to_num_(nan=0.0).unsqueeze(-1) for x in (into.lse, part.lse))
    into.lse.copy_(lse)
    # Products, sums and the fused addcmul are rounded alike in every part of a loop.
    into.out.mul_(share).addcmul_(part.out.to(into.out.dtype), part_share)


def steadily(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    """A function of single numbers, applied to operands of one shape so that no number is in the remainder of a loop.

    There the vectorised functions of PyTorch give other bits; so they do in strided memory.
    """
    shape, size = operands[0].shape, operands[0].numel()
    dense = [x.contiguous() for x in operands]
    if size % LANES == 0 and size <= ONE_THREAD:
        return function(*dense)
    flat = [torch.nn.functional.pad(x.view(-1), (0, -size % LANES)) for x in dense]
    chunks = range(0, max(1, size), ONE_THREAD)
    return torch.cat([function(*(x[at : at + ONE_THREAD] for x in flat)) for at in chunks])[:size].view(shape)

"""What does a sink take from the softmax of its head, and what is its gradient?

A sink is one more logit, whose weight is thrown away. It joins after everything is merged, so that it needs no message.
Its gradient is a sum over all queries: each rank has its share of it, or, where bits must not depend on who holds which
query, the shares of its tiles.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from ringspan.kernels.base import Merged
from ringspan.kernels.softmax import Partial, steadily
from ringspan.program.reproducible.bind import Strip


def _plainly(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    return function(*operands)


def with_sinks(part: Partial, sinks: torch.Tensor, *, is_steady: bool) -> Partial:
    """exp(lse) of exp(lse) + exp(sink) is left for the keys; if steady, with bits that depend on nothing beside it."""
    apply = steadily if is_steady else _plainly
    logits = sinks.to(part.lse.dtype)[:, None].expand_as(part.lse)
    lse = apply(torch.logaddexp, part.lse, logits)
    # Neither a key nor a sink: -inf - -inf is NaN, where nothing is left for nobody.
    share = apply(torch.exp, part.lse - lse).nan_to_num_(nan=0.0)
    return Partial(part.out * share.unsqueeze(-1), lse)


def sink_gradients(merged: Merged, sinks: torch.Tensor) -> torch.Tensor:
    """What these queries add to the gradient of each sink, (heads,), in the accumulator type.

    A sink of weight p takes p · delta from its row: its value is 0, where the row's own is delta.
    """
    dout, out, lse = merged
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_().nan_to_num_(nan=0.0)
    return -(weights * delta).sum((0, 2))


def sink_gradients_of_tiles(strips: Sequence[Strip], merged: Merged, sinks: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same for each tile by itself, one batch row after the other.

    Every sum is along contiguous numbers, whose order is one and the same then: threads share sums out, but no sum.
    """
    dtype = merged.lse.dtype
    logits = sinks.to(dtype)[:, None]
    for strip in strips:
        total = logits.new_zeros(len(sinks))
        for rows in zip(*merged, strict=True):
            dout, out, lse = (x[:, strip.rows].to(dtype).contiguous() for x in rows)
            delta = (dout * out).sum(-1)
            weights = steadily(torch.exp, logits - lse).nan_to_num_(nan=0.0)
            total -= (weights * delta).sum(-1)
        yield total

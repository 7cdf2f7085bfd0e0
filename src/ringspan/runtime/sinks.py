"""What does an attention sink take from the softmax of its head, and what is its gradient?

A sink is one more logit whose weight is discarded. It is applied after all partial results are merged, so it needs no
message. Its gradient is a sum over all queries: each rank has its share, or, in the reproducible mode, one share per
tile.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from ringspan.kernels.base import Merged
from ringspan.kernels.softmax import Partial, steadily
from ringspan.program.reproducible.grid import Strip


def _plainly(function: Callable[..., torch.Tensor], *operands: torch.Tensor) -> torch.Tensor:
    return function(*operands)


def with_sinks(part: Partial, sinks: torch.Tensor, *, is_steady: bool) -> Partial:
    """Scale out by exp(lse) / (exp(lse) + exp(sink)); if steady, each row's bits depend on that row only."""
    apply = steadily if is_steady else _plainly
    logits = sinks.to(part.lse.dtype)[:, None].expand_as(part.lse)
    lse = apply(torch.logaddexp, part.lse, logits)
    # No visible key and sink = -inf: -inf - -inf is NaN, and the share is 0.
    share = apply(torch.exp, part.lse - lse).nan_to_num_(nan=0.0)
    return Partial(part.out * share.unsqueeze(-1), lse)


def sink_gradients(merged: Merged, sinks: torch.Tensor) -> torch.Tensor:
    """These queries' share of the gradient of each sink, (heads,), in the accumulator dtype.

    dsink = -sum(p · delta) over rows, with p the weight of the sink in a row.
    """
    dout, out, lse = merged
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp_().nan_to_num_(nan=0.0)
    return -(weights * delta).sum((0, 2))


def sink_gradients_of_tiles(strips: Sequence[Strip], merged: Merged, sinks: torch.Tensor) -> Iterator[torch.Tensor]:
    """`sink_gradients` of each tile, one batch row after the other.

    Every sum runs along contiguous numbers, so its order is fixed: threads divide sums among them, but split none.
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

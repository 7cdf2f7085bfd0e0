"""What do the two modes do with tensors? The default one, and the reproducible one.

`program/prepare.py` holds what the modes do with schedules; this file adds kernels, arithmetic and sinks.

A sink is one more logit whose weight is discarded. It is applied after all partial results are merged, so it needs no
message. Its gradient is a sum over all queries: each rank has its share, or, in the reproducible mode, one share per
tile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from ringspan.kernels.base import Kernel, KernelRequest, Merged
from ringspan.kernels.softmax import Partial, steadily
from ringspan.layout import Layout
from ringspan.program import prepare
from ringspan.program.prepare import Mode
from ringspan.program.reproducible.grid import Strip
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.reproducible_arithmetic import SteadyArithmetic, on_single_threads, tiles_at_once
from ringspan.runtime.tile_sums import sum_over_tiles, tile_layout
from ringspan.transports.base import Transport


class TorchMode(NamedTuple):
    """How a mode prepares programs, calls kernels, adds tensors and treats sinks."""

    program: Mode
    arithmetic: type[TorchArithmetic]
    threads: Callable[[torch.device], Callable[[Kernel], AbstractContextManager[Kernel]]]
    """For a device: a context in which a program runs, which gives the kernel to call there."""
    tiles_at_once: Callable[[str, KernelRequest], int]
    with_sinks: Callable[[Partial, torch.Tensor], Partial]
    sink_gradients: Callable[[Transport, Layout, Merged, torch.Tensor, float | None], torch.Tensor]
    """dsinks from (transport, layout, merged, sinks, deadline_s): this rank's share, or the sum on all ranks."""


def _share_of_sink_gradients(
    transport: Transport,  # noqa: ARG001
    layout: Layout,  # noqa: ARG001
    merged: Merged,
    sinks: torch.Tensor,
    deadline_s: float | None,  # noqa: ARG001
) -> torch.Tensor:
    return sink_gradients(merged, sinks)


def _sum_of_sink_gradients(
    transport: Transport, layout: Layout, merged: Merged, sinks: torch.Tensor, deadline_s: float | None
) -> torch.Tensor:
    tiling = tile_layout(layout)
    parts = sink_gradients_of_tiles(tiling.strips[transport.rank], merged, sinks)
    return sum_over_tiles(transport, tiling, parts, merged.lse.new_empty(len(sinks)), deadline_s)


DEFAULT = TorchMode(
    program=prepare.DEFAULT,
    arithmetic=TorchArithmetic,
    threads=lambda _: nullcontext,
    tiles_at_once=lambda *_: 1,
    with_sinks=lambda part, sinks: with_sinks(part, sinks, is_steady=False),
    sink_gradients=_share_of_sink_gradients,
)

REPRODUCIBLE = TorchMode(
    program=prepare.REPRODUCIBLE,
    arithmetic=SteadyArithmetic,
    threads=lambda device: partial(on_single_threads, device=device),
    tiles_at_once=tiles_at_once,
    with_sinks=lambda part, sinks: with_sinks(part, sinks, is_steady=True),
    sink_gradients=_sum_of_sink_gradients,
)


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

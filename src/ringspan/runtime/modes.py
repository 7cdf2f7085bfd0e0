"""What do the two modes do with tensors? The default one, and the reproducible one.

`program/prepare.py` holds what the modes do with schedules; this file adds kernels, arithmetic and sinks.

A sink is one more logit whose weight is discarded. It is applied after all partial results are merged, so it needs no
message. Its gradient is a sum over all queries: each rank has its share, or, in the reproducible mode, one share per
tile.

`sum_over_tiles` gives every rank the same bits. Each rank joins its own tiles as far as the tree allows, one after the
other, so that few are held at a time. Its unfinished nodes are cut into as many slices as there are ranks: rank r gets
slice r of every node, finishes the tree for this slice, and sends the result to all. If each rank has one unfinished
node, this moves the bytes of a ring all-reduce and divides the additions evenly.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from ringspan.kernels.base import Kernel, KernelRequest, Merged
from ringspan.kernels.softmax import Partial, steadily
from ringspan.layout import Layout
from ringspan.program import prepare
from ringspan.program.prepare import Mode
from ringspan.program.reproducible.grid import Strip, check_on_grid, strips
from ringspan.program.reproducible.tree import Node, Tree
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.reproducible_arithmetic import SteadyArithmetic, on_single_threads, tiles_at_once
from ringspan.transports.base import Transport, all_to_all


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


class Tiling(NamedTuple):
    """The tree over the tiles of a layout, and each rank's part of it."""

    layout: Layout
    fingerprint: str
    tree: Tree
    strips: tuple[tuple[Strip, ...], ...]
    """By rank: its tiles, ascending."""
    unfinished: tuple[tuple[Node, ...], ...]
    """By rank: the nodes its own tiles cannot finish."""


@functools.lru_cache(maxsize=64)
def tile_layout(layout: Layout) -> Tiling:
    """The tree over the tiles of a layout, which must lie on the grid."""
    check_on_grid("layout", layout)
    everything = strips(layout)
    by_rank = [tuple(strip for strip in everything if strip.owner == rank) for rank in range(layout.world_size)]
    tree = Tree(strip.tile for strip in everything)
    unfinished = tuple(tree.unfinished(strip.tile for strip in own) for own in by_rank)
    return Tiling(layout, layout.fingerprint(), tree, tuple(by_rank), unfinished)


def sum_over_tiles(
    transport: Transport, tiling: Tiling, parts: Iterable[torch.Tensor], like: torch.Tensor, deadline_s: float | None
) -> torch.Tensor:
    """The sum over the tiles of all ranks, with the same bits on each rank; a collective call.

    Args:
        transport: The transport to the other ranks.
        tiling: The tiling of the layout.
        parts: One flat tensor per tile of this rank, in order; they are overwritten.
        like: An uninitialised tensor of the parts' length, dtype and device, for ranks without tiles.
        deadline_s: The deadline of every wait for another rank; None for the transport's.
    """
    held = _Held(tiling.tree, {})
    for strip, part in zip(tiling.strips[transport.rank], parts, strict=True):
        held.add(tiling.tree.leaf(strip.tile), part)
    if not tiling.tree.tiles:
        return like.zero_()
    if transport.world_size > 1:
        return _finish(transport, tiling, held, like, deadline_s)
    return held.parts[tiling.tree.root]


def _finish(
    transport: Transport, tiling: Tiling, held: "_Held", like: torch.Tensor, deadline_s: float | None
) -> torch.Tensor:
    """Send slice r of every node to rank r, finish the tree there, and send the sums to all."""
    rank, world_size, nodes = transport.rank, transport.world_size, tiling.unfinished
    cuts = [len(like) * peer // world_size for peer in range(world_size + 1)]
    sends = [
        torch.stack([held.parts[node][first:last] for node in nodes[rank]]) if nodes[rank] else like.new_empty(0)
        for first, last in itertools.pairwise(cuts)
    ]
    shapes = [(len(theirs), cuts[rank + 1] - cuts[rank]) for theirs in nodes]
    received = all_to_all(transport, sends, shapes, deadline_s)
    finished = _Held(tiling.tree, {})
    for theirs, parts in zip(nodes, received, strict=True):
        for node, part in zip(theirs, parts, strict=True):
            finished.add(node, part)
    mine = finished.parts[tiling.tree.root]
    lengths = [(last - first,) for first, last in itertools.pairwise(cuts)]
    return torch.cat(all_to_all(transport, [mine] * world_size, lengths, deadline_s))


class _Held(NamedTuple):
    """The nodes of a tree that are known so far, with their sums."""

    tree: Tree
    parts: dict[Node, torch.Tensor]

    def add(self, node: Node, part: torch.Tensor) -> None:
        """Add a node, and join it with the nodes it completes."""
        nodes = set(self.parts)
        self.parts[node] = part
        for join in self.tree.add(nodes, node):
            self.parts[join.whole] = self.parts.pop(join.left).add_(self.parts.pop(join.right))

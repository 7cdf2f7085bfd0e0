"""How are the tiles of all ranks summed, so that every rank gets the same bits?

Each rank joins its own tiles as far as the tree allows, one after the other, so that few are held at a time. Its
unfinished nodes are cut into as many slices as there are ranks: rank r gets slice r of every node, finishes the tree
for this slice, and sends the result to all. If each rank has one unfinished node, this moves the bytes of a ring
all-reduce and divides the additions evenly.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ringspan.layout import Layout
from ringspan.program.reproducible.grid import Strip, check_on_grid, strips
from ringspan.program.reproducible.tree import Node, Tree
from ringspan.transports.all_to_all import all_to_all
from ringspan.transports.base import Transport


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

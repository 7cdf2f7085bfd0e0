"""How is a sum over the tiles of all ranks taken, so that every rank ends with the same bits?

Each rank takes its own tiles together as far as the tree allows, one after the other, so that few are held at a time.
What is left, its unfinished nodes, is cut into as many slices as there are ranks: rank r gets the r-th slice of every
node, finishes the tree for it, and sends the result to all. Where each rank is left with one node these are the bytes
of a ring all-reduce, and no rank adds more than its share.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ringspan.layout import Layout
from ringspan.program.reproducible.bind import Strip, check_on_grid, strips
from ringspan.program.reproducible.tree import Node, Tree
from ringspan.transports.all_to_all import all_to_all
from ringspan.transports.base import Transport


class Tiling(NamedTuple):
    """What follows from a layout alone."""

    layout: Layout
    fingerprint: str
    tree: Tree
    strips: tuple[tuple[Strip, ...], ...]
    """By rank: its tiles, ascending."""
    unfinished: tuple[tuple[Node, ...], ...]
    """By rank: the nodes its own tiles leave."""


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
    transport: Transport, tiling: Tiling, parts: Iterable[torch.Tensor], like: torch.Tensor, deadline_s: float
) -> torch.Tensor:
    """The sum over the tiles of all ranks, the same bits on each. All ranks must call this, as they have agreed to.

    Args:
        transport: To the other ranks.
        tiling: Of the layout.
        parts: One flat tensor for each tile of this rank, in order; they are added into each other.
        like: An empty tensor of the parts' dtype and device, for ranks without tiles; its length is theirs.
        deadline_s: Of every wait for another rank.
    """
    held = _Held(tiling.tree, {})
    for strip, part in zip(tiling.strips[transport.rank], parts, strict=True):
        held.add(tiling.tree.leaf(strip.tile), part)
    if not tiling.tree.tiles:
        return like.zero_()
    if transport.world_size > 1:
        return _finish(transport, tiling, held, like, deadline_s)
    return held.parts[tiling.tree.root]


def _finish(transport: Transport, tiling: Tiling, held: "_Held", like: torch.Tensor, deadline_s: float) -> torch.Tensor:
    """Slice r of every node to rank r, the tree finished there, the sums back to all."""
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
    """The nodes of a tree that are there so far, with their sums."""

    tree: Tree
    parts: dict[Node, torch.Tensor]

    def add(self, node: Node, part: torch.Tensor) -> None:
        """One more; it is added to those it completes."""
        nodes = set(self.parts)
        self.parts[node] = part
        for join in self.tree.add(nodes, node):
            self.parts[join.whole] = self.parts.pop(join.left).add_(self.parts.pop(join.right))

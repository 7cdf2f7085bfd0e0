"""How is a sum over the tiles of all ranks taken, so that every rank ends with the same bits?

Each rank takes its own tiles together as far as the tree allows, one after the other, so that few are held at a time.
What is left, its unfinished nodes, is cut into as many slices as there are ranks: rank r gets the r-th slice of every
node, finishes the tree for it, and sends the result to all. Where each rank is left with one node these are the bytes
of a ring all-reduce, and no rank adds more than its share.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ringspan.arguments import check_timeout, check_world_size
from ringspan.collectives import exchange
from ringspan.contract import Signature
from ringspan.errors import RingspanError
from ringspan.grid import Strip, check_on_grid, strips
from ringspan.layout import Layout
from ringspan.session import Session, session_of
from ringspan.tree import Node, Tree


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


class Ranks(NamedTuple):
    """This rank's side of one call: who it is, which tiles it has, whom it talks to and how long it waits."""

    session: Session
    tiling: Tiling
    deadline_s: float

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.transport.rank

    @property
    def tiles(self) -> tuple[Strip, ...]:
        """The tiles of this rank."""
        return self.tiling.strips[self.rank]

    def agree(self, what: str, **fields: object) -> None:
        """All ranks are in the same call."""
        signature = Signature.of({"call": what, **fields, "layout": self.tiling.fingerprint})
        self.session.contract.agree(signature, self.deadline_s)

    def sum_over_tiles(self, what: str, parts: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The sum over the tiles of all ranks, the same bits on each. All ranks must call this.

        Args:
            what: The call, as it is named if another rank makes another one.
            parts: One flat tensor for each tile of this rank, in order; they are added into each other.
            like: An empty tensor of the parts' dtype and device, for ranks without tiles; its length is theirs.
        """
        held = _Held(self.tiling.tree, {})
        for strip, part in zip(self.tiles, parts, strict=True):
            held.add(self.tiling.tree.leaf(strip.tile), part)
        self.agree(what, length=len(like), dtype=like.dtype)
        if not self.tiling.tree.tiles:
            return like.zero_()
        if self.session.transport.world_size > 1:
            return self._finish(held, like)
        return held.parts[self.tiling.tree.root]

    def _finish(self, held: "_Held", whole: torch.Tensor) -> torch.Tensor:
        """Slice r of every node to rank r, the tree finished there, the sums back to all: in `whole`."""
        world_size = self.session.transport.world_size
        cuts = [len(whole) * rank // world_size for rank in range(world_size + 1)]
        own = slice(*cuts[self.rank : self.rank + 2])
        nodes = self.tiling.unfinished
        sends = [
            torch.stack([held.parts[node][first:last] for node in nodes[self.rank]])
            if nodes[self.rank]
            else whole.new_empty(0)
            for first, last in itertools.pairwise(cuts)
        ]
        shapes = [(len(theirs), own.stop - own.start) for theirs in nodes]
        received = exchange(self.session, sends, shapes, self.deadline_s)
        finished = _Held(self.tiling.tree, {})
        for theirs, parts in zip(nodes, received, strict=True):
            for node, part in zip(theirs, parts, strict=True):
                finished.add(node, part)
        mine = finished.parts[self.tiling.tree.root]
        lengths = [(last - first,) for first, last in itertools.pairwise(cuts)]
        return torch.cat(exchange(self.session, [mine] * world_size, lengths, self.deadline_s))


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


def open_ranks(layout: Layout, group: Any, timeout_s: float | None, check: Callable[[int], None]) -> Ranks:
    """The ranks of a call whose arguments are in order; else the others are told why it is refused.

    Args:
        layout: Of the call.
        group: Of the call.
        timeout_s: Of the call.
        check: Raises if the tensors do not fit a shard of so many tokens.
    """
    session = session_of(group)
    deadline_s = session.transport.timeout_s
    try:
        deadline_s = check_timeout(timeout_s, deadline_s)
        check_world_size(layout, session.transport.world_size)
        tiling = tile_layout(layout)
        check(layout.shard_len(session.transport.rank))
    except RingspanError as error:
        session.contract.refuse(f"{type(error).__name__}: {error}", deadline_s)
        raise
    return Ranks(session, tiling, deadline_s)

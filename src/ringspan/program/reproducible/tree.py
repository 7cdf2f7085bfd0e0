"""In which order are the parts of a sum added, so that its bits do not depend on which rank computed which part?

A floating-point sum depends on the order of its additions. Here the tiles alone fix the order: the contributing tiles
are the leaves of a binary tree over the tile numbers, and two parts are added only where the tree joins them. A rank
that holds some of the leaves joins as many nodes as it can and sends the unfinished ones on; the rank that holds both
children of a node joins them. A tile without a contribution is not a leaf, so every inner node has two children.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TILE = 512
"""Tokens of one tile: position p is in tile p // TILE, whatever the layout; the last tile may be shorter."""

_NEVER = 1 << 30
"""A level above the root."""


class Node(NamedTuple):
    """A node of the tree, as the run of its leaves; leaves are numbered in the order of their tiles."""

    first: int
    last: int


class Join(NamedTuple):
    """Two nodes that are joined: the sum of `left` and `right`, in this order."""

    left: Node
    right: Node

    @property
    def whole(self) -> Node:
        return Node(self.left.first, self.right.last)


class Tree:
    """The tree over the tiles that contribute to a sum; siblings have the longest common prefix of tile numbers.

    It is the binary tree over all tile numbers, without nodes that have fewer than two children.
    """

    def __init__(self, tiles: Iterable[int]) -> None:
        self.tiles = sorted(set(tiles))
        # The level at which the leaves on both sides of a gap meet; beyond the ends, none.
        self._meets = [_NEVER, *((a ^ b).bit_length() for a, b in itertools.pairwise(self.tiles)), _NEVER]
        self._leaves = {tile: Node(i, i) for i, tile in enumerate(self.tiles)}

    @property
    def root(self) -> Node:
        """The node of the whole sum."""
        return Node(0, len(self.tiles) - 1)

    def leaf(self, tile: int) -> Node:
        return self._leaves[tile]

    def sibling(self, node: Node) -> Node | None:
        """The node that this one is joined with; None for the root."""
        before, after = self._meets[node.first], self._meets[node.last + 1]
        first, last = node.first - 1, node.last + 1
        if before < after:
            while self._meets[first] < before:
                first -= 1
            return Node(first, node.first - 1)
        if after < before:
            while self._meets[last + 1] < after:
                last += 1
            return Node(node.last + 1, last)
        return None

    def add(self, held: set[Node], node: Node) -> Iterator[Join]:
        """Add a node to those held, and yield every join that becomes possible, in order; `held` is updated."""
        held.add(node)
        while (other := self.sibling(node)) in held:
            assert other is not None
            join = Join(*sorted((node, other)))
            held -= {node, other}
            node = join.whole
            held.add(node)
            yield join

    def unfinished(self, tiles: Iterable[int]) -> tuple[Node, ...]:
        """The nodes that remain when these tiles are joined as far as the tree allows."""
        held: set[Node] = set()
        for tile in tiles:
            for _ in self.add(held, self.leaf(tile)):
                pass
        return tuple(sorted(held))

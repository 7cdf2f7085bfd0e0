"""In which order are the parts of a sum taken together, so that its bits do not depend on who computed which?

Floating-point sums depend on their order. Here it is fixed by the tiles alone: those that contribute are the leaves of
a binary tree over the tile numbers, and two parts are taken together only where the tree says so. A rank that holds
some of the leaves goes as far up as they allow and passes on the nodes it could not finish; whoever holds both children
of a node finishes it. A tile that contributes nothing is no leaf at all, so a node always has two children.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

TILE = 512
"""Tokens of one tile: position p is in tile p // TILE, whatever the layout; the last tile may be shorter."""

_NEVER = 1 << 30
"""A level that no two tiles meet at."""


class Node(NamedTuple):
    """A run of leaves, numbered in the order of their tiles, that one node of the tree stands for."""

    first: int
    last: int


class Join(NamedTuple):
    """Two nodes that become one: the sum of `left` and `right`, in this order."""

    left: Node
    right: Node

    @property
    def whole(self) -> Node:
        """The node made of both."""
        return Node(self.left.first, self.right.last)


class Tree:
    """The tree over the tiles that contribute to a sum: siblings are those whose numbers have the most bits in common.

    That is the binary tree over all tile numbers, with the nodes left out that have no more than one child.
    """

    def __init__(self, tiles: Iterable[int]) -> None:
        self.tiles = sorted(set(tiles))
        # How far up the leaves on both sides of a gap meet; nothing is met beyond the ends.
        self._meets = [_NEVER, *((a ^ b).bit_length() for a, b in itertools.pairwise(self.tiles)), _NEVER]
        self._leaves = {tile: Node(i, i) for i, tile in enumerate(self.tiles)}

    @property
    def root(self) -> Node:
        """The node that is the whole sum."""
        return Node(0, len(self.tiles) - 1)

    def leaf(self, tile: int) -> Node:
        """The node of one tile."""
        return self._leaves[tile]

    def sibling(self, node: Node) -> Node | None:
        """The node that this one is to be taken together with; None for the root."""
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
        """Hold one more node: every join that has become possible, in order. What is joined is held as the whole."""
        held.add(node)
        while (other := self.sibling(node)) in held:
            assert other is not None
            join = Join(*sorted((node, other)))
            held -= {node, other}
            node = join.whole
            held.add(node)
            yield join

    def unfinished(self, tiles: Iterable[int]) -> tuple[Node, ...]:
        """The nodes that are left when these tiles are taken together as far as the tree allows."""
        held: set[Node] = set()
        for tile in tiles:
            for _ in self.add(held, self.leaf(tile)):
                pass
        return tuple(sorted(held))

"""Which cells does the grid of the reproducible mode have, and which layouts lie on it?

Queries and keys are cut where positions cross a multiple of TILE. A layout lies on the grid if no tile is split between
ranks.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.errors import LayoutError, UnsupportedError
from ringspan.layout import Layout, contiguous, count_pairs, striped, zigzag
from ringspan.mask import Coverage, Mask
from ringspan.program.pieces import Piece, PieceKind, cut_pieces
from ringspan.program.problem import Problem
from ringspan.program.reproducible.tree import TILE, Node, Tree
from ringspan.schedule import Block
from ringspan.span import Positions, Span


class Strip(NamedTuple):
    """The tokens of one tile: the rank that holds them, and their rows in its shard."""

    tile: int
    owner: int
    rows: slice
    positions: Positions

    @property
    def length(self) -> int:
        """Number of tokens: TILE, or fewer in an incomplete tile."""
        return len(self.positions)


@lru_cache(maxsize=256)
def strips(layout: Layout) -> tuple[Strip, ...]:
    """All tiles of a layout, ascending; a tile on several ranks is listed once per rank."""
    found = []
    for rank in range(layout.world_size):
        positions = layout.positions(rank)
        tiles, firsts = np.unique(positions // TILE, return_index=True)
        cuts = [*firsts.tolist(), len(positions)]
        found += [
            Strip(tile, rank, slice(first, end), positions[first:end])
            for tile, (first, end) in zip(tiles.tolist(), itertools.pairwise(cuts), strict=True)
        ]
    return tuple(sorted(found, key=lambda strip: strip.tile))


def check_grid(problem: Problem) -> None:
    """Refuse layouts that do not lie on the grid; the error proposes the nearest that does."""
    check_on_grid("layout", problem.layout)
    check_on_grid("kv_layout", problem.kv_layout)


def check_on_grid(name: str, layout: Layout) -> None:
    """Refuse a layout that does not lie on the grid; the error proposes the nearest that does."""
    if layout.replicated:
        raise UnsupportedError(
            "with reproducible=True a layout has no replicated positions: the sum of their gradients would depend on "
            "the number of ranks",
            argument=name,
            value=layout,
            remedy="give every position one owner",
        )
    tiles = [strip.tile for strip in strips(layout)]
    if len(set(tiles)) < len(tiles):
        raise LayoutError(
            f"with reproducible=True no tile of {TILE} positions (rs.TILE) may be on two ranks",
            argument=name,
            value=layout,
            remedy=f"use the nearest such layout, {_nearest(layout)}",
        )


def _nearest(layout: Layout) -> str:
    """From the builder that made the layout, or else with every tile on the rank that holds most of it."""
    positions = layout.all_positions()
    start, seq_len = int(positions[0]), len(positions)
    at = f", start={start}" if start else ""
    if start % TILE == 0 and positions[-1] - start + 1 == seq_len:
        for name, build in (("contiguous", contiguous), ("zigzag", zigzag)):
            if build(seq_len, layout.world_size, start=start) == layout:
                return f"rs.{name}({seq_len}, {layout.world_size}, align=rs.TILE{at})"
        if any(len(spans) == 1 and spans[0].step > 1 for spans in layout.spans_by_rank):
            near = striped(seq_len, layout.world_size, block=TILE, start=start)
            return f"rs.striped({seq_len}, {layout.world_size}, block=rs.TILE{at}) = {near}"
    most: dict[int, Strip] = {}
    for strip in strips(layout):
        if strip.tile not in most or strip.length > most[strip.tile].length:
            most[strip.tile] = strip
    spans: list[list[Span]] = [[] for _ in range(layout.world_size)]
    tiles = positions // TILE
    for tile, strip in sorted(most.items()):
        spans[strip.owner] += _spans(positions[tiles == tile])
    return f"{Layout(tuple(map(tuple, spans)))}"


def _spans(positions: Positions) -> list[Span]:
    """Ascending positions as runs."""
    cuts = np.flatnonzero(np.diff(positions) > 1) + 1
    return [Span(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]


class Grid:
    """The cells of a problem: their visible pairs, and for each tile's sum the tree over contributing tiles."""

    def __init__(self, mask: Mask, layout: Layout, kv_layout: Layout) -> None:
        self.mask = mask
        self.q, self.kv = strips(layout), strips(kv_layout)
        self.num_rows = 1 if mask.rows is None else len(mask.rows)
        self.pairs = count_pairs(mask, [q.positions for q in self.q], [_spans(kv.positions) for kv in self.kv])
        self._q_of, self._kv_of = _by_owner(self.q, layout), _by_owner(self.kv, kv_layout)
        self._trees: dict[tuple[bool, int], Tree] = {}

    def strips_of(self, block: Block) -> dict[int, Strip]:
        """The tiles of a block, by their index in `q` or `kv`."""
        return (self._kv_of if block.kind in ("kv", "dkv") else self._q_of)[block.owner]

    def tree(self, block: Block, index: int) -> Tree:
        """The tree of one tile of a sum: over key tiles, or for dkv over query tiles."""
        is_dkv = block.kind == "dkv"
        if (is_dkv, index) not in self._trees:
            seen = self.pairs[:, index] if is_dkv else self.pairs[index]
            others = self.q if is_dkv else self.kv
            self._trees[is_dkv, index] = Tree(others[i].tile for i in np.flatnonzero(seen).tolist())
        return self._trees[is_dkv, index]

    def nodes(self, block: Block, owners: int) -> Iterator[tuple[int, Node]]:
        """The nodes, tile by tile, of a part of a sum to which the tiles of these owners (a bit set) were added."""
        tiles = [strip.tile for strip in (self.q if block.kind == "dkv" else self.kv) if owners >> strip.owner & 1]
        for index in self.strips_of(block):
            tree = self.tree(block, index)
            present = set(tree.tiles)
            for node in tree.unfinished(tile for tile in tiles if tile in present):
                yield index, node

    def runs(self, qs: list[int], kv: int) -> Iterator[list[int]]:
        """Neighbouring query tiles that see keys: in one run if all are whole and see a whole tile, else one by one."""
        for is_uniform, run in itertools.groupby(qs, lambda q: self.pairs[q, kv] == TILE * TILE * self.num_rows):
            if is_uniform:
                yield list(run)
            else:
                yield from ([q] for q in run if self.pairs[q, kv])

    def cut(self, qs: list[int], kv: int) -> tuple[Piece, ...]:
        """The pieces of a cell; a cell of several query tiles is a full rectangle."""
        height, width = sum(self.q[q].length for q in qs), self.kv[kv].length
        if self.pairs[qs, kv].sum() == height * width * self.num_rows:
            return (Piece(slice(0, height), slice(0, width), PieceKind.FULL, None, None),)
        return cut_pieces(self.mask, self.q[qs[0]].positions, self.kv[kv].positions)


def _by_owner(all_strips: tuple[Strip, ...], layout: Layout) -> list[dict[int, Strip]]:
    found: list[dict[int, Strip]] = [{} for _ in range(layout.world_size)]
    for index, strip in enumerate(all_strips):
        found[strip.owner][index] = strip
    return found


@lru_cache(maxsize=64)
def grid_of(mask: Mask, layout: Layout, kv_layout: Layout) -> Grid:
    """The cells of a problem, made once."""
    return Grid(mask, layout, kv_layout)


class Sibling(NamedTuple):
    """A held node that a new one is joined with, and on which side it stands."""

    slot: int
    is_left: bool


class Rise(NamedTuple):
    """The way up of a new node: it is joined with these siblings in turn, and the result is kept in a slot."""

    siblings: tuple[Sibling, ...]
    slot: int


class Cell(NamedTuple):
    """One tile of queries against one tile of keys: rows of the two blocks, and pieces relative to them.

    Each cell adds one leaf to each of its sums; `rises` says where: in the forward pass that of out, in the backward
    pass those of dq and dkv. A forward cell may be several whole tiles of queries, and then has as many rises.
    """

    q: slice
    kv: slice
    pieces: tuple[Piece, ...]
    rises: tuple[Rise, ...]


class GridTile(NamedTuple):
    """A q block × kv block tile cut into cells of the grid."""

    q: Block
    kv: Block
    cells: tuple[Cell, ...]
    coverage: Coverage
    pairs: int
    sums: tuple[Block, ...]

    def all_pieces(self) -> Iterator[Piece]:
        """Every kernel call of the tile, in rows of the two blocks."""
        for cell in self.cells:
            for piece in cell.pieces:
                yield piece._replace(q=_shifted(piece.q, cell.q.start), kv=_shifted(piece.kv, cell.kv.start))


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)

"""How is a program bound so that the number of ranks does not change a bit of the result?

Queries and keys are cut where positions cross a multiple of TILE, so a cell (one tile of queries against one tile of
keys) is the same on whichever rank it is computed. The results of a tile's cells are joined in the order of its `Tree`.
The order follows from mask, layouts and schedule alone: binding walks each rank's program once, without numbers, and
fills in the slots of the nodes it holds and the siblings they are joined with. A part of a sum travels as its
unfinished nodes, one after the other; sender and receiver both know how many there are.

A layout lies on the grid if no tile is split between ranks.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.algorithms import ALGORITHMS, list_takers
from ringspan.errors import LayoutError, ScheduleError, UnsupportedError
from ringspan.layout import Layout, contiguous, count_pairs, striped, zigzag
from ringspan.mask import Coverage, Mask
from ringspan.program.bind import BoundProgram, Compute, Exchange, Message
from ringspan.program.pieces import Piece, PieceKind, cut_pieces
from ringspan.program.problem import Problem
from ringspan.program.reproducible.cells import Cell, GridTile, Rise, Sibling
from ringspan.program.reproducible.tree import TILE, Node, Tree
from ringspan.schedule import (
    ALL,
    AllMerged,
    Arrived,
    Attend,
    Block,
    Do,
    Post,
    Schedule,
    Transfer,
    Visible,
    compile_rank,
    visible_blocks,
)
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


_grid = lru_cache(maxsize=64)(Grid)


class NodePart(NamedTuple):
    """One node of a travelling part: its rows in the message, and how its receiver joins it."""

    rows: slice
    rise: Rise


class Root(NamedTuple):
    """A finished node, and its rows in a sum."""

    block: Block
    rows: slice
    slot: int


class Growth(NamedTuple):
    """The tree nodes that a rank's program sends, receives and ends with.

    `leaving` and `arriving` are the nodes of each message of a sum, by step and transfer. `roots` are the nodes this
    rank ends with, and `complete` the sums that consist of roots only. `pending` is the largest number of nodes that
    one tile of a sum has at any time on this rank.
    """

    leaving: dict[tuple[int, Transfer], tuple[Root, ...]]
    arriving: dict[tuple[int, Transfer], tuple[NodePart, ...]]
    roots: tuple[Root, ...]
    complete: frozenset[Block]
    pending: int


class Grown(NamedTuple):
    """A bound program, and the growth of its trees."""

    program: BoundProgram
    growth: Growth


def bind_grid(schedule: Schedule, rank: int, problem: Problem, at_once: int = 1) -> Grown:
    """Fill in one rank's cells, tree nodes and message sizes.

    In a forward pass up to `at_once` neighbouring tiles of queries that see all of a tile of keys are one cell, for
    kernels whose rows do not depend on how many rows there are.
    """
    return _Binder(schedule, rank, problem, at_once).bind()


class _Binder:
    """Walks one rank's program and tracks the nodes it holds."""

    def __init__(self, schedule: Schedule, rank: int, problem: Problem, at_once: int) -> None:
        check_grid(problem)
        self.rank = rank
        self.at_once = at_once
        self.problem = problem
        self.grid = _grid(problem.mask, problem.layout, problem.kv_layout)
        self.program = compile_rank(schedule, rank)
        self.parts = _parts(schedule, visible_blocks(problem.mask, problem.layout, problem.kv_layout))
        self.held: defaultdict[tuple[Block, int], set[Node]] = defaultdict(set)
        self.slots: dict[tuple[Block, int, Node], int] = {}
        self.leaving: dict[tuple[int, Transfer], tuple[Root, ...]] = {}
        self.arriving: dict[tuple[int, Transfer], tuple[NodePart, ...]] = {}
        self.pending = 0

    def bind(self) -> Grown:
        program = tuple(map(self._bound, self.program))
        roots = tuple(self._roots())
        growth = Growth(self.leaving, self.arriving, roots, frozenset(self._complete(roots)), self.pending)
        return Grown(program, growth)  # type: ignore[arg-type]

    def _bound(self, instruction: object) -> object:
        match instruction:
            case Post(step, sends, receives):
                for transfer in sends:
                    if transfer.block.is_sum:
                        self.leaving[step, transfer] = tuple(self._leave(transfer.block))
                return Exchange(step, self._messages(step, sends), self._messages(step, receives))
            case Do(step, attend):
                return Compute(step, tuple(self._tiles(attend)))
            case Arrived(posted, transfer) if transfer.block.is_sum:
                self.arriving[posted, transfer] = tuple(self._arrive(posted, transfer))
            case AllMerged(_, block):
                raise UnsupportedError(
                    f"with reproducible=True {block} cannot be merged in rank order",
                    argument="reproducible",
                    value=True,
                    remedy="leave it out",
                )
        return instruction

    def _messages(self, step: int, transfers: tuple[Transfer, ...]) -> tuple[Message, ...]:
        def message(transfer: Transfer) -> Message:
            block = transfer.block
            if not block.is_sum:
                return Message(transfer, self.problem.block_shapes(block), self.problem.block_bytes(block))
            *_, last = self._stacked(block, [index for index, _ in self._nodes(step, transfer)])
            shapes = tuple((*shape[:-2], last.stop, shape[-1]) for shape in self.problem.block_shapes(block))
            return Message(transfer, shapes, sum(map(math.prod, shapes)) * self.problem.shapes.sum_itemsize)

        return tuple(map(message, transfers))

    def _nodes(self, step: int, transfer: Transfer) -> list[tuple[int, Node]]:
        return list(self.grid.nodes(transfer.block, self.parts[step, transfer]))

    def _stacked(self, block: Block, indices: list[int]) -> Iterator[slice]:
        """The rows of the nodes of these tiles, concatenated."""
        stop = 0
        for index in indices:
            start, stop = stop, stop + self.grid.strips_of(block)[index].length
            yield slice(start, stop)

    def _leave(self, block: Block) -> Iterator[Root]:
        """All nodes of a part that is sent, tile by tile."""
        nodes = [(index, node) for index in self.grid.strips_of(block) for node in sorted(self.held[block, index])]
        for (index, node), rows in zip(nodes, self._stacked(block, [index for index, _ in nodes]), strict=True):
            self.held[block, index].remove(node)
            yield Root(block, rows, self.slots[block, index, node])

    def _arrive(self, posted: int, transfer: Transfer) -> Iterator[NodePart]:
        nodes = self._nodes(posted, transfer)
        stacked = self._stacked(transfer.block, [index for index, _ in nodes])
        for (index, node), rows in zip(nodes, stacked, strict=True):
            yield NodePart(rows, self._rise(transfer.block, index, node))

    def _tiles(self, attend: Attend) -> Iterator[GridTile]:
        for q in attend.qs:
            for kv in attend.kvs:
                if q.heads is not None and kv.heads is not None:
                    self._check_groups(q.heads, kv.heads)
                tile = self._tile(q, kv)
                if tile.pairs:
                    yield tile

    def _check_groups(self, q_heads: range, kv_heads: range) -> None:
        heads = self.problem.shapes.heads
        if len(q_heads) != len(kv_heads) * heads.group:
            raise UnsupportedError(
                f"over more ranks than the {heads.num_kv_heads} KV heads, exchanging heads splits the query heads that "
                "share a KV head, and the sum of their gradients would depend on the number of ranks",
                argument="reproducible",
                value=True,
                remedy=f"exchange heads over {heads.num_kv_heads} ranks or fewer, or use an algorithm that keeps all "
                f"heads: {', '.join(name for name in ALGORITHMS if name not in list_takers('heads'))}",
            )

    def _tile(self, q: Block, kv: Block) -> GridTile:
        backward = q.kind == "q_grad"
        of_q, of_kv = Block("dq" if backward else "out", q.owner, q.heads), Block("dkv", kv.owner, kv.heads)
        q_strips, kv_strips = self.grid.strips_of(q), self.grid.strips_of(kv)
        cells = []
        for rows in _groups(list(q_strips), 1 if backward else self.at_once):
            for j, kv_strip in kv_strips.items():
                for each in self.grid.runs(rows, j):
                    rises = [self._leaf(of_q, i, kv_strip.tile) for i in each]
                    if backward:
                        rises.append(self._leaf(of_kv, j, q_strips[each[0]].tile))
                    at = slice(q_strips[each[0]].rows.start, q_strips[each[-1]].rows.stop)
                    cells.append(Cell(at, kv_strip.rows, self.grid.cut(each, j), tuple(rises)))
        pairs = int(self.grid.pairs[np.ix_(list(q_strips), list(kv_strips))].sum())
        whole = len(self.problem.positions(q)) * len(self.problem.positions(kv)) * self.grid.num_rows
        coverage = Coverage.EMPTY if not pairs else Coverage.FULL if pairs == whole else Coverage.PARTIAL
        return GridTile(q, kv, tuple(cells), coverage, pairs, (of_q, of_kv) if backward else (of_q,))

    def _leaf(self, block: Block, index: int, tile: int) -> Rise:
        return self._rise(block, index, self.grid.tree(block, index).leaf(tile))

    def _rise(self, block: Block, index: int, node: Node) -> Rise:
        """Hold one more node of a tile's sum."""
        held = self.held[block, index]
        siblings = []
        for join in self.grid.tree(block, index).add(held, node):
            is_left = join.right == node
            siblings.append(Sibling(self.slots[block, index, join.left if is_left else join.right], is_left))
            node = join.whole
        self.pending = max(self.pending, len(held))
        return Rise(tuple(siblings), self.slots.setdefault((block, index, node), len(self.slots)))

    def _roots(self) -> Iterator[Root]:
        """The root of every tile of this rank's sums."""
        for (block, index), held in self.held.items():
            if not held:
                continue
            if held != {self.grid.tree(block, index).root} or block.owner not in (self.rank, ALL):
                raise ScheduleError(
                    f"with reproducible=True {block} cannot be finished on rank {self.rank}",
                    remedy="use the same heads for a sum wherever it is added to",
                )
            (node,) = held
            yield Root(block, self.grid.strips_of(block)[index].rows, self.slots[block, index, node])

    def _complete(self, roots: tuple[Root, ...]) -> Iterator[Block]:
        num_rows: defaultdict[Block, int] = defaultdict(int)
        for block, rows, _ in roots:
            num_rows[block] += rows.stop - rows.start
        for block, number in num_rows.items():
            if block.heads is None and number == self.problem.block_shapes(block)[0][-2]:
                yield block


def _groups(indices: list[int], at_once: int) -> Iterator[list[int]]:
    for first in range(0, len(indices), at_once):
        yield indices[first : first + at_once]


@lru_cache(maxsize=64)
def _parts(schedule: Schedule, visible: Visible) -> dict[tuple[int, Transfer], int]:
    """By step and transfer of a sum: the owners (a bit set) whose tiles were added to the part it carries."""
    held: list[defaultdict[Block, int]] = [defaultdict(int) for _ in range(schedule.world_size)]
    parts = {}
    for t, step in enumerate(schedule.steps):
        moving = [(transfer, held[transfer.src].pop(transfer.block, 0)) for transfer in step.transfers]
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                for block, owners in visible.contributions(attend):
                    held[rank][block] |= owners
        for transfer, owners in moving:
            if transfer.block.is_sum:
                parts[t, transfer] = owners
                held[transfer.dst][transfer.block] |= owners
    return parts

"""How is a program bound so that the number of ranks does not change a bit of the result?

Queries and keys are cut where positions cross a multiple of TILE, so a cell (one tile of queries against one tile of
keys) is the same on whichever rank it is computed. The results of a tile's cells are joined in the order of its `Tree`.
The order follows from mask, layouts and schedule alone: binding walks each rank's program once, without numbers, and
fills in the slots of the nodes it holds and the siblings they are joined with. A part of a sum travels as its
unfinished nodes, one after the other; sender and receiver both know how many there are.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.algorithms import ALGORITHMS, list_takers
from ringspan.errors import ScheduleError, UnsupportedError
from ringspan.mask import Coverage
from ringspan.program.bind import BoundProgram, Compute, Exchange, Message
from ringspan.program.problem import Problem
from ringspan.program.reproducible.grid import Cell, GridTile, Rise, Sibling, check_grid, grid_of
from ringspan.program.reproducible.tree import Node
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
        self.grid = grid_of(problem.mask, problem.layout, problem.kv_layout)
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

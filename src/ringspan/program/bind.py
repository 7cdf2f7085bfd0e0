"""From a schedule to instructions with sizes: a rank's program, bound to layouts, a mask and shapes.

A schedule knows blocks by name only. Binding gives the names positions, bytes and pieces once, so that a repeated call
slices and sends without asking a mask or a layout again.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ringspan.mask import Coverage
from ringspan.program.pieces import Piece
from ringspan.program.problem import Shape, Sizes
from ringspan.schedule import AllMerged, Arrived, Attend, Block, Do, Drop, Post, Program, Sent, Transfer


class Tile(NamedTuple):
    """A q block × kv block tile: its pieces, how much of it is visible, and the sums it adds to.

    `firsts[i]`: nothing has been added to the queries of piece i before, so they may be overwritten. `begins[j]`: the
    first piece covers all rows of sum j, so the sum need not exist before.
    """

    q: Block
    kv: Block
    pieces: tuple[Piece, ...]
    coverage: Coverage
    pairs: int
    sums: tuple[Block, ...]
    firsts: tuple[bool, ...]
    begins: tuple[bool, ...]

    def all_pieces(self) -> Iterator[Piece]:
        """Every kernel call of the tile, in rows of the two blocks."""
        yield from self.pieces


class BoundTile(Protocol):
    """A tile of either mode, as far as the executor reads it; the rest is for the mode's own rank state."""

    @property
    def q(self) -> Block: ...
    @property
    def kv(self) -> Block: ...
    @property
    def coverage(self) -> Coverage: ...
    @property
    def pairs(self) -> int: ...
    def all_pieces(self) -> Iterator[Piece]: ...


class Message(NamedTuple):
    """A transfer with the shapes and the bytes of its arrays."""

    transfer: Transfer
    shapes: tuple[Shape, ...]
    nbytes: int


class Exchange(NamedTuple):
    """The messages of one step."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Compute(NamedTuple):
    """The tiles of one step."""

    step: int
    tiles: tuple[BoundTile, ...]


BoundProgram = tuple[Exchange | Compute | Arrived | AllMerged | Sent | Drop, ...]


def bind(program: Program, problem: Sizes) -> BoundProgram:
    """Fill in shapes, bytes and pieces."""
    begun: list[Block] = []

    def messages(transfers: tuple[Transfer, ...]) -> tuple[Message, ...]:
        return tuple(Message(t, problem.block_shapes(t.block), problem.block_bytes(t.block)) for t in transfers)

    def tiles(attend: Attend) -> Iterator[Tile]:
        for q, kv in itertools.product(attend.qs, attend.kvs):
            tile = _tile(problem, q, kv, begun)
            if tile.pieces:
                begun.extend(tile.sums)
                yield tile

    def bound(instruction: object) -> object:
        match instruction:
            case Post(step, sends, receives):
                return Exchange(step, messages(sends), messages(receives))
            case Do(step, attend):
                return Compute(step, tuple(tiles(attend)))
            case Arrived(_, transfer):
                begun.append(transfer.block)
            case AllMerged(_, block):
                begun.append(block)
        return instruction

    return tuple(map(bound, program))  # type: ignore[arg-type]


def _tile(problem: Sizes, q: Block, kv: Block, begun: list[Block]) -> Tile:
    pieces, whole = problem.cut_tile(q, kv)
    pairs = sum(_num_pairs(piece) for piece in pieces)
    coverage = Coverage.EMPTY if not pairs else Coverage.FULL if pairs == whole else Coverage.PARTIAL
    sums = (
        (Block("out", q.owner, q.heads),)
        if q.kind == "q"
        else (Block("dq", q.owner, q.heads), Block("dkv", kv.owner, kv.heads))
    )
    is_new = [not any(block.overlaps(other) for other in begun) for block in sums]
    begins = tuple(
        new and _begins(problem, block, pieces, rows)
        for new, block, rows in zip(is_new, sums, ([it.q for it in pieces], [it.kv for it in pieces]), strict=False)
    )
    return Tile(q, kv, pieces, coverage, pairs, sums, _firsts(pieces, not is_new[0]), begins)


def _begins(problem: Sizes, block: Block, pieces: tuple[Piece, ...], rows: Sequence[slice]) -> bool:
    """True if the first piece adds to every row of a sum; `rows` are those that each piece adds to."""
    if not pieces or block.heads is not None or pieces[0].rows is not None:
        return False
    return rows[0] == slice(0, problem.block_shapes(block)[0][-2])


def _firsts(pieces: tuple[Piece, ...], has_begun: bool) -> tuple[bool, ...]:
    """For each piece: True if no other tile and no earlier piece has added to its rows."""

    def is_first(index: int) -> bool:
        rows = pieces[index].q
        return pieces[index].rows is None and all(
            rows.stop <= before.q.start or before.q.stop <= rows.start for before in pieces[:index]
        )

    return tuple(not has_begun and is_first(index) for index in range(len(pieces)))


def _num_pairs(piece: Piece) -> int:
    """Visible pairs of a piece, over all its batch rows."""
    num_rows = len(piece.rows) if piece.rows is not None else 1
    height: int = piece.q.stop - piece.q.start
    width: int = piece.kv.stop - piece.kv.start
    if piece.kind.is_triangle:
        return num_rows * height * (height + 1) // 2
    visible = height * width if piece.allowed is None else int(np.count_nonzero(piece.allowed))
    return num_rows * visible

"""Which rows, how many bytes, cut into which pieces: a program bound to real layouts, a mask and shapes.

A schedule knows blocks by name only. Here the names get positions and sizes, once per combination and cached, so that
running a bound program slices and sends without computing anything about masks or layouts again.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Real
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ringspan.errors import LayoutError, MaskError, ShapeError
from ringspan.layout import Layout
from ringspan.mask import Coverage, Mask
from ringspan.program.pieces import Piece, cut_pieces
from ringspan.schedule import ALL, AllMerged, Arrived, Attend, Block, Do, Drop, Heads, Post, Program, Sent, Transfer
from ringspan.span import Positions

Shape = tuple[int, ...]

ENCODED_ITEMSIZES = (1, 2, 1, 2)  # values and scales of k, values and scales of v


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes of q (*batch, num_heads, seq, head_dim), k and v, and of one element of them and of their sums.

    With `is_encoded`, k and v travel as bytes with a scale of two bytes for each head and token.
    """

    batch: Shape
    heads: Heads
    head_dim: int
    v_head_dim: int
    itemsize: int
    sum_itemsize: int
    is_encoded: bool = False


class Sizes(Protocol):
    """What binding and running a program ask about its blocks."""

    @property
    def world_size(self) -> int:
        """How many ranks."""

    def block_shapes(self, block: Block, /) -> tuple[Shape, ...]:
        """The shapes of a block's arrays; lse has a last dim of 1, so that all of them slice alike."""

    def block_bytes(self, block: Block, /) -> int:
        """The bytes a Transfer of the block moves."""

    def cut_tile(self, q: Block, kv: Block, /) -> "Cut":
        """What there is to compute of a q block against a kv block."""


class Cut(NamedTuple):
    """The pieces of a tile, and how many pairs it has, visible or not, over all batch rows that differ."""

    pieces: tuple[Piece, ...]
    all_pairs: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be computed, whatever the algorithm: who holds what, who sees what, and how large it is."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    shapes: Shapes

    def __post_init__(self) -> None:
        check_kinds(self.mask, self.layout, self.kv_layout)
        if self.layout.world_size != self.kv_layout.world_size:
            raise LayoutError(
                f"layout is for {self.layout.world_size} ranks and kv_layout for {self.kv_layout.world_size}; "
                "make both for the same group"
            )
        if self.mask.rows is not None and self.shapes.batch[:1] != (len(self.mask.rows),):
            raise ShapeError(
                f"mask has {len(self.mask.rows)} rows and q has batch dims {self.shapes.batch}; per_row takes one mask "
                "for each row of the first batch dim"
            )

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.layout.world_size

    def cut_tile(self, q: Block, kv: Block) -> Cut:
        """What there is to compute of a q block against a kv block."""
        num_rows = len(self.mask.rows) if self.mask.rows is not None else 1
        return Cut(
            _pieces(self.mask, self.layout, self.kv_layout, q.owner, kv.owner),
            len(self.positions(q)) * len(self.positions(kv)) * num_rows,
        )

    def positions(self, block: Block) -> Positions:
        """The positions of a block's tokens, ascending."""
        return block_positions(self.layout, self.kv_layout, block.kind in ("kv", "dkv"), block.owner)

    def block_shapes(self, block: Block) -> tuple[Shape, ...]:
        """The shapes of a block's arrays; lse has a last dim of 1, so that all of them slice alike."""
        dims = {
            "q": (self.shapes.head_dim,),
            "kv": (self.shapes.head_dim, self.shapes.v_head_dim),
            "q_grad": (self.shapes.head_dim, self.shapes.v_head_dim, self.shapes.v_head_dim, 1),
            "out": (self.shapes.v_head_dim, 1),
            "dq": (self.shapes.head_dim,),
            "dkv": (self.shapes.head_dim, self.shapes.v_head_dim),
        }[block.kind]
        if block.kind == "kv" and self.shapes.is_encoded:
            dims = (self.shapes.head_dim, 1, self.shapes.v_head_dim, 1)
        num_heads = self.shapes.heads.num_kv_heads if block.kind in ("kv", "dkv") else self.shapes.heads.num_heads
        if block.heads is not None:
            num_heads = len(block.heads)
        rows = len(self.positions(block))
        return tuple((*self.shapes.batch, num_heads, rows, dim) for dim in dims)

    def block_bytes(self, block: Block) -> int:
        """The bytes a Transfer of the block moves: inputs in their own type, sums and lse in that of the sums."""
        sizes = [math.prod(shape) for shape in self.block_shapes(block)]
        if block.kind == "kv" and self.shapes.is_encoded:
            return sum(size * nbytes for size, nbytes in zip(sizes, ENCODED_ITEMSIZES, strict=True))
        if block.is_sum:
            return sum(sizes) * self.shapes.sum_itemsize
        lse = sizes.pop() if block.kind == "q_grad" else 0
        return sum(sizes) * self.shapes.itemsize + lse * self.shapes.sum_itemsize

    def lighter_side(self) -> Literal["kv", "q"]:
        """The side with fewer bytes to send round the ring in the backward pass, its gradient included."""
        kv, q = (
            sum(self.block_bytes(Block(kind, rank)) for rank in range(self.layout.world_size) for kind in kinds)
            for kinds in (("kv", "dkv"), ("q_grad", "dq"))
        )
        return "kv" if kv <= q else "q"


def check_kinds(mask: object, layout: object, kv_layout: object) -> None:
    """Refuse what is no mask or layout, before anything asks it for its own."""
    if not isinstance(mask, Mask):
        if hasattr(mask, "shape"):
            raise MaskError(
                f"mask=<{type(mask).__name__} of shape {tuple(mask.shape)}>: dense masks are not taken; use "
                "rs.causal(), rs.sliding_window(...), rs.documents(...) or rs.prefix(...), joined by & and |, and "
                "rs.per_row([...]) where batch rows differ"
            )
        raise MaskError(f"mask={_brief(mask)}: a mask is a value such as rs.causal() or rs.documents([300, 700])")
    check_is_layout("layout", layout)
    check_is_layout("kv_layout", kv_layout)


def check_is_layout(name: str, value: object) -> None:
    """Refuse what is no layout."""
    if not isinstance(value, Layout):
        raise LayoutError(f"{name}={_brief(value)}: a layout is a value such as rs.zigzag(seq_len, world_size)")


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"<{type(value).__name__}>"


def softmax_scale(scale: object, head_dim: int) -> float:
    """The scale given, or 1/sqrt(head_dim)."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not isinstance(scale, Real) or not math.isfinite(scale):
        raise ShapeError(
            f"scale={_brief(scale)}: scores are scaled by a finite number; leave it out for 1/sqrt(head_dim), and "
            "multiply q by what is no number, such as a parameter"
        )
    return float(scale)


class Sibling(NamedTuple):
    """A node that another one is joined with."""

    slot: int
    is_left: bool


class Rise(NamedTuple):
    """What becomes of a new node: joined with these, one after the other, the result is kept in a slot."""

    siblings: tuple[Sibling, ...]
    slot: int


class Cell(NamedTuple):
    """One tile of queries against one of keys: rows of the two blocks, and pieces counted from there.

    What it gives to its sums are leaves of trees, whose rises stand here: forward that of out, backward those of dq and
    dkv. A forward cell may be several whole tiles of queries, and then has as many rises.
    """

    q: slice
    kv: slice
    pieces: tuple[Piece, ...]
    rises: tuple[Rise, ...]


class Tile(NamedTuple):
    """A q block against a kv block: the pieces to compute, how much of it is visible, and the sums it adds to.

    `firsts` says of each piece that nothing has been added to its queries before, so that they may be overwritten;
    `begins` of each sum that the first piece is the beginning of all of it, so that it need not exist before. Where
    sums are trees there are cells instead of pieces.
    """

    q: Block
    kv: Block
    pieces: tuple[Piece, ...]
    coverage: Coverage
    pairs: int
    sums: tuple[Block, ...]
    firsts: tuple[bool, ...]
    begins: tuple[bool, ...]
    cells: tuple[Cell, ...] = ()

    def all_pieces(self) -> Iterator[Piece]:
        """What a kernel is called for, in rows of the two blocks."""
        yield from self.pieces
        for cell in self.cells:
            for piece in cell.pieces:
                yield piece._replace(q=_shifted(piece.q, cell.q.start), kv=_shifted(piece.kv, cell.kv.start))


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)


class Message(NamedTuple):
    """A transfer with the shapes of its arrays and its size."""

    transfer: Transfer
    shapes: tuple[Shape, ...]
    nbytes: int


class Exchange(NamedTuple):
    """A Post with sizes."""

    step: int
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Compute(NamedTuple):
    """A Do with its tiles."""

    step: int
    tiles: tuple[Tile, ...]


BoundProgram = tuple[Exchange | Compute | Arrived | AllMerged | Sent | Drop, ...]


@lru_cache(maxsize=1024)
def bind(program: Program, problem: Problem) -> BoundProgram:
    """The program with everything filled in that running it would otherwise compute, cached."""
    return bind_once(program, problem)


def bind_once(program: Program, problem: Sizes) -> BoundProgram:
    """The same for sizes that do not come again."""
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
    """Whether the first piece adds to every row of a sum, given the rows that each adds to."""
    if not pieces or block.heads is not None or pieces[0].rows is not None:
        return False
    return rows[0] == slice(0, problem.block_shapes(block)[0][-2])


def _firsts(pieces: tuple[Piece, ...], has_begun: bool) -> tuple[bool, ...]:
    """For each piece, whether nothing has been added to its rows, by another tile or by a piece before it."""

    def is_first(index: int) -> bool:
        rows = pieces[index].q
        return pieces[index].rows is None and all(
            rows.stop <= before.q.start or before.q.stop <= rows.start for before in pieces[:index]
        )

    return tuple(not has_begun and is_first(index) for index in range(len(pieces)))


@lru_cache(maxsize=4096)
def _pieces(mask: Mask, layout: Layout, kv_layout: Layout, q_owner: int, kv_owner: int) -> tuple[Piece, ...]:
    return cut_pieces(
        mask,
        block_positions(layout, kv_layout, False, q_owner),
        block_positions(layout, kv_layout, True, kv_owner),
    )


def _num_pairs(piece: Piece) -> int:
    """Visible pairs of a piece, over all batch rows it stands for."""
    num_rows = len(piece.rows) if piece.rows is not None else 1
    height: int = piece.q.stop - piece.q.start
    width: int = piece.kv.stop - piece.kv.start
    if piece.kind.is_triangle:
        return num_rows * height * (height + 1) // 2
    visible = height * width if piece.allowed is None else int(np.count_nonzero(piece.allowed))
    return num_rows * visible


@lru_cache(maxsize=4096)
def block_positions(layout: Layout, kv_layout: Layout, is_kv: bool, owner: int) -> Positions:
    """A rank's queries include the replicated ones; its keys do not, since those are a block of their own (ALL)."""
    if owner == ALL:
        return (kv_layout if is_kv else layout).replicated_positions()
    return kv_layout.own_positions(owner) if is_kv else layout.positions(owner)


class LocalRows(NamedTuple):
    """Where a rank's own and the replicated positions stand in its shard; slices where they are one run."""

    own: slice | Positions
    replicated: slice | Positions


@lru_cache(maxsize=256)
def local_rows(layout: Layout, rank: int) -> LocalRows:
    """How a shard falls into the block that only this rank holds and the one that all ranks do."""
    is_replicated = np.isin(layout.positions(rank), layout.replicated_positions())
    return LocalRows(_as_slice(np.flatnonzero(~is_replicated)), _as_slice(np.flatnonzero(is_replicated)))


def _as_slice(index: Positions) -> slice | Positions:
    if not len(index):
        return slice(0, 0)
    first, stop = int(index[0]), int(index[-1]) + 1
    return slice(first, stop) if stop - first == len(index) else index

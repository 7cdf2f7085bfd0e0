"""What is attention computed over? Masks, layouts and sizes of one call, whatever the algorithm.

A `Problem` answers what binding a program asks: which positions a block holds, how large it is, and which pieces of a
q block × kv block tile are visible. `Sizes` is that interface; a turn of a KV cache implements it too.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import numpy as np

from ringspan.arguments import number_of
from ringspan.errors import LayoutError, MaskError, ShapeError
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.pieces import Piece, cut_pieces
from ringspan.schedule import ALL, Block, Heads, Visible, visible_blocks
from ringspan.span import Positions

Shape = tuple[int, ...]

ENCODED_ITEMSIZES = (1, 2, 1, 2)  # values and scales of k, values and scales of v


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of q (*batch, num_heads, seq, head_dim), k and v, and bytes per element of inputs and of sums.

    With `is_encoded`, k and v travel as one byte per element and a two-byte scale per head and token.
    """

    batch: Shape
    heads: Heads
    head_dim: int
    v_head_dim: int
    itemsize: int
    sum_itemsize: int
    is_encoded: bool = False


class Sizes(Protocol):
    """The sizes and pieces of blocks that preparing and running a program needs."""

    @property
    def world_size(self) -> int: ...

    def visible(self) -> Visible:
        """The blocks that have visible pairs."""

    def block_shapes(self, block: Block, /) -> tuple[Shape, ...]:
        """The shapes of a block's arrays; lse has a last dim of 1, so that all of them slice alike."""

    def block_bytes(self, block: Block, /) -> int:
        """The bytes a Transfer of the block moves."""

    def cut_tile(self, q: Block, kv: Block, /) -> "Cut":
        """The pieces of a q block × kv block tile."""


class Cut(NamedTuple):
    """The pieces of a tile, and its number of pairs, visible or not, over all batch rows that differ."""

    pieces: tuple[Piece, ...]
    all_pairs: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One attention call without its algorithm: the mask, the layouts of queries and keys, and the sizes."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    shapes: Shapes

    def __post_init__(self) -> None:
        check_kinds(self.mask, self.layout, self.kv_layout)
        if self.layout.world_size != self.kv_layout.world_size:
            raise LayoutError(
                f"it is for {self.kv_layout.world_size} ranks and layout is for {self.layout.world_size}",
                argument="kv_layout",
                remedy="make both for the same group",
            )
        if self.mask.rows is not None and self.shapes.batch[:1] != (len(self.mask.rows),):
            raise ShapeError(
                f"it has {len(self.mask.rows)} rows and q has batch dims {self.shapes.batch}",
                argument="mask",
                remedy="give per_row one mask for each row of the first batch dim",
            )

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.layout.world_size

    def visible(self) -> Visible:
        """The blocks that have visible pairs."""
        return visible_blocks(self.mask, self.layout, self.kv_layout)

    def cut_tile(self, q: Block, kv: Block) -> Cut:
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
        """The bytes a Transfer of the block moves: inputs in their own dtype, sums and lse in the accumulator's."""
        sizes = [math.prod(shape) for shape in self.block_shapes(block)]
        if block.kind == "kv" and self.shapes.is_encoded:
            return sum(size * nbytes for size, nbytes in zip(sizes, ENCODED_ITEMSIZES, strict=True))
        if block.is_sum:
            return sum(sizes) * self.shapes.sum_itemsize
        lse = sizes.pop() if block.kind == "q_grad" else 0
        return sum(sizes) * self.shapes.itemsize + lse * self.shapes.sum_itemsize

    def lighter_side(self) -> Literal["kv", "q"]:
        """The side whose blocks and gradients are fewer bytes to send round the ring in the backward pass."""
        kv, q = (
            sum(self.block_bytes(Block(kind, rank)) for rank in range(self.layout.world_size) for kind in kinds)
            for kinds in (("kv", "dkv"), ("q_grad", "dq"))
        )
        return "kv" if kv <= q else "q"


def check_kinds(mask: object, layout: object, kv_layout: object) -> None:
    """Refuse values that are not a Mask or a Layout."""
    if not isinstance(mask, Mask):
        if hasattr(mask, "shape"):
            raise MaskError(
                f"expected a Mask, got a {type(mask).__name__} of shape {tuple(mask.shape)}; dense masks are not "
                "supported",
                argument="mask",
                remedy="use rs.causal(), rs.sliding_window(...), rs.documents(...) or rs.prefix(...), joined by & and "
                "|, and rs.per_row([...]) where batch rows differ",
            )
        raise MaskError(
            f"expected a Mask, got {type(mask).__name__}",
            argument="mask",
            value=_Brief(mask),
            remedy="use a mask such as rs.causal() or rs.documents([300, 700])",
        )
    check_is_layout("layout", layout)
    check_is_layout("kv_layout", kv_layout)


def check_is_layout(name: str, value: object) -> None:
    """Refuse a value that is not a Layout."""
    if not isinstance(value, Layout):
        raise LayoutError(
            f"expected a Layout, got {type(value).__name__}",
            argument=name,
            value=_Brief(value),
            remedy="use a layout such as rs.zigzag(seq_len, world_size)",
        )


class _Brief:
    """A value whose repr is short enough for an error."""

    def __init__(self, value: object) -> None:
        text = repr(value)
        self._text = text if len(text) < 80 else f"<{type(value).__name__}>"

    def __repr__(self) -> str:
        return self._text


class Scores(NamedTuple):
    """How scores are made: scale · q kᵀ, then softcap · tanh(score / softcap) unless softcap is None."""

    scale: float
    softcap: float | None


def check_scores(scale: object, softcap: object, head_dim: int) -> Scores:
    """Check the two options and put the default in."""
    return Scores(softmax_scale(scale, head_dim), _check_softcap(softcap))


def softmax_scale(scale: object, head_dim: int) -> float:
    """`scale`, or 1/sqrt(head_dim) if it is None."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not math.isfinite(number_of(scale)):
        raise ShapeError(
            "the softmax scale is a finite number",
            argument="scale",
            value=_Brief(scale),
            remedy="leave it out for 1/sqrt(head_dim), or multiply q by it if it is a tensor",
        )
    return number_of(scale)


def _check_softcap(softcap: object) -> float | None:
    """The bound of the scores: a number above 0, or None for none."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not 0 < number_of(softcap) < math.inf:
        raise ShapeError(
            "scores are capped at a finite number above 0",
            argument="softcap",
            value=_Brief(softcap),
            remedy="leave it out for scores without a cap",
        )
    return number_of(softcap)


@lru_cache(maxsize=4096)
def _pieces(mask: Mask, layout: Layout, kv_layout: Layout, q_owner: int, kv_owner: int) -> tuple[Piece, ...]:
    return cut_pieces(
        mask,
        block_positions(layout, kv_layout, False, q_owner),
        block_positions(layout, kv_layout, True, kv_owner),
    )


@lru_cache(maxsize=4096)
def block_positions(layout: Layout, kv_layout: Layout, is_kv: bool, owner: int) -> Positions:
    """Global positions of a block. A rank's q block includes replicated queries; replicated keys are the block ALL."""
    if owner == ALL:
        return (kv_layout if is_kv else layout).replicated_positions()
    return kv_layout.own_positions(owner) if is_kv else layout.positions(owner)


class LocalRows(NamedTuple):
    """Rows of a shard that only this rank holds, and rows that all ranks hold; contiguous rows are a slice."""

    own: slice | Positions
    replicated: slice | Positions


@lru_cache(maxsize=256)
def local_rows(layout: Layout, rank: int) -> LocalRows:
    is_replicated = np.isin(layout.positions(rank), layout.replicated_positions())
    return LocalRows(_as_slice(np.flatnonzero(~is_replicated)), _as_slice(np.flatnonzero(is_replicated)))


def _as_slice(index: Positions) -> slice | Positions:
    if not len(index):
        return slice(0, 0)
    first, stop = int(index[0]), int(index[-1]) + 1
    return slice(first, stop) if stop - first == len(index) else index

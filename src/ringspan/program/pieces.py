"""Into which rectangles does a tile fall, so that a kernel that knows only a few shapes can compute any mask?

A tile is some query positions against some key positions, both ascending. In indices of the tile a mask is a union of
bands: row i sees the columns lo[i] … hi[i]-1, and neither end ever falls. So a band is the area between two staircases,
and cutting it is geometry: the columns all rows share are a FULL rectangle, a right stair of height and width one is a
CAUSAL triangle and a left one an ANTICAUSAL triangle, and whatever is left is halved until it is small enough to carry
its own little dense mask. Only those small pieces cost more than what is visible in them.

Each visible pair is in exactly one piece: bands that overlap are made disjoint first.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.errors import MaskError
from ringspan.mask import Allowed, Band, Mask
from ringspan.span import Positions

LEAF = 128
"""Staircases of up to LEAF × LEAF pairs are not cut further: smaller pieces save little work and cost more calls."""

JUMP = 32
"""Where an end jumps by as many columns the rows are cut rather than halved."""


class PieceKind(Enum):
    """What a kernel must know about a piece."""

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"
    MASKED = "masked"

    @property
    def is_triangle(self) -> bool:
        """Half of a square, the diagonal included."""
        return self in (PieceKind.CAUSAL, PieceKind.ANTICAUSAL)


class Piece(NamedTuple):
    """A rectangle of a tile: `q` and `kv` are offsets into the tile's positions."""

    q: slice
    kv: slice
    kind: PieceKind  # CAUSAL: square, and row i sees columns 0 … i of the piece; ANTICAUSAL: and i …
    allowed: Allowed | None  # (q, kv), MASKED only
    rows: tuple[int, ...] | None  # batch rows; None: all


def cut_pieces(mask: Mask, q_positions: npt.ArrayLike, kv_positions: npt.ArrayLike) -> tuple[Piece, ...]:
    """Cut the tile of ascending positions into pieces that hold each visible pair once and allow nothing else."""
    q = _check_ascending("q_positions", mask.known("q_positions", q_positions))
    kv = _check_ascending("kv_positions", mask.known("kv_positions", kv_positions))
    if mask.rows is None:
        return tuple(_cut_mask(mask, q, kv, None))
    rows_of: dict[Mask, list[int]] = {}
    for row, row_mask in enumerate(mask.rows):
        rows_of.setdefault(row_mask, []).append(row)
    return tuple(piece for row_mask, rows in rows_of.items() for piece in _cut_mask(row_mask, q, kv, tuple(rows)))


def _check_ascending(name: str, positions: Positions) -> Positions:
    falls = np.flatnonzero(positions[1:] <= positions[:-1])
    if falls.size:
        i = int(falls[0])
        found = f"{name}[{i}:{i + 2}]={positions[i : i + 2].tolist()}"
        raise MaskError(f"{found}: the positions of a tile ascend; sort them and drop repetitions")
    return positions


def _cut_mask(mask: Mask, q: Positions, kv: Positions, rows: tuple[int, ...] | None) -> Iterator[Piece]:
    bands = [Band(np.searchsorted(kv, lo), np.searchsorted(kv, hi)) for lo, hi in mask.bands(q)]
    for band in _disjoint(bands):
        for piece in _cut_band(*band, top=0):
            yield piece._replace(rows=rows)


# From here on bands are in indices, and empty rows have lo == hi.


def _disjoint(bands: list[Band]) -> list[Band]:
    """Bands with the same union, none overlapping, as few as is simple."""
    merged: list[Band] = []
    for lo, hi in bands:
        band = Band(lo, np.maximum(lo, hi))
        for other in merged:
            if np.all((band.lo <= other.hi) & (other.lo <= band.hi)):  # they touch in every row
                band = Band(np.minimum(band.lo, other.lo), np.maximum(band.hi, other.hi))
                merged = [kept for kept in merged if kept is not other]
        merged.append(band)
    disjoint: list[Band] = []
    for band in merged:
        parts = [band]
        for other in disjoint:
            parts = [rest for part in parts for rest in _without(part, other)]
        disjoint += parts
    return disjoint


def _without(band: Band, other: Band) -> list[Band]:
    """The band before and after the other one."""
    before_hi, after_lo = np.minimum(band.hi, other.lo), np.maximum(band.lo, other.hi)
    parts = Band(band.lo, np.maximum(before_hi, band.lo)), Band(np.minimum(after_lo, band.hi), band.hi)
    return [part for part in parts if (part.lo < part.hi).any()]


def _cut_band(lo: Positions, hi: Positions, top: int) -> Iterator[Piece]:
    """Pieces of the band [lo, hi) whose first row is row `top` of the tile."""
    visible = np.flatnonzero(lo < hi)
    if not visible.size:
        return
    trim = slice(int(visible[0]), int(visible[-1]) + 1)
    top, lo, hi = top + trim.start, lo[trim], hi[trim]
    num_rows = hi.size
    # All rows see the columns core_lo … core_hi-1, if there are any: what the last row still and the first row already
    # sees. To the left and to the right of them lie the edges, each with one stair.
    left, core_lo, core_hi, right = int(lo[0]), int(lo[-1]), int(hi[0]), int(hi[-1])
    is_small = num_rows * (right - left) <= LEAF * LEAF

    def piece(start: int, stop: int, kind: PieceKind, allowed: Allowed | None = None) -> Piece:
        return Piece(slice(top, top + num_rows), slice(start, stop), kind, allowed, rows=None)

    if left == core_lo and core_hi == right:
        yield piece(left, right, PieceKind.FULL)
    elif core_lo < core_hi and _is_unit_stair(hi) and (not is_small or left == core_hi - 1):
        if core_lo < core_hi - 1:
            yield piece(core_lo, core_hi - 1, PieceKind.FULL)
        yield piece(core_hi - 1, right, PieceKind.CAUSAL)
        yield from _cut_band(lo, np.full_like(lo, core_lo), top)
    elif core_lo < core_hi == right and _is_unit_stair(lo) and (not is_small or core_lo == right - 1):
        yield piece(left, core_lo + 1, PieceKind.ANTICAUSAL)
        if core_lo + 1 < right:
            yield piece(core_lo + 1, right, PieceKind.FULL)
    elif is_small:
        columns = np.arange(left, right)
        yield piece(left, right, PieceKind.MASKED, (lo[:, None] <= columns) & (columns < hi[:, None]))
    elif (jump := _nearest_middle(_jumps(lo, hi), num_rows)) is not None:
        yield from _cut_band(lo[:jump], hi[:jump], top)
        yield from _cut_band(lo[jump:], hi[jump:], top + jump)
    elif core_hi - core_lo >= LEAF:
        yield piece(core_lo, core_hi, PieceKind.FULL)
        yield from _cut_band(lo, np.full_like(lo, core_lo), top)
        yield from _cut_band(np.full_like(hi, core_hi), hi, top)
    else:
        # The largest power of two below num_rows: blocks and leaves of even size, however many rows there are.
        middle = _nearest_middle(_ends_of_unit_stairs(hi), num_rows) or 1 << (num_rows - 1).bit_length() - 1
        yield from _cut_band(lo[:middle], hi[:middle], top)
        yield from _cut_band(lo[middle:], hi[middle:], top + middle)


def _is_unit_stair(ends: Positions) -> bool:
    """Whether each row reaches exactly one column further than the row before."""
    return int(ends[-1] - ends[0]) == ends.size - 1 and bool(np.all(np.diff(ends) == 1))


def _jumps(lo: Positions, hi: Positions) -> Positions:
    """Rows at which an end jumps far: the bounds of documents and frames, the seams of a shard."""
    return np.flatnonzero(np.maximum(np.diff(lo), np.diff(hi)) >= JUMP) + 1


def _ends_of_unit_stairs(ends: Positions) -> Positions:
    """Rows at which a long run of unit steps begins or is over."""
    unit = np.diff(ends) == 1
    bounds = np.concatenate([[0], np.flatnonzero(unit[1:] != unit[:-1]) + 1, [unit.size]])
    long_runs = np.flatnonzero((np.diff(bounds) >= LEAF) & unit[bounds[:-1]])
    starts, stops = bounds[long_runs], bounds[long_runs + 1] + 1
    return np.concatenate([starts[starts > 0], stops[stops < ends.size]])


def _nearest_middle(rows: Positions, num_rows: int) -> int | None:
    return int(rows[np.argmin(np.abs(2 * rows - num_rows))]) if rows.size else None

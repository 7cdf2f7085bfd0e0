"""How is a tile cut into rectangles, so that a kernel that knows only a few shapes can compute any mask?

A tile is a set of query positions against a set of key positions, both ascending. In indices of the tile a mask is a
union of bands: row i sees columns lo[i] … hi[i]-1, and both ends are non-decreasing. A band is the area between two
staircases: the columns that all rows share are a FULL rectangle, a right staircase of unit steps is a CAUSAL triangle,
a left one an ANTICAUSAL triangle, and the rest is halved until it is small enough for a dense mask of its own. Only
those small pieces compute more pairs than are visible in them.

Each visible pair is in exactly one piece: overlapping bands are made disjoint first.
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
"""Areas of up to LEAF × LEAF pairs are not cut further: smaller pieces save little work and cost more calls."""

JUMP = 32
"""Where an end jumps by at least this many columns, rows are cut there rather than halved."""


class PieceKind(Enum):
    """The shape of the visible area of a piece."""

    FULL = "full"
    CAUSAL = "causal"
    ANTICAUSAL = "anticausal"
    MASKED = "masked"

    @property
    def is_triangle(self) -> bool:
        """True for half of a square, the diagonal included."""
        return self in (PieceKind.CAUSAL, PieceKind.ANTICAUSAL)


class Piece(NamedTuple):
    """A rectangle of a tile: `q` and `kv` are offsets into the tile's positions."""

    q: slice
    kv: slice
    kind: PieceKind
    """CAUSAL and ANTICAUSAL are square: row i sees columns 0 … i, or columns i and later."""
    allowed: Allowed | None
    """(q, kv), for MASKED only."""
    rows: tuple[int, ...] | None
    """The batch rows of the piece; None for all."""


def cut_pieces(mask: Mask, q_positions: npt.ArrayLike, kv_positions: npt.ArrayLike) -> tuple[Piece, ...]:
    """Cut a tile of ascending positions into pieces that contain each visible pair once and no other pair."""
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
        raise MaskError(f"{found}: the positions of a tile ascend", remedy="sort them and drop repetitions")
    return positions


def _cut_mask(mask: Mask, q: Positions, kv: Positions, rows: tuple[int, ...] | None) -> Iterator[Piece]:
    bands = [Band(np.searchsorted(kv, lo), np.searchsorted(kv, hi)) for lo, hi in mask.bands(q)]
    for band in _disjoint(bands):
        for piece in _cut_band(*band, top=0):
            yield piece._replace(rows=rows)


# Below, bands are in indices of the tile, and rows that see nothing have lo == hi.


def _disjoint(bands: list[Band]) -> list[Band]:
    """Disjoint bands with the same union; touching bands are merged first."""
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
    """The parts of a band before and after the other one."""
    before_hi, after_lo = np.minimum(band.hi, other.lo), np.maximum(band.lo, other.hi)
    parts = Band(band.lo, np.maximum(before_hi, band.lo)), Band(np.minimum(after_lo, band.hi), band.hi)
    return [part for part in parts if (part.lo < part.hi).any()]


def _cut_band(lo: Positions, hi: Positions, top: int) -> Iterator[Piece]:
    """The pieces of the band [lo, hi), whose first row is row `top` of the tile."""
    visible = np.flatnonzero(lo < hi)
    if not visible.size:
        return
    trim = slice(int(visible[0]), int(visible[-1]) + 1)
    top, lo, hi = top + trim.start, lo[trim], hi[trim]
    num_rows = hi.size
    # All rows see columns core_lo … core_hi-1, if there are any: the last row's lo to the first row's hi.
    # To the left and to the right of the core lie the edges, each with one staircase.
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
        # The largest power of two below num_rows gives pieces of even size for any number of rows.
        middle = _nearest_middle(_ends_of_unit_stairs(hi), num_rows) or 1 << (num_rows - 1).bit_length() - 1
        yield from _cut_band(lo[:middle], hi[:middle], top)
        yield from _cut_band(lo[middle:], hi[middle:], top + middle)


def _is_unit_stair(ends: Positions) -> bool:
    """True if each row ends exactly one column after the row before."""
    return int(ends[-1] - ends[0]) == ends.size - 1 and bool(np.all(np.diff(ends) == 1))


def _jumps(lo: Positions, hi: Positions) -> Positions:
    """Rows at which an end jumps: bounds of documents and frames, seams of a shard."""
    return np.flatnonzero(np.maximum(np.diff(lo), np.diff(hi)) >= JUMP) + 1


def _ends_of_unit_stairs(ends: Positions) -> Positions:
    """Rows at which a long run of unit steps begins or ends."""
    unit = np.diff(ends) == 1
    bounds = np.concatenate([[0], np.flatnonzero(unit[1:] != unit[:-1]) + 1, [unit.size]])
    long_runs = np.flatnonzero((np.diff(bounds) >= LEAF) & unit[bounds[:-1]])
    starts, stops = bounds[long_runs], bounds[long_runs + 1] + 1
    return np.concatenate([starts[starts > 0], stops[stops < ends.size]])


def _nearest_middle(rows: Positions, num_rows: int) -> int | None:
    return int(rows[np.argmin(np.abs(2 * rows - num_rows))]) if rows.size else None

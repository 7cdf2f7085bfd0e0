"""Which intervals of keys does a query see under a mask, and how are they simplified?

Under every basic mask a query sees ONE interval of key positions, and both ends of the interval never decrease as the
query position grows. Such a family of intervals is a band. `&` of basic masks takes the larger start and the smaller
end: a band again, kept here as an intersection of limits. Every mask is a union of such intersections. Intersections
that lie within another one are dropped and windows that touch are joined, so their number depends on what is visible,
not on how the mask was written. A mask that still needs more than `MOST_BANDS` is refused.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np

from ringspan.errors import MaskError
from ringspan.span import Positions, Span

UNBOUNDED = 2**62  # "no end"; the sum of two values up to here still fits in int64
MOST_BANDS = 128


class Coverage(Enum):
    """How much of a tile is visible."""

    EMPTY = "empty"
    FULL = "full"
    PARTIAL = "partial"


class Band(NamedTuple):
    """The half-open interval [lo, hi) of visible key positions of each query; empty where hi <= lo.

    Neither `lo` nor `hi` decreases as the query position grows.
    """

    lo: Positions
    hi: Positions


class HasBand(Protocol):
    """A hashable mask that is one band."""

    def band(self, q: Positions) -> Band:
        """Return the band at some query positions."""


class Intersection(NamedTuple):
    """The keys that several basic masks all allow; by default all keys."""

    left: int | None = None  # q - left <= kv
    right: int | None = None  # kv <= q + right
    prefix: int | None = None  # kv < prefix, or kv <= q
    others: frozenset[HasBand] = frozenset()

    def __and__(self, other: "Intersection") -> "Intersection":
        right = _least(self.right, other.right)
        prefix = _least(self.prefix, other.prefix)
        if prefix == 0:
            right, prefix = _least(right, 0), None
        if right is not None and right <= 0:
            prefix = None  # such a window lies within the prefix mask
        return Intersection(_least(self.left, other.left), right, prefix, self.others | other.others)

    @property
    def is_empty(self) -> bool:
        """Whether its window is empty."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def is_within(self, other: "Intersection") -> bool:
        """Whether `other` allows all keys that this one does; False if the limits alone cannot prove it."""
        return (
            _is_least(self.left, other.left)
            and _is_least(self.right, other.right)
            and (_is_least(self.prefix, other.prefix) or (self.right is not None and self.right <= 0))
            and other.others <= self.others
        )

    def merged(self, other: "Intersection") -> "Intersection | None":
        """Join two windows that touch or overlap at every query; None for all others."""
        if (self.prefix, self.others) != (None, other.others) or other.prefix is not None:
            return None
        if _have_gap(self.left, other.right) or _have_gap(other.left, self.right):
            return None
        return self._replace(left=_most(self.left, other.left), right=_most(self.right, other.right))

    def band(self, q: Positions) -> Band:
        """Return the band of all limits together."""
        lo = np.zeros_like(q) if self.left is None else np.maximum(q - self.left, 0)
        hi = np.full_like(q, UNBOUNDED) if self.right is None else q + self.right + 1
        if self.prefix is not None:
            hi = np.minimum(hi, np.maximum(q + 1, self.prefix))
        for mask in self.others:
            band = mask.band(q)
            lo, hi = np.maximum(lo, band.lo), np.minimum(hi, band.hi)
        return Band(lo, hi)


Union = tuple[Intersection, ...]
"""The keys that at least one of these intersections allows; not empty."""


def unite(parts: Iterable[Intersection]) -> Union:
    """Simplify a union of intersections; MaskError if more than MOST_BANDS are left."""
    kept: list[Intersection] = []
    empty = None
    for part in parts:
        if part.is_empty:
            empty = part
            continue
        if any(part.is_within(other) for other in kept):
            continue
        kept = [other for other in kept if not other.is_within(part)]
        _insert(kept, part)
        if len(kept) > MOST_BANDS:
            raise MaskError(
                f"a mask of more than {MOST_BANDS} bands of visible keys: each of them costs a pass over every tile",
                remedy="combine fewer masks, or put the masks of different rows into per_row([...])",
            )
    return tuple(kept) or ((empty,) if empty is not None else ())


def intersect(a: Union, b: Union) -> Union:
    """Return the keys that both allow."""
    return unite(x & y for x in a for y in b)


def band_coverage(bands_at: Callable[[Positions], tuple[Band, ...]], q_span: Span, kv_span: Span) -> Coverage:
    """Return the coverage of a tile that is not empty, from as few rows as decide it.

    Bands are taken in key indices of the tile. They are monotone, so one covers the tile iff it covers the first and
    the last row, and it shows only in the rows from the first with hi > 0 to the last with lo < num_kv.
    """
    q, num_kv = range(q_span.start, q_span.stop, q_span.step), len(kv_span)

    def bands_of(rows: range) -> list[Band]:
        bands = bands_at(np.arange(rows.start, rows.stop, rows.step, dtype=np.int64))
        # An end becomes the index of the first key position not below it: (end - start) / step, rounded up.
        return [Band(*(np.clip(-((kv_span.start - end) // kv_span.step), 0, num_kv) for end in b)) for b in bands]

    ends = bands_of(q[:: max(1, len(q) - 1)])
    if any(band.lo[-1] == 0 and band.hi[0] == num_kv for band in ends):
        return Coverage.FULL
    if any((band.lo < band.hi).any() for band in ends):
        return Coverage.PARTIAL
    for i, band in enumerate(ends):
        if band.lo[0] == num_kv or band.hi[-1] == 0:
            continue
        first = bisect_left(q, True, key=lambda p: bool(bands_of(range(p, p + 1))[i].hi[0] > 0))
        stop = bisect_left(q, True, key=lambda p: bool(bands_of(range(p, p + 1))[i].lo[0] == num_kv))
        inside = bands_of(q[first:stop])[i]
        if (inside.lo < inside.hi).any():
            return Coverage.PARTIAL
    return Coverage.EMPTY


def _insert(kept: list[Intersection], part: Intersection) -> None:
    """Add a part, joined with those it touches; it takes the place of the first of them."""
    at = len(kept)
    i = 0
    while i < len(kept):
        whole = part.merged(kept[i])
        if whole is None:
            i += 1
            continue
        part, at = whole, min(at, i)
        del kept[i]
        i = 0
    kept.insert(at, part)


def _least(a: int | None, b: int | None) -> int | None:
    """Return the smaller limit; None is unbounded."""
    return a if b is None else b if a is None else min(a, b)


def _most(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def _is_least(a: int | None, b: int | None) -> bool:
    return b is None or (a is not None and a <= b)


def _have_gap(left: int | None, right: int | None) -> bool:
    """Whether keys lie between the window that ends at `right` and the one that begins `left` before the query."""
    return left is not None and right is not None and right + 1 < -left

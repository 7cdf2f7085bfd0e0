"""Who may attend to whom, as a small value instead of a dense matrix.

Every basic mask lets a query see ONE interval of key positions, and both ends of that interval never move back as the
query moves on. Such a family of intervals is a band. `&` of two bands is the larger start and the smaller end, a band
again; `|` puts bands side by side. So every mask here is a union of bands, and whatever the rest of the library wants
to know (is this tile empty, how much work is it, how can it be cut) follows from the ends of a few intervals.

`allowed` says what a mask means, written straight from its definition; `bands` is derived, and tests hold the two
together.
"""

import itertools
import operator
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from ringspan.errors import MaskError
from ringspan.span import Positions, Span

T = TypeVar("T")
Allowed = npt.NDArray[np.bool_]

UNBOUNDED = 2**62  # "no end"; the sum of two values up to here still fits in int64


class Coverage(Enum):
    """How much of a tile is visible."""

    EMPTY = "empty"
    FULL = "full"
    PARTIAL = "partial"


class Band(NamedTuple):
    """Per query the half-open interval [lo, hi) of visible key positions; empty where hi <= lo.

    Neither `lo` nor `hi` ever falls as the query position rises.
    """

    lo: Positions
    hi: Positions


class Mask(ABC):
    """Which key positions each query position sees. Built by the functions below, combined with `&` and `|`."""

    __slots__ = ()

    @property
    def rows(self) -> "tuple[Mask, ...] | None":
        """The masks of the batch rows if they differ (`per_row`), else None."""
        return None

    @property
    def num_positions(self) -> int:
        """Positions from here on are unknown to the mask (`documents` end somewhere)."""
        return UNBOUNDED

    def allowed(self, q_positions: npt.ArrayLike, kv_positions: npt.ArrayLike) -> Allowed:
        """The definition: bool (q, kv), True where visible. `per_row` adds a leading row axis."""
        q = self.known("q_positions", q_positions)
        kv = self.known("kv_positions", kv_positions)
        return self._allowed(q[:, None], kv[None, :])

    def bands(self, q_positions: npt.ArrayLike) -> tuple[Band, ...]:
        """Bands whose union is `allowed`; they may overlap."""
        return self._bands(self.known("q_positions", q_positions))

    def coverage(self, q_span: Span, kv_span: Span) -> Coverage:
        """Whether nothing, everything or something of the tile is visible.

        Exact, save that a tile which only several parts of an `|` fill together counts as PARTIAL.
        """
        self._check_known("q_span", q_span.stop if len(q_span) else 0)
        self._check_known("kv_span", kv_span.stop if len(kv_span) else 0)
        return _band_coverage(self._bands, q_span, kv_span) if len(q_span) and len(kv_span) else Coverage.EMPTY

    def _check_known(self, name: str, stop: int) -> None:
        """Refuse the argument called `name` if its positions, all below `stop`, are not all known to the mask."""
        if stop > self.num_positions:
            rule = f"the mask's documents have {self.num_positions} tokens"
            raise MaskError(f"{name} reaches position {stop - 1}: {rule}; add a document for the rest")

    def known(self, name: str, values: npt.ArrayLike) -> Positions:
        """The argument called `name` as an array; refused if the mask does not know these positions."""
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            found = f"{name} has shape {array.shape} and dtype {array.dtype}"
            raise MaskError(f"{found}: positions are integers in one dimension; see Span(0, 8).positions()")
        if array.size and array.min() < 0:
            raise MaskError(f"{name} contains {array.min()}: positions count from 0; shift them")
        self._check_known(name, int(array.max()) + 1 if array.size else 0)
        return array.astype(np.int64, copy=False)

    @abstractmethod
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        """`allowed` for q of shape (q, 1) and kv of shape (1, kv)."""

    @abstractmethod
    def _bands(self, q: Positions) -> tuple[Band, ...]: ...

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(_And, self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(_Or, self, other) if isinstance(other, Mask) else NotImplemented


@dataclass(frozen=True, slots=True, repr=False)
class _Full(Mask):
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return np.ones((q.size, kv.size), dtype=np.bool_)

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        return (Band(np.zeros_like(q), np.full_like(q, UNBOUNDED)),)

    def __repr__(self) -> str:
        return "full()"


@dataclass(frozen=True, slots=True, repr=False)
class _Causal(Mask):
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return kv <= q

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        return (Band(np.zeros_like(q), q + 1),)

    def __repr__(self) -> str:
        return "causal()"


@dataclass(frozen=True, slots=True, repr=False)
class _SlidingWindow(Mask):
    left: int | None
    right: int | None

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        visible = np.ones((q.size, kv.size), dtype=np.bool_)
        if self.left is not None:
            visible &= kv >= q - self.left
        if self.right is not None:
            visible &= kv <= q + self.right
        return visible

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        lo = np.zeros_like(q) if self.left is None else np.maximum(q - self.left, 0)
        hi = np.full_like(q, UNBOUNDED) if self.right is None else q + self.right + 1
        return (Band(lo, hi),)

    def __repr__(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, slots=True, repr=False)
class _Prefix(Mask):
    n: int

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return (kv < self.n) | (kv <= q)

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        return (Band(np.zeros_like(q), np.maximum(q + 1, self.n)),)

    def __repr__(self) -> str:
        return f"prefix({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class _Documents(Mask):
    lengths: tuple[int, ...]
    _bounds: Positions = field(init=False, compare=False)  # 0, end of the first document, … end of the last

    def __post_init__(self) -> None:
        bounds = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        bounds.flags.writeable = False
        object.__setattr__(self, "_bounds", bounds)

    @property
    def num_positions(self) -> int:
        return int(self._bounds[-1])

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        same: Allowed = self._document(q) == self._document(kv)
        return same

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        document = self._document(q)
        return (Band(self._bounds[document], self._bounds[document + 1]),)

    def _document(self, positions: Positions) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._bounds, positions, side="right") - 1

    def __repr__(self) -> str:
        return f"documents({list(self.lengths)})"


@dataclass(frozen=True, slots=True, repr=False)
class _FrameCausal(Mask):
    tokens_per_frame: int
    start: int

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return (kv < self.start) | (self._frame(kv) <= self._frame(q))

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        end_of_frame = self.start + (self._frame(q) + 1) * self.tokens_per_frame
        return (Band(np.zeros_like(q), np.maximum(end_of_frame, self.start)),)

    def _frame(self, positions: Positions) -> Positions:
        """The frame's number; negative before `start`."""
        return (positions - self.start) // self.tokens_per_frame

    def __repr__(self) -> str:
        return f"frame_causal({self.tokens_per_frame}{f', start={self.start}' if self.start else ''})"


@dataclass(frozen=True, slots=True, repr=False)
class _Pair(Mask):
    a: Mask
    b: Mask

    @property
    def num_positions(self) -> int:
        return min(self.a.num_positions, self.b.num_positions)


class _And(_Pair):
    __slots__ = ()

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return self.a._allowed(q, kv) & self.b._allowed(q, kv)

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        pairs = itertools.product(self.a._bands(q), self.b._bands(q))
        return tuple(Band(np.maximum(a.lo, b.lo), np.minimum(a.hi, b.hi)) for a, b in pairs)

    def __repr__(self) -> str:
        return f"{_in_brackets(self.a, _Or)} & {_in_brackets(self.b, _Or, _And)}"


class _Or(_Pair):
    __slots__ = ()

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return self.a._allowed(q, kv) | self.b._allowed(q, kv)

    def _bands(self, q: Positions) -> tuple[Band, ...]:
        return self.a._bands(q) + self.b._bands(q)

    def __repr__(self) -> str:
        return f"{self.a} | {_in_brackets(self.b, _Or)}"


def _in_brackets(mask: Mask, *kinds: type[Mask]) -> str:
    return f"({mask})" if isinstance(mask, kinds) else str(mask)


@dataclass(frozen=True, slots=True, repr=False)
class _PerRow(Mask):
    masks: tuple[Mask, ...]

    @property
    def rows(self) -> tuple[Mask, ...]:
        return self.masks

    @property
    def num_positions(self) -> int:
        return min(mask.num_positions for mask in self.masks)

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return np.stack([mask._allowed(q, kv) for mask in self.masks])

    def _bands(self, q: Positions) -> tuple[Band, ...]:  # noqa: ARG002
        raise MaskError(f"{self}.bands(...): the batch rows see different bands; ask each mask of .rows for its own")

    def coverage(self, q_span: Span, kv_span: Span) -> Coverage:
        found = {mask.coverage(q_span, kv_span) for mask in set(self.masks)}
        return found.pop() if len(found) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"per_row({list(self.masks)})"


def _combine(kind: type[_And] | type[_Or], a: Mask, b: Mask) -> Mask:
    """`kind(a, b)`, row by row if either is per_row, so that per_row is always outermost."""
    if a.rows is None and b.rows is None:
        return kind(a, b)
    if a.rows is not None and b.rows is not None and len(a.rows) != len(b.rows):
        raise MaskError(
            f"per_row of {len(a.rows)} and of {len(b.rows)} rows: rows combine one by one; use equal numbers"
        )
    num_rows = len(a.rows or b.rows or ())
    pairs = zip(a.rows or (a,) * num_rows, b.rows or (b,) * num_rows, strict=True)
    return _PerRow(tuple(kind(left, right) for left, right in pairs))


def _band_coverage(bands_at: Callable[[Positions], tuple[Band, ...]], q_span: Span, kv_span: Span) -> Coverage:
    """Coverage of a tile that has rows and columns, from as few rows as decide it.

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


def full() -> Mask:
    """Everyone sees everyone."""
    return _Full()


def causal() -> Mask:
    """Up to the query itself: kv <= q."""
    return _Causal()


def sliding_window(left: int | None, right: int | None) -> Mask:
    """The window q - left <= kv <= q + right; None is unbounded. A window of W tokens ending at q is (W - 1, 0)."""
    left = None if left is None else _integer("sliding_window", "left", left)
    right = None if right is None else _integer("sliding_window", "right", right)
    if left is not None and right is not None and left + right < 0:
        raise MaskError(f"sliding_window(left={left}, right={right}): nothing is visible; make left + right at least 0")
    return _SlidingWindow(left, right)


def prefix(n: int) -> Mask:
    """Visible if kv < n or kv <= q: the prefix sees itself whole, the rest is causal."""
    return _Prefix(_integer("prefix", "n", n, at_least=0))


def documents(lengths: Iterable[int]) -> Mask:
    """Packed documents: q and kv in the same one. Positions past the last are refused."""
    values = enumerate(_list("documents", "lengths", lengths))
    checked = tuple(_integer("documents", f"lengths[{i}]", value, at_least=1) for i, value in values)
    if sum(checked) >= UNBOUNDED:
        raise MaskError(f"documents(lengths) has {sum(checked)} tokens; positions stay below 2**62, so use fewer")
    return _Documents(checked)


def frame_causal(tokens_per_frame: int, start: int = 0) -> Mask:
    """Video: own frame, earlier frames, and all before `start`; a q before `start` sees all before `start`."""
    return _FrameCausal(
        _integer("frame_causal", "tokens_per_frame", tokens_per_frame, at_least=1),
        _integer("frame_causal", "start", start, at_least=0),
    )


def per_row(masks: Iterable[Mask]) -> Mask:
    """One mask per batch row (padding, different lengths)."""
    rows = _list("per_row", "masks", masks)
    for i, row in enumerate(rows):
        if not isinstance(row, Mask) or row.rows is not None:
            raise MaskError(f"per_row(masks[{i}]={row!r}): a row has one mask; pass masks that are not per_row")
    return _PerRow(tuple(rows))


def _integer(function: str, name: str, value: SupportsIndex, at_least: int = 1 - UNBOUNDED) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = UNBOUNDED
    if isinstance(value, bool) or not at_least <= number < UNBOUNDED:
        rule = f"of at least {at_least}" if at_least >= 0 else "below 2**62, or None for no bound"
        raise MaskError(f"{function}({name}={value!r}): {name} counts tokens; pass an int {rule}")
    return number


def _list(function: str, name: str, values: Iterable[T]) -> list[T]:
    listed = list(values) if isinstance(values, Iterable) else []
    if not listed:
        raise MaskError(f"{function}({name}={values!r}): {name} is a list of one or more; pass at least one")
    return listed

"""Who may attend to whom, as a small value instead of a dense matrix.

Every mask is a union of bands (`_bands.py`), and whatever the rest of the library wants to know (is this tile empty,
how much work is it, how can it be cut) follows from the ends of a few intervals.

`allowed` says what a mask means, written straight from its definition; `bands` is derived, and tests hold the two
together.
"""

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ringspan.arguments import check_arguments, instance_of
from ringspan.errors import MaskError
from ringspan.mask._bands import UNBOUNDED, Band, Coverage, Intersection, Union, band_coverage, intersect, unite
from ringspan.span import Positions, Span

T = TypeVar("T")
Allowed = npt.NDArray[np.bool_]

_SPAN = instance_of(Span, "Span(0, 8)")
_DEEPEST = 64  # levels of brackets in a mask; a chain without brackets is one level, however long


class Mask(ABC):
    """The key positions that each query position sees. Built by the functions below, combined with `&` and `|`."""

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
        q = self.known("q_positions", q_positions)
        return tuple(part.band(q) for part in self.union)

    def coverage(self, q_span: Span, kv_span: Span) -> Coverage:
        """Whether nothing, everything or something of the tile is visible.

        Exact, save that a tile which only several parts of an `|` fill together counts as PARTIAL.
        """
        check_arguments(q_span=(_SPAN, q_span), kv_span=(_SPAN, kv_span))
        self._check_known("q_span", q_span.stop if len(q_span) else 0)
        self._check_known("kv_span", kv_span.stop if len(kv_span) else 0)
        if not len(q_span) or not len(kv_span):
            return Coverage.EMPTY
        return band_coverage(lambda q: tuple(part.band(q) for part in self.union), q_span, kv_span)

    def _check_known(self, name: str, stop: int) -> None:
        """Refuse the argument called `name` if its positions, all below `stop`, are not all known to the mask."""
        if stop > self.num_positions:
            rule = f"the mask's documents have {self.num_positions} tokens"
            raise MaskError(f"{name} reaches position {stop - 1}: {rule}", remedy="add a document for the rest")

    def known(self, name: str, values: npt.ArrayLike) -> Positions:
        """The argument called `name` as an array; refused if the mask does not know these positions."""
        array = np.asarray(values)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            found = f"{name} has shape {array.shape} and dtype {array.dtype}"
            raise MaskError(f"{found}: positions are integers in one dimension", remedy="see Span(0, 8).positions()")
        if array.size and array.min() < 0:
            raise MaskError(f"{name} contains {array.min()}: positions count from 0", remedy="shift them")
        self._check_known(name, int(array.max()) + 1 if array.size else 0)
        return array.astype(np.int64, copy=False)

    @abstractmethod
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        """`allowed` for q of shape (q, 1) and kv of shape (1, kv)."""

    @property
    def union(self) -> Union:
        """The intersections of limits whose union this mask is; a mask that is one band need only define `band`."""
        return (Intersection(others=frozenset([self])),)

    def band(self, q: Positions) -> Band:
        """Return the band of a mask that consists of one."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        """Levels of brackets."""
        return 0

    def __and__(self, other: "Mask") -> "Mask":
        return _combine(_And, self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: "Mask") -> "Mask":
        return _combine(_Or, self, other) if isinstance(other, Mask) else NotImplemented


@dataclass(frozen=True, slots=True, repr=False)
class _Combined(Mask):
    terms: tuple[Mask, ...]  # a chain is stored flat, so that a long one needs no deep recursion
    _union: Union = field(compare=False)
    _depth: int = field(compare=False)

    @property
    def num_positions(self) -> int:
        return min(term.num_positions for term in self.terms)

    @property
    def union(self) -> Union:
        return self._union

    @property
    def depth(self) -> int:
        return self._depth


class _And(_Combined):
    __slots__ = ()

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return functools.reduce(operator.and_, (term._allowed(q, kv) for term in self.terms))

    def __repr__(self) -> str:
        first, *rest = self.terms
        return " & ".join([_in_brackets(first, _Or), *(_in_brackets(term, _Or, _And) for term in rest)])


class _Or(_Combined):
    __slots__ = ()

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return functools.reduce(operator.or_, (term._allowed(q, kv) for term in self.terms))

    def __repr__(self) -> str:
        first, *rest = self.terms
        return " | ".join([str(first), *(_in_brackets(term, _Or) for term in rest)])


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

    @property
    def union(self) -> Union:
        raise MaskError(
            f"{self}.bands(...): the batch rows see different bands", remedy="ask each mask of .rows for its own"
        )

    @property
    def depth(self) -> int:
        return max(mask.depth for mask in self.masks)

    def coverage(self, q_span: Span, kv_span: Span) -> Coverage:
        found = {mask.coverage(q_span, kv_span) for mask in set(self.masks)}
        return found.pop() if len(found) == 1 else Coverage.PARTIAL

    def __repr__(self) -> str:
        return f"per_row({list(self.masks)})"


def _combine(kind: type[_And] | type[_Or], a: Mask, b: Mask) -> Mask:
    """`kind(a, b)`, row by row if either is per_row, so that per_row is always outermost."""
    if a.rows is None and b.rows is None:
        return _chain(kind, a, b)
    if a.rows is not None and b.rows is not None and len(a.rows) != len(b.rows):
        raise MaskError(
            f"per_row of {len(a.rows)} and of {len(b.rows)} rows: rows combine one by one", remedy="use equal numbers"
        )
    num_rows = len(a.rows or b.rows or ())
    pairs = zip(a.rows or (a,) * num_rows, b.rows or (b,) * num_rows, strict=True)
    return _PerRow(tuple(_chain(kind, left, right) for left, right in pairs))


def _chain(kind: type[_And] | type[_Or], a: Mask, b: Mask) -> Mask:
    """Append `b` to a chain of this kind, or make a chain of the two."""
    continues = type(a) is kind
    depth = max(a.depth, b.depth + 1) if continues else max(a.depth, b.depth) + 1
    if depth > _DEEPEST:
        raise MaskError(
            f"a mask of more than {_DEEPEST} levels of brackets cannot be read", remedy="combine its parts in a chain"
        )
    union = intersect(a.union, b.union) if kind is _And else unite((*a.union, *b.union))
    return kind(((*a.terms, b) if continues and isinstance(a, _Combined) else (a, b)), union, depth)


def per_row(masks: Iterable[Mask]) -> Mask:
    """One mask per batch row (padding, different lengths)."""
    rows = listed("per_row", "masks", masks)
    for i, row in enumerate(rows):
        if not isinstance(row, Mask) or row.rows is not None:
            raise MaskError(
                f"per_row(masks[{i}]={row!r}): a row has one mask", remedy="pass masks that are not per_row"
            )
    return _PerRow(tuple(rows))


def listed(function: str, name: str, values: Iterable[T]) -> list[T]:
    """The argument called `name` as a list; refused if it is empty or no list."""
    is_list = isinstance(values, Iterable) and getattr(values, "shape", None) != ()
    found = list(values) if is_list else []
    if not found:
        raise MaskError(f"{function}({name}={values!r}): {name} is a list of one or more", remedy="pass at least one")
    return found

"""The basic masks: who sees whom, one interval of keys for each query.

`_allowed` is written straight from the definition of a mask; `band` and `union` say the same by limits.
"""

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from ringspan.errors import MaskError
from ringspan.mask._bands import UNBOUNDED, Band, Intersection, Union
from ringspan.mask._masks import Allowed, Mask, listed
from ringspan.span import Positions


@dataclass(frozen=True, slots=True, repr=False)
class _Full(Mask):
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return np.ones((q.size, kv.size), dtype=np.bool_)

    @property
    def union(self) -> Union:
        return (Intersection(),)

    def __repr__(self) -> str:
        return "full()"


@dataclass(frozen=True, slots=True, repr=False)
class _Causal(Mask):
    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return kv <= q

    @property
    def union(self) -> Union:
        return (Intersection(right=0),)

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

    @property
    def union(self) -> Union:
        return (Intersection(self.left, self.right),)

    def __repr__(self) -> str:
        return f"sliding_window({self.left}, {self.right})"


@dataclass(frozen=True, slots=True, repr=False)
class _Prefix(Mask):
    n: int

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return (kv < self.n) | (kv <= q)

    @property
    def union(self) -> Union:
        return (Intersection(prefix=self.n),)

    def __repr__(self) -> str:
        return f"prefix({self.n})"


@dataclass(frozen=True, slots=True, repr=False)
class _Documents(Mask):
    lengths: tuple[int, ...]
    _bounds: Positions = field(init=False, compare=False)  # 0, then the end of each document

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

    def band(self, q: Positions) -> Band:
        """From the first to the last token of the query's document."""
        document = self._document(q)
        return Band(self._bounds[document], self._bounds[document + 1])

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

    def band(self, q: Positions) -> Band:
        """Up to the end of the query's frame."""
        end_of_frame = self.start + (self._frame(q) + 1) * self.tokens_per_frame
        return Band(np.zeros_like(q), np.maximum(end_of_frame, self.start))

    def _frame(self, positions: Positions) -> Positions:
        """The frame's number; negative before `start`."""
        return (positions - self.start) // self.tokens_per_frame

    def __repr__(self) -> str:
        return f"frame_causal({self.tokens_per_frame}{f', start={self.start}' if self.start else ''})"


@dataclass(frozen=True, slots=True, repr=False)
class _Chunks(Mask):
    size: int
    start: int

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        same: Allowed = self._chunk(q) == self._chunk(kv)
        return same

    def band(self, q: Positions) -> Band:
        """From the first to the last token of the query's chunk."""
        first = self.start + self._chunk(q) * self.size
        return Band(np.maximum(first, 0), first + self.size)

    def _chunk(self, positions: Positions) -> Positions:
        """The chunk's number; negative before `start`."""
        return (positions - self.start) // self.size

    def __repr__(self) -> str:
        return f"chunks({self.size}{f', start={self.start}' if self.start else ''})"


@dataclass(frozen=True, slots=True, repr=False)
class _Blocks(Mask):
    spans: tuple[tuple[int, int], ...]  # start and stop, ascending
    _starts: Positions = field(init=False, compare=False)
    _stops: Positions = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for name, ends in zip(("_starts", "_stops"), np.array(self.spans, np.int64).T, strict=True):
            ends.flags.writeable = False
            object.__setattr__(self, name, ends)

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        block, kv_block = self._block(q), self._block(kv)
        same: Allowed = (block == kv_block) & self._is_in(q, block) & self._is_in(kv, kv_block)
        return same

    def band(self, q: Positions) -> Band:
        """The query's block; between blocks an empty band that does not fall: at the start of the next block."""
        block = self._block(q)
        last = int(self._stops[-1])
        starts, stops = np.append(self._starts, last), np.append(self._stops, last)
        return Band(starts[block], np.where(self._is_in(q, block), stops[block], starts[block]))

    def _block(self, positions: Positions) -> npt.NDArray[np.intp]:
        """The block that a position is in, or the next one."""
        return np.searchsorted(self._stops, positions, side="right")

    def _is_in(self, positions: Positions, block: npt.NDArray[np.intp]) -> Allowed:
        inside: Allowed = np.append(self._starts, UNBOUNDED)[block] <= positions
        return inside

    def __repr__(self) -> str:
        return f"blocks({[*map(list, self.spans)]})"


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
        raise MaskError(
            f"sliding_window(left={left}, right={right}): nothing is visible", remedy="make left + right at least 0"
        )
    return _SlidingWindow(left, right)


def prefix(n: int) -> Mask:
    """Visible if kv < n or kv <= q: the prefix sees itself whole, the rest is causal."""
    return _Prefix(_integer("prefix", "n", n, at_least=0))


def documents(lengths: Iterable[int]) -> Mask:
    """Packed documents: q and kv in the same one. Positions past the last are refused."""
    values = enumerate(listed("documents", "lengths", lengths))
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


def chunks(size: int, start: int = 0) -> Mask:
    """Chunks of `size` tokens counted from `start`: q and kv in the same one, as in Llama 4 with `& causal()`."""
    return _Chunks(
        _integer("chunks", "size", size, at_least=1),
        _integer("chunks", "start", start, at_least=0),
    )


def blocks(spans: Iterable[tuple[int, int]]) -> Mask:
    """Runs of positions [start, stop): q and kv in the same one; nothing is visible outside of them.

    `causal() | blocks([(3, 7)])` lets the four tokens of an image see each other in a causal sequence.
    """
    checked = tuple(_span(i, span) for i, span in enumerate(listed("blocks", "spans", spans)))
    for i, ((_, stop), (start, _)) in enumerate(itertools.pairwise(checked)):
        if start < stop:
            raise MaskError(
                f"blocks(spans[{i + 1}]): it starts at {start} and the one before ends at {stop}", remedy="sort them"
            )
    return _Blocks(checked)


def _span(i: int, span: Iterable[SupportsIndex]) -> tuple[int, int]:
    try:
        ends = tuple(span)
    except TypeError:
        ends = ()
    if len(ends) != 2:
        raise MaskError(f"blocks(spans[{i}]={span!r}): a block is (start, stop)", remedy="pass two numbers")
    start, stop = (_integer("blocks", f"spans[{i}][{j}]", end, at_least=0) for j, end in enumerate(ends))
    if stop <= start:
        raise MaskError(f"blocks(spans[{i}]={span!r}): a block has at least one position", remedy="make stop > start")
    return start, stop


def _integer(function: str, name: str, value: SupportsIndex, at_least: int = 1 - UNBOUNDED) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = UNBOUNDED
    if isinstance(value, bool) or not at_least <= number < UNBOUNDED:
        rule = "below 2**62" + (f" and of at least {at_least}" if at_least >= 0 else ", or None for no bound")
        raise MaskError(f"{function}({name}={value!r}): {name} counts tokens", remedy=f"pass an int {rule}")
    return number

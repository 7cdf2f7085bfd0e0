"""Who holds which token?

A layout is a value: the spans of positions that each rank owns, and the positions that every rank holds a copy of. It
does not depend on masks, tensors or groups, so it can key caches and be compared between ranks. Shards and work counts
are computed by arithmetic on spans and sorted positions, never on a query × key matrix, so that a million tokens take
about a second.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from ringspan.arguments import ARRAY, ITERABLE, LIST, MOST_RANKS, WHOLE, Kind, check_arguments, instance_of
from ringspan.errors import LayoutError, ShapeError
from ringspan.layout._pairs import BandedMask, Counts, Work, count_pairs
from ringspan.layout._picture import draw_layout
from ringspan.span import Positions, Span

Array = TypeVar("Array")  # a NumPy array or a tensor

_MASK = Kind("a Mask", "give one, such as rs.causal()", lambda value: callable(getattr(value, "bands", None)))

SHOWN = 4  # ranks and spans per rank in a printed layout


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layout:
    """The positions that each rank owns, and the positions that all ranks hold.

    Uneven shards, empty shards and gaps are legal. A rank's spans ascend, and no position has two owners. Empty spans
    are dropped and adjacent spans joined. The rows of a rank's shard are its positions in ascending order.
    """

    spans_by_rank: tuple[tuple[Span, ...], ...]
    replicated: tuple[Span, ...] = ()
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        check_arguments(spans_by_rank=(ITERABLE, self.spans_by_rank), replicated=(ITERABLE, self.replicated))
        spans_by_rank = tuple(_ascending(spans, f"rank {rank}") for rank, spans in enumerate(self.spans_by_rank))
        replicated = _ascending(self.replicated, "replicated")
        if not spans_by_rank:
            raise LayoutError(
                "a layout has at least one rank",
                argument="spans_by_rank",
                value=(),
                remedy="give one tuple of spans per rank",
            )
        _refuse_overlap(spans_by_rank, replicated)
        object.__setattr__(self, "spans_by_rank", spans_by_rank)
        object.__setattr__(self, "replicated", replicated)
        object.__setattr__(self, "_hash", hash((spans_by_rank, replicated)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self._hash, self.spans_by_rank, self.replicated)
        return self is other or mine == (other._hash, other.spans_by_rank, other.replicated)

    def __reduce__(self) -> tuple[type["Layout"], tuple[object, ...]]:
        return Layout, (self.spans_by_rank, self.replicated)

    def __repr__(self) -> str:
        ranks = [_format_spans(spans) for spans in self.spans_by_rank[:SHOWN]]
        if self.world_size > SHOWN:
            ranks.append("…")
        copies = f"; replicated {_format_spans(self.replicated)}" if self.replicated else ""
        return f"<Layout of {self.num_positions} positions on {self.world_size} ranks: {' | '.join(ranks)}{copies}>"

    def _repr_html_(self) -> str:
        return draw_layout(self)

    def fingerprint(self) -> str:
        """Return a short text that is equal on all machines and differs between different layouts."""
        spans = repr((self.spans_by_rank, self.replicated)).encode()
        return f"{self!r} #{hashlib.blake2b(spans, digest_size=8).hexdigest()}"

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.spans_by_rank)

    @property
    def num_positions(self) -> int:
        """The number of distinct positions; a replicated position counts once."""
        return sum(len(span) for span in self._all_spans())

    def own_positions(self, rank: int) -> Positions:
        """Return the positions that only this rank holds, ascending."""
        return _positions(self._spans(rank))

    def positions(self, rank: int) -> Positions:
        """Return the positions of the rows of this rank's shard, own and replicated, ascending."""
        own = self.own_positions(rank)
        return _merge(own, self.replicated_positions()) if self.replicated else own

    def replicated_positions(self) -> Positions:
        """Return the positions that every rank holds, ascending."""
        return _positions(self.replicated)

    def all_positions(self) -> Positions:
        """Return every position of the layout once, ascending."""
        spans = list(self._all_spans())
        if not spans:
            return np.empty(0, np.int64)
        first, stop = min(span.start for span in spans), max(span.stop for span in spans)
        if stop - first == self.num_positions:
            return np.arange(first, stop, dtype=np.int64)
        return _merge(*(span.positions() for span in spans))

    def shard_len(self, rank: int) -> int:
        """Return the number of positions that this rank holds, replicated ones included."""
        return sum(map(len, self._spans(rank))) + sum(map(len, self.replicated))

    def shard(self, x: Array, rank: int, dim: int) -> Array:
        """Cut this rank's rows out of a whole array or tensor.

        Args:
            x: The whole. Index i of `dim` is position `all_positions()[i]`.
            rank: The rank whose rows to take.
            dim: The dim of the sequence.

        Returns:
            A view if the rows are one run, else a copy.
        """
        whole: Any = x
        check_arguments(rank=(WHOLE, rank))
        dim = _check_dim(whole, dim, "x")
        if whole.shape[dim] != self.num_positions:
            rule = f"the layout has {self.num_positions} positions; give one row for each, in ascending order"
            raise ShapeError(rule, argument=f"x.shape[{dim}]", value=whole.shape[dim])
        part: Array = whole[_at(dim, _rows(self, rank))]
        return part

    def unshard(self, parts: Sequence[Array], dim: int) -> Array:
        """Put one array per rank together, the inverse of `shard`. Replicated rows are taken from rank 0."""
        check_arguments(parts=(LIST, parts))
        if len(parts) != self.world_size:
            raise ShapeError(
                f"the layout has {self.world_size} ranks",
                argument="len(parts)",
                value=len(parts),
                remedy="give one part for each",
            )
        arrays: Sequence[Any] = parts
        dim = _check_dim(arrays[0], dim, "parts[0]")
        shape = list(arrays[0].shape)
        for rank, part in enumerate(arrays):
            check_arguments(**{f"parts[{rank}]": (ARRAY, part)})
            shape[dim] = self.shard_len(rank)
            if list(part.shape) != shape:
                raise ShapeError(
                    f"rank {rank} holds {shape[dim]} positions along dim {dim}, and the other dims are those "
                    f"of rank 0; expected {tuple(shape)}",
                    argument=f"parts[{rank}].shape",
                    value=tuple(part.shape),
                )
            if part.dtype != arrays[0].dtype:
                raise ShapeError(
                    f"its dtype is {part.dtype}, and parts[0] has {arrays[0].dtype}",
                    argument=f"parts[{rank}]",
                    remedy="give all parts the same dtype",
                )
        shape[dim] = self.num_positions
        new_empty = getattr(arrays[0], "new_empty", None)
        whole: Any = new_empty(shape) if new_empty else np.empty(shape, arrays[0].dtype)
        for rank in reversed(range(self.world_size)):  # rank 0 last: its replicated rows stay
            whole[_at(dim, _rows(self, rank))] = arrays[rank]
        out: Array = whole
        return out

    def work(self, mask: BandedMask, kv_layout: "Layout | None" = None) -> Work:
        """Count the visible (query, key) pairs of every rank's queries with every rank's keys, exactly."""
        counts = self.count_pairs(mask, self if kv_layout is None else kv_layout)
        pairs = counts[:, :-1].copy()
        pairs[np.diag_indices_from(pairs)] += counts[:, -1]
        return Work(pairs)

    def count_pairs(self, mask: BandedMask, kv_layout: "Layout") -> Counts:
        """Count visible pairs [q rank, kv owner], (world_size, world_size + 1); the last column is replicated keys."""
        check_arguments(mask=(_MASK, mask), kv_layout=(instance_of(Layout, "rs.zigzag(8192, 4)"), kv_layout))
        if kv_layout.world_size != self.world_size:
            raise LayoutError(
                "queries and keys are held by the same ranks",
                argument="kv_layout.world_size",
                value=kv_layout.world_size,
                remedy=f"use a layout for {self.world_size} ranks",
            )
        queries = [self.positions(rank) for rank in range(self.world_size)]
        return count_pairs(mask, queries, (*kv_layout.spans_by_rank, kv_layout.replicated))

    def _spans(self, rank: int) -> tuple[Span, ...]:
        check_arguments(rank=(WHOLE, rank))
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"the layout has {self.world_size} ranks",
                argument="rank",
                value=rank,
                remedy=f"use 0 to {self.world_size - 1}",
            )
        return self.spans_by_rank[rank]

    def _all_spans(self) -> Iterator[Span]:
        for spans in (*self.spans_by_rank, self.replicated):
            yield from spans


def contiguous(seq_len: int, world_size: int, *, align: int = 1, start: int = 0) -> Layout:
    """Give each rank one run of nearly equal length, in rank order.

    Every cut lies on `start` plus a multiple of `align`.
    """
    _check_builder(seq_len, world_size, align, start)
    cuts = near_equal_cuts(seq_len, world_size, align=align, start=start)
    return Layout(tuple((Span(*cuts[rank : rank + 2]),) for rank in range(world_size)))


def zigzag(seq_len: int, world_size: int, *, align: int = 1, start: int = 0) -> Layout:
    """Cut 2P nearly equal chunks and give rank r the chunks r and 2P-1-r, which balances a causal mask.

    Every cut lies on `start` plus a multiple of `align`. See arXiv 2411.01783, section 3.5.1.
    """
    _check_builder(seq_len, world_size, align, start)
    cuts = near_equal_cuts(seq_len, 2 * world_size, align=align, start=start)
    chunks = [Span(*cuts[i : i + 2]) for i in range(2 * world_size)]
    return Layout(tuple((chunks[rank], chunks[-1 - rank]) for rank in range(world_size)))


def striped(seq_len: int, world_size: int, *, block: int = 1, align: int = 1, start: int = 0) -> Layout:
    """Deal blocks of `block` tokens to the ranks round-robin; `block` must be a multiple of `align`."""
    _check_builder(seq_len, world_size, align, start, block)
    if block % align:
        raise LayoutError(
            f"block={block}, align={align}: blocks are dealt whole, so block is a multiple of align",
            remedy=f"use block={-(-block // align) * align}",
        )
    stop = start + seq_len
    if block == 1:
        return Layout(tuple((Span(start + rank, stop, world_size),) for rank in range(world_size)))
    firsts = [range(start + rank * block, stop, block * world_size) for rank in range(world_size)]
    return Layout(tuple(tuple(Span(first, min(first + block, stop)) for first in rank) for rank in firsts))


def near_equal_cuts(seq_len: int, num_chunks: int, *, align: int, start: int) -> list[int]:
    """Return the num_chunks + 1 ends of chunks on the align grid whose lengths differ by at most `align`.

    The longer chunks come first. The remainder below one align unit goes to the last chunk.
    """
    units, extra = divmod(seq_len // align, num_chunks)
    return [*(start + align * (i * units + min(i, extra)) for i in range(num_chunks)), start + seq_len]


def _check_builder(seq_len: int, world_size: int, align: int, start: int, block: int = 1) -> None:
    checks = (
        *(("seq_len", seq_len, 0), ("world_size", world_size, 1)),
        *(("align", align, 1), ("start", start, 0), ("block", block, 1)),
    )
    for name, value, least in checks:
        if not WHOLE.holds(value):
            raise LayoutError(f"{name} is a whole number", argument=name, value=value, remedy="give an int")
        if value < least:
            raise LayoutError(
                f"{name} is at least {least}", argument=name, value=value, remedy=f"use {name}={least} or more"
            )
    if world_size > MOST_RANKS:
        raise LayoutError(
            f"a group has at most {MOST_RANKS} ranks", argument="world_size", value=world_size, remedy="use fewer"
        )


def _ascending(spans: Iterable[Span], name: str) -> tuple[Span, ...]:
    """Drop empty spans and join adjacent runs; refuse spans that do not ascend one after the other."""
    kept: list[Span] = []
    check_arguments(**{name: (ITERABLE, spans)})
    for span in spans:
        if not isinstance(span, Span):
            raise LayoutError(
                f"{span!r} is not a span", argument=name, remedy="give Span(start, stop) or Span(start, stop, step)"
            )
        if not len(span):
            continue
        if kept and span.start <= kept[-1].last:
            raise LayoutError(
                f"span {span} begins before the end of span {kept[-1]}; the positions of a rank ascend span after span",
                argument=name,
                remedy="sort the spans, and cut strided ones that interleave",
            )
        if kept and span.start == kept[-1].stop and span.step == kept[-1].step == 1:
            kept[-1] = Span(kept[-1].start, span.stop)
        else:
            kept.append(span)
    return tuple(kept)


def _refuse_overlap(spans_by_rank: tuple[tuple[Span, ...], ...], replicated: tuple[Span, ...]) -> None:
    """Raise unless every position has one owner, or is replicated and has none.

    Each span, in order of start, is compared with the k-th next one, for k = 1, 2, … while any pair still overlaps as
    intervals. Two strided spans can meet only if their distance is a multiple of the gcd of their steps.
    """
    owned = [(span, rank) for rank, spans in enumerate((*spans_by_rank, replicated)) for span in spans]
    owned.sort(key=lambda pair: pair[0].start)
    start = np.array([span.start for span, _ in owned], np.int64)
    stop = np.array([span.stop for span, _ in owned], np.int64)
    step = np.array([span.step for span, _ in owned], np.int64)
    near = np.arange(len(owned))
    for k in range(1, len(owned)):
        near = near[near + k < len(owned)]
        near = near[start[near + k] < stop[near]]
        if not len(near):
            return
        gap = start[near + k] - start[near]
        for i in near[gap % np.gcd(step[near], step[near + k]) == 0]:
            (first, a), (second, b) = owned[i], owned[i + k]
            position = _common_position(first, second)
            if position is not None:
                names = [f"rank {rank}" if rank < len(spans_by_rank) else "replicated" for rank in sorted((a, b))]
                raise LayoutError(
                    f"position {position} is in {names[0]} and in {names[1]}: a position has one owner, or is "
                    "replicated and has none",
                    remedy="take it out of one of them, or out of all ranks into `replicated`",
                )


def _common_position(first: Span, second: Span) -> int | None:
    """The smallest position in both spans, by the Chinese remainder theorem; first.start <= second.start."""
    common = math.gcd(first.step, second.step)
    jump, offset = divmod(first.start - second.start, common)
    if offset:
        return None
    modulus = first.step // common
    position = second.start + second.step * (jump * pow(second.step // common, -1, modulus) % modulus)
    return position if position <= min(first.last, second.last) else None


def _positions(spans: Sequence[Span]) -> Positions:
    return np.concatenate([np.empty(0, np.int64), *(span.positions() for span in spans)])


def _merge(*ascending: Positions) -> Positions:
    return np.sort(np.concatenate(ascending), kind="stable")  # the stable sort merges runs that already ascend


def _format_spans(spans: Sequence[Span]) -> str:
    return " ".join([*map(str, spans[:SHOWN]), *(["…"] if len(spans) > SHOWN else [])]) or "-"


def _check_dim(x: Any, dim: int, name: str) -> int:
    check_arguments(**{name: (ARRAY, x)}, dim=(WHOLE, dim))
    num_dims = len(x.shape)
    if not -num_dims <= dim < num_dims:
        raise ShapeError(
            f"{name} has {num_dims} dims", argument="dim", value=dim, remedy=f"use -{num_dims} to {num_dims - 1}"
        )
    return dim % num_dims


def _at(dim: int, index: slice | Positions) -> tuple[slice | Positions, ...]:
    return (*[slice(None)] * dim, index)


@functools.lru_cache(maxsize=64)
def _rows(layout: Layout, rank: int) -> slice | Positions:
    """Return where a rank's positions are among all positions: a slice if they are one run, else indices."""
    everything, held = layout.all_positions(), layout.positions(rank)
    if not len(held):
        return slice(0, 0)
    index = np.searchsorted(everything, held)
    first, stop = int(index[0]), int(index[-1]) + 1
    return slice(first, stop) if stop - first == len(index) else index

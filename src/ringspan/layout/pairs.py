"""How many query-key pairs does a mask make of a placement of tokens?

Counts are exact, and come from the ends of visible intervals alone: never from a query × key matrix, so that a million
tokens take well under a second. The queries are positions; the keys are spans with an owner each.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringspan.span import Positions, Span

Counts = npt.NDArray[np.int64]


class BandedMask(Protocol):
    """What counting needs of a mask: per query row, intervals [lo, hi) of visible positions."""

    @property
    def rows(self) -> "Sequence[BandedMask] | None":
        """One mask per batch row, or None if all rows share this one."""

    def bands(self, q_positions: Positions, /) -> Sequence[tuple[Positions, Positions]]:
        """The (lo, hi) of every band, one entry per query."""


class Work(NamedTuple):
    """How many (query, key) pairs each rank attends, and against whose keys.

    `pairs` is (world_size, world_size): [q rank, kv owner], summed over the rows of a per_row mask. Replicated keys
    count to the rank that reads them; replicated queries count on every rank, since every rank computes them.
    """

    pairs: Counts

    @property
    def per_rank(self) -> Counts:
        """(world_size,): all pairs of each q rank."""
        per_rank: Counts = self.pairs.sum(axis=1)
        return per_rank

    @property
    def per_step(self) -> Counts:
        """(world_size, world_size): [step t, rank r], the pairs of r with the keys of (r - t) mod P, met at step t."""
        ranks = np.arange(len(self.pairs))
        return np.take_along_axis(self.pairs, (ranks[:, None] - ranks) % len(ranks), axis=1).T

    @property
    def imbalance(self) -> float:
        """Time over ideal time of a ring that waits for its busiest rank at every step; 1.0 is perfect."""
        total = int(self.pairs.sum())
        busiest = int(self.per_step.max(axis=1).sum())
        return busiest * len(self.pairs) / total if total else 1.0


def count_pairs(mask: BandedMask, queries: Sequence[Positions], keys: Sequence[Sequence[Span]]) -> Counts:
    """(num q owners, num kv owners): the visible pairs of each owner's queries with each owner's keys."""
    runs = _Stripes.of(keys) or _KeyRuns.of(keys)
    masks = (mask,) if mask.rows is None else mask.rows
    counts = np.zeros((len(queries), len(keys)), np.int64)
    for owner, q_positions in enumerate(queries):
        for one in masks:
            lo, hi = _disjoint(one.bands(q_positions), len(q_positions))
            counts[owner] += runs.count_below(hi) - runs.count_below(lo)
    return counts


def _disjoint(bands: Sequence[tuple[Positions, Positions]], num_rows: int) -> tuple[Positions, Positions]:
    """The union of the bands as intervals that do not meet within a row: all lo and all hi, in no particular order."""
    if not bands:
        return np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    lo = np.stack([band_lo for band_lo, _ in bands])
    hi = np.maximum(lo, np.stack([band_hi for _, band_hi in bands]))
    if len(bands) > 1:
        order = lo.argsort(axis=0, kind="stable")
        lo, hi = np.take_along_axis(lo, order, 0), np.take_along_axis(hi, order, 0)
        reached = np.maximum.accumulate(hi, axis=0)
        lo[1:] = np.maximum(lo[1:], reached[:-1])  # what earlier bands of the row cover is not counted again
        hi = np.maximum(lo, hi)
    return lo.ravel(), hi.ravel()


class _KeyRuns(NamedTuple):
    """The keys as runs that do not overlap, ascending, so that counts per owner are sums over runs.

    A strided span becomes runs of one position each.
    """

    start: Positions
    length: Counts
    by_owner: npt.NDArray[np.intp]  # runs sorted by owner
    owner_ends: npt.NDArray[np.intp]  # (num owners + 1,): where each owner's runs begin in by_owner, and the end

    @classmethod
    def of(cls, groups: Sequence[Sequence[Span]]) -> "_KeyRuns":
        spans = [span for group in groups for span in group]
        runs_of_span = np.array([1 if span.step == 1 else len(span) for span in spans], np.intp)
        lengths = np.array([len(span) if span.step == 1 else 1 for span in spans], np.int64)
        starts = [np.array([span.start]) if span.step == 1 else span.positions() for span in spans]
        owners = np.repeat(np.repeat(np.arange(len(groups)), [len(group) for group in groups]), runs_of_span)
        start, length = np.concatenate([np.empty(0, np.int64), *starts]), np.repeat(lengths, runs_of_span)
        order = start.argsort(kind="stable")
        by_owner = owners[order].argsort(kind="stable")
        owner_ends = np.searchsorted(owners, np.arange(len(groups) + 1))
        return cls(start[order], length[order], by_owner, owner_ends)

    def count_below(self, ends: Positions) -> Counts:
        """(num owners,): summed over `ends`, how many keys of each owner are below the end."""
        runs_below = np.searchsorted(self.start, ends)
        ends_in = np.bincount(runs_below, minlength=len(self.start) + 1)
        ends_past = ends_in[::-1].cumsum()[::-1][1:]  # [run]: ends beyond the start of the run
        inside = runs_below > 0
        last = runs_below[inside] - 1
        # Every run that begins below an end counts whole, but for what sticks out of the last one.
        counts = self.length * ends_past
        np.subtract.at(counts, last, np.maximum(self.start[last] + self.length[last] - ends[inside], 0))
        sums = np.concatenate([np.zeros(1, np.int64), counts[self.by_owner].cumsum()])
        return np.diff(sums[self.owner_ends])


class _Stripes(NamedTuple):
    """The keys as stripes of one step from a common begin to a common end: an interval meets all of them alike.

    The keys below an end are those of the whole periods before it, one for every stripe, and those of its own period.
    """

    begin: int
    end: int
    owner_of: npt.NDArray[np.intp]  # (step,): the owner of each offset in a period; num_owners if it has none
    num_owners: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Span]]) -> "_Stripes | None":
        """The stripes, or None if the keys are no such pattern."""
        spans = [span for group in groups for span in group]
        begin, end = min((span.start for span in spans), default=0), max((span.stop for span in spans), default=0)
        step = spans[0].step if spans else 1
        if step == 1 or any(s.step != step or s.start >= begin + step or s.last + step < end for s in spans):
            return None
        owner_of = np.full(step, len(groups), np.intp)
        for owner, group in enumerate(groups):
            owner_of[[span.start - begin for span in group]] = owner
        return cls(begin, end, owner_of, len(groups))

    def count_below(self, ends: Positions) -> Counts:
        """(num owners,): summed over `ends`, how many keys of each owner are below the end."""
        periods, offsets = np.divmod(np.clip(ends, self.begin, self.end) - self.begin, len(self.owner_of))
        ends_at = np.bincount(offsets, minlength=len(self.owner_of))
        counts = periods.sum() + ends_at[::-1].cumsum()[::-1] - ends_at  # [offset]: and the ends strictly past it
        by_owner = np.zeros(self.num_owners + 1, np.int64)
        np.add.at(by_owner, self.owner_of, counts)
        return by_owner[:-1]

"""How many visible query-key pairs does each rank have under a mask?

Counts are exact. They are computed from the ends of visible intervals, never from a query × key matrix, so that a
million tokens take well under a second. Queries are positions; keys are spans, each with an owner.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringspan.span import Positions, Span

Counts = npt.NDArray[np.int64]


class BandedMask(Protocol):
    """The part of a mask that counting needs: for each query, intervals [lo, hi) of visible positions."""

    @property
    def rows(self) -> "Sequence[BandedMask] | None":
        """One mask per batch row, or None if all rows share this one."""

    def bands(self, q_positions: Positions, /) -> Sequence[tuple[Positions, Positions]]:
        """Return (lo, hi) of every band, with one entry per query."""


class Work(NamedTuple):
    """The number of visible (query, key) pairs that each rank attends, by the owner of the keys.

    `pairs` is (world_size, world_size): [q rank, kv owner], summed over the rows of a `per_row` mask. Replicated keys
    count for the rank that reads them. Replicated queries count on every rank, because every rank computes them.
    """

    pairs: Counts

    @property
    def per_rank(self) -> Counts:
        """The pairs that each rank attends, (world_size,)."""
        per_rank: Counts = self.pairs.sum(axis=1)
        return per_rank

    @property
    def per_step(self) -> Counts:
        """The pairs [step t, rank r] of r's queries with the keys of (r - t) mod P, (world_size, world_size)."""
        ranks = np.arange(len(self.pairs))
        return np.take_along_axis(self.pairs, (ranks[:, None] - ranks) % len(ranks), axis=1).T

    @property
    def imbalance(self) -> float:
        """Time over ideal time of a ring that waits for its busiest rank at every step; 1.0 is ideal."""
        total = int(self.pairs.sum())
        busiest = int(self.per_step.max(axis=1).sum())
        return busiest * len(self.pairs) / total if total else 1.0


def count_pairs(mask: BandedMask, queries: Sequence[Positions], keys: Sequence[Sequence[Span]]) -> Counts:
    """Count the visible pairs of each owner's queries with each owner's keys, (num q owners, num kv owners)."""
    runs = _Stripes.of(keys) or _KeyRuns.of(keys)
    masks = (mask,) if mask.rows is None else mask.rows
    counts = np.zeros((len(queries), len(keys)), np.int64)
    for owner, q_positions in enumerate(queries):
        for one in masks:
            lo, hi = _disjoint(one.bands(q_positions), len(q_positions))
            counts[owner] += runs.count_below(hi) - runs.count_below(lo)
    return counts


def _disjoint(bands: Sequence[tuple[Positions, Positions]], num_rows: int) -> tuple[Positions, Positions]:
    """Return the union of the bands as intervals that are disjoint within a row: all lo and all hi, unordered."""
    if not bands:
        return np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    lo = np.stack([band_lo for band_lo, _ in bands])
    hi = np.maximum(lo, np.stack([band_hi for _, band_hi in bands]))
    if len(bands) > 1:
        order = lo.argsort(axis=0, kind="stable")
        lo, hi = np.take_along_axis(lo, order, 0), np.take_along_axis(hi, order, 0)
        reached = np.maximum.accumulate(hi, axis=0)
        lo[1:] = np.maximum(lo[1:], reached[:-1])  # positions covered by earlier bands of the row count once
        hi = np.maximum(lo, hi)
    return lo.ravel(), hi.ravel()


class _KeyRuns(NamedTuple):
    """The keys as disjoint ascending runs, so that counts per owner are sums over runs.

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
        """Count each owner's keys below an end, summed over `ends`, (num owners,)."""
        runs_below = np.searchsorted(self.start, ends)
        ends_in = np.bincount(runs_below, minlength=len(self.start) + 1)
        ends_past = ends_in[::-1].cumsum()[::-1][1:]  # [run]: number of ends past the start of the run
        inside = runs_below > 0
        last = runs_below[inside] - 1
        # Count every run that begins below an end whole, then subtract the part of the last run beyond the end.
        counts = self.length * ends_past
        np.subtract.at(counts, last, np.maximum(self.start[last] + self.length[last] - ends[inside], 0))
        sums = np.concatenate([np.zeros(1, np.int64), counts[self.by_owner].cumsum()])
        return np.diff(sums[self.owner_ends])


class _Stripes(NamedTuple):
    """The keys as spans that share a step, a first and a last period, so that counting needs no run per position.

    The keys below an end are one per stripe for each whole period before it, and those of the end's own period.
    """

    begin: int
    end: int
    owner_of: npt.NDArray[np.intp]  # (step,): the owner of each offset in a period; num_owners where there is none
    num_owners: int

    @classmethod
    def of(cls, groups: Sequence[Sequence[Span]]) -> "_Stripes | None":
        """Return the stripes, or None if the keys do not have this pattern."""
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
        """Count each owner's keys below an end, summed over `ends`, (num owners,)."""
        periods, offsets = np.divmod(np.clip(ends, self.begin, self.end) - self.begin, len(self.owner_of))
        ends_at = np.bincount(offsets, minlength=len(self.owner_of))
        counts = (
            periods.sum() + ends_at[::-1].cumsum()[::-1] - ends_at
        )  # [offset]: whole periods, and ends strictly past it
        by_owner = np.zeros(self.num_owners + 1, np.int64)
        np.add.at(by_owner, self.owner_of, counts)
        return by_owner[:-1]

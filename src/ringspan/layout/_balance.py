"""Which layout gives every rank the same work at every ring step, whatever the mask?

A ring waits for its busiest rank at every step. The measure is therefore `Layout.work(mask).imbalance`: the sum over
steps of the busiest rank's visible pairs, divided by the mean. `contiguous` or `zigzag` is used if it is good enough,
because a few long runs suit kernels best and need fewer messages. Otherwise the sequence is cut into blocks, the blocks
are dealt to the ranks in a few regular ways, and a local search swaps blocks between ranks while the steps become more
even.

Guaranteed: blocks of at least 128 tokens if the sequence has one per rank, token counts that differ by at most the
longest block, and the same result on every rank and machine (a fixed amount of work; no clock, no randomness, no sums
of floats).

Goal: an imbalance of at most 1.05 with 64 or more blocks of 128 tokens per rank, for up to 16 ranks. Full, causal,
windowed, prefix, frame-causal and packed-document masks and their unions reach it. No layout reaches it for every mask:
if all the work is in one document of 512 tokens, blocks of 128 leave a fifth rank idle, and a causal document needs two
blocks per rank. Shorter sequences have too few blocks to choose from. On more ranks the search ends before its goal,
and beyond 4096 blocks only the deals are compared. `Layout.work` reports the imbalance that was reached.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.arguments import RANKS, WHOLE, check_arguments, instance_of
from ringspan.layout._layouts import Layout, contiguous, near_equal_cuts, zigzag
from ringspan.layout._pairs import Counts, Work, count_pairs
from ringspan.mask import Mask
from ringspan.span import Positions, Span

SMALLEST_BLOCK = 128  # tokens
BLOCKS_PER_RANK = (64, 128)  # the second only if the first is not enough
GOOD = 1.03  # the imbalance at which a search ends
ENOUGH = 1.05  # the imbalance at which no further deal is tried
NUM_STARTS = 2  # deals to search from
SAMPLE = 8  # blocks of a rank compared at once: many quick swaps beat a few optimal ones
SEARCH_BUDGET = 200_000  # pairs of ranks compared in one search, times ranks
MOST_BLOCKS = 4096  # largest search; the block × block counts then take 128 MiB
EXACT_BITS = 26  # pair counts scaled to this many bits can be squared and multiplied by 1024 ranks in int64

Owners = npt.NDArray[np.intp]  # (num_blocks,): the rank of each block


def balanced(mask: Mask, seq_len: int, world_size: int, *, align: int = 1, start: int = 0) -> Layout:
    """Deal blocks of at least 128 tokens so that the ranks have equal work under `mask` at every ring step.

    Every cut lies on `start` plus a multiple of `align`. A sequence with less than one such block per rank gets the
    better of `contiguous` and `zigzag`.
    """
    check_arguments(
        mask=(instance_of(Mask, "causal()"), mask),
        seq_len=(WHOLE, seq_len),
        world_size=(RANKS, world_size),
        align=(WHOLE, align),
        start=(WHOLE, start),
    )
    return _balanced(mask, seq_len, world_size, align, start)


class _Candidate(NamedTuple):
    imbalance: float
    layout: Layout
    ends: list[int]  # of the blocks, num_blocks + 1
    owners: Owners


@functools.lru_cache(maxsize=32)
def _balanced(mask: Mask, seq_len: int, world_size: int, align: int, start: int) -> Layout:
    plain = [contiguous(seq_len, world_size, align=align, start=start)]  # refuses bad arguments
    smallest = -(-SMALLEST_BLOCK // align) * align
    if not smallest * world_size <= seq_len < 2 * smallest * world_size:  # there, zigzag chunks would be too small
        plain.append(zigzag(seq_len, world_size, align=align, start=start))
    imbalance, layout = min(((one.work(mask).imbalance, one) for one in plain), key=lambda found: found[0])
    if imbalance <= GOOD or seq_len < smallest * world_size:
        return layout
    units = [seq_len // (blocks_per_rank * world_size * align) for blocks_per_rank in BLOCKS_PER_RANK]
    for block in dict.fromkeys(max(smallest, align * length) for length in units):
        for candidate in _candidates(mask, seq_len, world_size, align, start, block):
            if candidate.imbalance < imbalance:
                imbalance, layout = candidate.imbalance, candidate.layout
            if imbalance <= ENOUGH:
                return layout
    return layout


def _candidates(mask: Mask, seq_len: int, world_size: int, align: int, start: int, block: int) -> Iterator[_Candidate]:
    """Yield the best regular deals, each after the local search."""
    cuttings = [[start, start + seq_len], _regions(mask, seq_len, world_size, align, start, block)]
    deals = [
        _candidate(mask, ends, owners, world_size)
        for ends, places in (_cut(edges, world_size, align, block) for edges, _ in itertools.groupby(cuttings))
        for owners in _deals(places, np.diff(ends), world_size)
    ]
    deals.sort(key=lambda deal: deal.imbalance)
    for deal in deals[:NUM_STARTS]:
        if deal.imbalance <= GOOD or len(deal.owners) > MOST_BLOCKS:
            yield deal
        else:
            owners = _improve(_block_work(mask, deal.ends), np.diff(deal.ends), deal.owners, world_size)
            improved = _candidate(mask, deal.ends, owners, world_size)
            yield min(deal, improved, key=lambda one: one.imbalance)


def _candidate(mask: Mask, ends: list[int], owners: Owners, world_size: int) -> _Candidate:
    blocks = [Span(*pair) for pair in itertools.pairwise(ends)]
    layout = Layout(tuple(tuple(blocks[i] for i in np.flatnonzero(owners == rank)) for rank in range(world_size)))
    return _Candidate(layout.work(mask).imbalance, layout, ends, owners)


def _regions(mask: Mask, seq_len: int, world_size: int, align: int, start: int, block: int) -> list[int]:
    """Return the ends of regions that are cut on their own: documents with at least one block per rank."""
    seams = _seams(mask, start, start + seq_len)
    lengths = np.diff(seams)
    large = np.flatnonzero(lengths >= world_size * block)
    edges = [start]
    for seam in np.unique(seams[np.concatenate([large, large + 1])]):
        edge = start + int(seam - start) // align * align
        if edge >= edges[-1] + block:
            edges.append(edge)
    while len(edges) > 1 and start + seq_len - edges[-1] < block:
        edges.pop()
    return [*edges, start + seq_len]


def _seams(mask: Mask, start: int, stop: int) -> Positions:
    """Return start, stop and every position between them that no visible pair crosses."""
    q = np.arange(start, stop, dtype=np.int64)
    first, end = q.copy(), q.copy()
    for one in (mask,) if mask.rows is None else mask.rows:
        for lo, hi in one.bands(q):
            first = np.minimum(first, np.where(hi > lo, lo, q))
            end = np.maximum(end, np.where(hi > lo, hi, q))
    first = np.minimum.accumulate(first[::-1])[::-1]  # over this query and all later ones
    end = np.maximum.accumulate(end)  # over this query and all earlier ones
    inner = q[1:][(first[1:] >= q[1:]) & (end[:-1] <= q[1:])]
    return np.concatenate([[start], inner, [stop]])


def _cut(edges: list[int], world_size: int, align: int, block: int) -> tuple[list[int], Owners]:
    """Return the ends of all blocks, and each block's index in its region, or -1 if the block may go to any rank.

    A region with at least one block per rank is cut into the same number of equal blocks for every rank, an even number
    if possible: dealt back and forth, as in zigzag, they balance a causal document.
    """
    ends, places = edges[:1], []
    for first, stop in itertools.pairwise(edges):
        per_rank = (stop - first) // (block * world_size)
        num_blocks = (per_rank & ~1 or per_rank) * world_size or (stop - first) // block
        ends += near_equal_cuts(stop - first, num_blocks, align=align, start=first)[1:]
        places += list(range(num_blocks)) if per_rank else [-1] * num_blocks
    return ends, np.array(places, np.intp)


def _deals(places: Owners, tokens: Counts, world_size: int) -> Iterator[Owners]:
    """Yield three deals: cyclic, cyclic with a first rank that rotates each round, and back and forth."""
    rounds, turns = np.divmod(places, world_size)
    for owners in (turns, (turns + rounds) % world_size, np.where(rounds % 2, world_size - 1 - turns, turns)):
        held = np.bincount(owners[places >= 0], tokens[places >= 0], world_size)
        for i in np.flatnonzero(places < 0):
            owners[i] = held.argmin()
            held[owners[i]] += tokens[i]
        yield owners


def _block_work(mask: Mask, ends: list[int]) -> Counts:
    """Count the visible pairs of each block's queries with each block's keys, (num_blocks, num_blocks)."""
    blocks = [Span(*pair) for pair in itertools.pairwise(ends)]
    return count_pairs(mask, [block.positions() for block in blocks], [(block,) for block in blocks])


class _Deal:
    """A deal of blocks, with the sums that price a swap of two blocks.

    Every swap lowers the unevenness: the sum over steps of the standard deviation over ranks, times world_size. The
    time itself, a sum of maxima, cannot guide the search, because single swaps rarely lower a maximum.
    """

    def __init__(self, work: Counts, owners: Owners, world_size: int) -> None:
        self.work, self.owners = work, owners.copy()
        self.shift = max(0, int(work.sum()).bit_length() - EXACT_BITS)
        # (num_blocks, world_size): pairs of a block's queries with a rank's keys; pairs of its keys with a rank's
        # queries
        self.rows = np.stack([work[:, owners == rank].sum(axis=1) for rank in range(world_size)], axis=1)
        self.cols = np.stack([work[owners == rank].sum(axis=0) for rank in range(world_size)], axis=1)
        self.pairs = np.zeros((world_size, world_size), np.int64)
        self.sum_up(range(world_size))

    def sum_up(self, ranks: Iterable[int]) -> None:
        """Recompute pairs[r, s], r's queries with s's keys, where r or s is in `ranks`, and the derived sums."""
        for rank in ranks:
            self.pairs[rank] = self.rows[self.owners == rank].sum(axis=0)
            self.pairs[:, rank] = self.cols[self.owners == rank].sum(axis=0)
        self.steps = Work(self.pairs).per_step
        self.time = int(self.steps.max(axis=1).sum())
        scaled = self.steps >> self.shift
        self.unevenness = int(self._unevenness(scaled.sum(axis=1), (scaled**2).sum(axis=1)))

    def swap(self, i: int, j: int) -> None:
        a, b = self.owners[i], self.owners[j]
        self.owners[i], self.owners[j] = b, a
        for sums, change in ((self.rows, self.work[:, j] - self.work[:, i]), (self.cols, self.work[j] - self.work[i])):
            sums[:, a] += change
            sums[:, b] -= change
        self.sum_up((a, b))

    def unevenness_after(self, a: int, b: int, i: Owners, j: Owners) -> Counts:
        """Return the unevenness after swapping a block i of rank a with a block j of rank b, (len(i), len(j)).

        With d = e_i - e_j and u = e_b - e_a the pairs become W + u (dᵀ w A) + (Aᵀ w d) uᵀ + (dᵀ w d) u uᵀ: only the
        rows and columns of a and b change, at most four entries in every step.
        """
        ranks = np.arange(len(self.pairs))
        d_row = self.rows[i][:, None] - self.rows[j]
        d_col = self.cols[i][:, None] - self.cols[j]
        own = self.work.diagonal()
        d_both = own[i][:, None] + own[j] - self.work[np.ix_(i, j)] - self.work[np.ix_(j, i)].T
        row_a, row_b = self.pairs[a] - d_row, self.pairs[b] + d_row
        col_a, col_b = self.pairs[:, a] - d_col, self.pairs[:, b] + d_col
        row_a[..., a] += d_both - d_col[..., a]
        row_a[..., b] += d_col[..., a] - d_both
        row_b[..., a] -= d_col[..., b] + d_both
        row_b[..., b] += d_both + d_col[..., b]
        for col in (col_a, col_b):
            col[..., [a, b]] = 0  # counted with the rows
        rest = self.steps >> self.shift
        for rank in (a, b):
            rest[:, rank] = rest[ranks, (ranks + rank) % len(ranks)] = 0
        total, squares = rest.sum(axis=1), (rest**2).sum(axis=1)
        for rank, row, col in ((a, row_a, col_a), (b, row_b, col_b)):
            for entries in (row[..., (rank - ranks) % len(ranks)], col[..., (rank + ranks) % len(ranks)]):
                entries >>= self.shift
                total = total + entries
                squares = squares + entries**2
        return self._unevenness(total, squares)

    def _unevenness(self, total: Counts, squares: Counts) -> Counts:
        """Reduce per-step sums over ranks (last axis). The sums are integers, so all machines agree."""
        deviations = np.sqrt(len(self.pairs) * squares - total**2).astype(np.int64)
        unevenness: Counts = deviations.sum(axis=-1)
        return unevenness

    def hottest_pairs(self) -> Iterator[tuple[int, int]]:
        """Yield all pairs of ranks, beginning with those that delay the most steps, as owner of queries or of keys."""
        world_size = len(self.pairs)
        heat = np.zeros(world_size, np.int64)
        for step, busiest in enumerate(self.steps.argmax(axis=1)):
            excess = world_size * self.steps[step, busiest] - self.steps[step].sum()
            heat[busiest] += excess
            heat[busiest - step] += excess
        return itertools.combinations(np.argsort(-heat, kind="stable").tolist(), 2)


def _improve(work: Counts, tokens: Counts, owners: Owners, world_size: int) -> Owners:
    """Swap blocks between ranks while the steps become more even and token counts stay within their range."""
    deal = _Deal(work, owners, world_size)
    held = np.array([tokens[owners == rank].sum() for rank in range(world_size)])
    least, most = held.min(), held.max()
    good_time = GOOD * int(work.sum()) / world_size
    stride = max(1, len(owners) // (world_size * SAMPLE))
    spent = sweep = idle_sweeps = 0
    while deal.time > good_time and spent < SEARCH_BUDGET and idle_sweeps < stride**2:
        sweep, idle_sweeps = sweep + 1, idle_sweeps + 1
        for number, (a, b) in enumerate(deal.hottest_pairs()):
            i_offset, j_offset = divmod((number + sweep) % stride**2, stride)
            i = np.flatnonzero(deal.owners == a)[i_offset::stride]
            j = np.flatnonzero(deal.owners == b)[j_offset::stride]
            moved = tokens[i][:, None] - tokens[j]
            kept = np.stack([held[a] - moved, held[b] + moved])
            legal = ((least <= kept) & (kept <= most)).all(axis=0)
            after = np.where(legal, deal.unevenness_after(a, b, i, j), deal.unevenness)
            spent += world_size
            best = np.unravel_index(after.argmin(), after.shape)
            if after[best] < deal.unevenness:
                held[a], held[b] = held[a] - moved[best], held[b] + moved[best]
                deal.swap(i[best[0]], j[best[1]])
                idle_sweeps = 0
                break
    return deal.owners

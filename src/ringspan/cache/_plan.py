"""What does a turn compute, as blocks and pieces?

The new tokens of all sequences are concatenated in one q block per rank, and so are their keys: one message per hop
carries them all (the fused form of arXiv 2411.01783, algorithm 2). Tiles are cut sequence by sequence, in positions of
the sequence, so no piece joins a query with a key of another sequence. Keys that no new query sees are left out.

A sequence with one new token needs no cutting: it sees an interval of a rank's keys. So a decode step is planned in
microseconds, however long the cache is.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from ringspan.algorithms.choose import RingWork
from ringspan.cache._placement import Placement, Spans, deal, place, positions_of
from ringspan.mask import Coverage, Mask
from ringspan.program.pieces import Piece, PieceKind, cut_pieces
from ringspan.program.problem import Cut, Shape
from ringspan.schedule import ALL, Block, Heads, Visible
from ringspan.span import Span


@dataclass(frozen=True, slots=True)
class SequencePart:
    sequence: int
    start: int
    """The first new position: the number of cached tokens."""
    num_new: int
    new: tuple[Spans, ...]
    """The new tokens of each rank."""
    after: Placement
    """All tokens, the new ones included."""


@dataclass(frozen=True, slots=True)
class RowSizes:
    """Sizes of q, k, v and sums in a turn, and of one token's keys and values as they travel."""

    heads: Heads
    head_dim: int
    v_head_dim: int
    itemsize: int
    sum_itemsize: int
    kv_dims: tuple[int, ...]
    kv_dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TurnProblem:
    """A turn for the layers of one mask: the `Sizes` that a program is prepared with.

    `block_starts` are the indices at which this rank's storage of each sequence begins a new block: its own keys are
    cut there, since no piece may lie in two blocks. With `is_replicated` every rank has all new queries, as q(ALL).
    """

    mask: Mask
    parts: tuple[SequencePart, ...]
    sizes: RowSizes
    rank: int
    world_size: int
    is_replicated: bool
    block_starts: tuple[tuple[int, ...], ...]
    firsts: tuple[tuple[int, ...], ...]
    """By part and rank: the first key that a new query may see."""

    def num_queries(self, owner: int) -> int:
        """Rows of a q block."""
        if owner == ALL:
            return sum(part.num_new for part in self.parts)
        return sum(len(span) for part in self.parts for span in part.new[owner])

    def num_keys(self, owner: int) -> int:
        """Rows of a kv block; none are replicated."""
        if owner == ALL:
            return 0
        pairs = zip(self.parts, self.firsts, strict=True)
        return sum(part.after.counts[owner] - first[owner] for part, first in pairs)

    def block_shapes(self, block: Block) -> tuple[Shape, ...]:
        """The shapes of a block's arrays."""
        if block.kind == "kv":
            rows, dims, num_heads = self.num_keys(block.owner), self.sizes.kv_dims, self.sizes.heads.num_kv_heads
        else:
            dims = (self.sizes.head_dim,) if block.kind == "q" else (self.sizes.v_head_dim, 1)
            rows, num_heads = self.num_queries(block.owner), self.sizes.heads.num_heads
        return tuple((1, num_heads, rows, dim) for dim in dims)

    def block_bytes(self, block: Block) -> int:
        """The bytes a Transfer of the block moves."""
        if block.kind == "kv":
            itemsizes = tuple(dtype.itemsize for dtype in self.sizes.kv_dtypes)
        else:
            itemsizes = (self.sizes.itemsize,) if block.kind == "q" else (self.sizes.sum_itemsize,) * 2
        shapes = self.block_shapes(block)
        return sum(heads * rows * dim * size for (_, heads, rows, dim), size in zip(shapes, itemsizes, strict=True))

    def cut_tile(self, q: Block, kv: Block) -> Cut:
        """The pieces of all sequences, in rows of the two blocks."""
        pieces: list[Piece] = []
        top = left = 0
        for i, part in enumerate(self.parts):
            first, stop = self.firsts[i][kv.owner], part.after.counts[kv.owner]
            new = self.queries_of(part, q.owner)
            starts = self.block_starts[i] if kv.owner == self.rank else ()
            pieces += [  # from rows of the sequence to rows of the blocks
                piece._replace(q=_moved(piece.q, top), kv=_moved(piece.kv, left - first))
                for piece in _cut_part(self.mask, new, part.after, kv.owner, first, starts)
            ]
            top += sum(map(len, new))
            left += stop - first
        return Cut(tuple(pieces), top * left)

    def queries_of(self, part: SequencePart, owner: int) -> Spans:
        """The new tokens of one sequence in a q block."""
        return (Span(part.start, part.start + part.num_new),) if owner == ALL else part.new[owner]

    def visible(self) -> Visible:
        """The matrix that says which rank's new queries see which rank's keys."""
        ranks = range(self.world_size)
        return Visible.of([[self._sees(ALL if self.is_replicated else q, kv) for kv in ranks] for q in ranks])

    def _sees(self, q: int, kv: int) -> bool:
        return any(_sees_any(self.mask, self.queries_of(part, q), part.after, kv) for part in self.parts)


def plan_problem(
    mask: Mask,
    parts: tuple[SequencePart, ...],
    sizes: RowSizes,
    rank: int,
    block_starts: tuple[tuple[int, ...], ...],
    is_replicated: bool,
) -> TurnProblem:
    world_size = len(parts[0].new)
    firsts = []
    for part in parts:
        # Bands start no earlier for later queries, so keys below the first new query's band are seen by none.
        least = min(int(band.lo[0]) for band in mask.bands([part.start]))
        firsts.append(tuple(part.after.count_below(owner, least) if least else 0 for owner in range(world_size)))
    return TurnProblem(mask, parts, sizes, rank, world_size, is_replicated, block_starts, tuple(firsts))


_BLOCKS = (partial(Block, "kv"), partial(Block, "q"), partial(Block, "out"))


def ring_work(problem: TurnProblem) -> RingWork:
    """Flops and bytes of a layer of the turn, for choosing an algorithm."""
    pairs = 0.0
    for part in problem.parts:
        end = part.start + part.num_new
        # The number of keys seen is taken to grow linearly from the first new query to the last.
        seen = [
            sum(
                max(0, min(int(band.hi[i]), end) - int(band.lo[i]))
                for band in problem.mask.bands([part.start, end - 1])
            )
            for i in range(2)
        ]
        pairs += part.num_new * sum(seen) / 2
    sizes, ranks = problem.sizes, range(problem.world_size)
    flops = 2 * pairs * sizes.heads.num_heads * (sizes.head_dim + sizes.v_head_dim) / problem.world_size
    kv, q, out = (max(problem.block_bytes(block(rank)) for rank in ranks) for block in _BLOCKS)
    return RingWork(flops, kv, q, out)


def make_parts(
    placements: Mapping[int, Placement], new_lengths: Mapping[int, int], world_size: int
) -> tuple[SequencePart, ...]:
    """Deal the new tokens of each sequence to the ranks."""
    taken = [0] * world_size  # by all sequences of this turn so far
    parts = []
    for slot, (sequence, num_new) in enumerate(new_lengths.items()):
        before = placements.get(sequence) or Placement.empty(world_size)
        start = before.length
        shift = slot + start  # advances by one with every token, as the round-robin of arXiv 2411.01783 does
        rotated = [(rank + shift) % world_size for rank in range(world_size)]
        dealt = deal(before.counts, num_new, sorted(rotated, key=taken.__getitem__))
        new = place(start, dealt)
        taken = [a + b for a, b in zip(taken, dealt, strict=True)]
        parts.append(SequencePart(sequence, start, num_new, new, before.extended(new)))
    return tuple(parts)


def _cut_part(
    mask: Mask, new: Spans, after: Placement, owner: int, first: int, starts: tuple[int, ...]
) -> Iterator[Piece]:
    """Pieces of one sequence: q rows count its new tokens on a rank, kv rows its tokens on the owner."""
    num_new = sum(map(len, new))
    stop = after.counts[owner]
    if not num_new or first == stop:
        return
    cuts = [first, *(start for start in starts if first < start < stop), stop]
    if num_new == 1:
        for lo, hi in _seen_by_one(mask, new[0].start, after, owner):
            for a, b in itertools.pairwise(cuts):
                if max(a, lo) < min(b, hi):
                    yield Piece(slice(0, 1), slice(max(a, lo), min(b, hi)), PieceKind.FULL, None, None)
        return
    q, kv = positions_of(new), after.positions(owner)
    for a, b in itertools.pairwise(cuts):
        for piece in cut_pieces(mask, q, kv[a:b]):
            yield piece._replace(kv=_moved(piece.kv, a))


def _seen_by_one(mask: Mask, position: int, after: Placement, owner: int) -> list[tuple[int, int]]:
    """The disjoint intervals of an owner's keys that one query sees."""
    ends = sorted((int(band.lo[0]), int(band.hi[0])) for band in mask.bands([position]))
    apart: list[tuple[int, int]] = []
    for lo, hi in ends:
        begin = max([lo, *(stop for _, stop in apart)])
        if begin < hi:
            apart.append((begin, hi))
    indices = [(after.count_below(owner, lo) if lo else 0, after.count_below(owner, hi)) for lo, hi in apart]
    return [(a, b) for a, b in indices if a < b]


def _sees_any(mask: Mask, new: Spans, after: Placement, owner: int) -> bool:
    if len(new) == 1 and len(new[0]) == 1:
        return bool(_seen_by_one(mask, new[0].start, after, owner))
    return any(mask.coverage(q, kv) is not Coverage.EMPTY for q in reversed(new) for kv in after.spans[owner])


def _moved(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)

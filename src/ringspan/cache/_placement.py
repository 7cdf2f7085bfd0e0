"""Which rank holds which token of a sequence, and which rank gets the next ones?

Every rank computes the placement of all ranks from the same history, so no message says where a token is. A `Placement`
is a value: a turn makes new ones, and they take effect when the turn is committed.

New tokens balance the ranks: each goes to the rank with the fewest tokens of the sequence, so unless tokens are rolled
back, the counts of all ranks differ by at most one. Each rank gets an early and a late part of the new tokens (arXiv
2411.01783, section 3.5.1), which balances causal attention wherever the old tokens are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ringspan.span import Positions, Span

Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The tokens of one sequence: by rank, the ascending spans of positions it holds."""

    spans: tuple[Spans, ...]
    counts: tuple[int, ...] = field(init=False, compare=False)  # tokens on each rank

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", tuple(sum(map(len, spans)) for spans in self.spans))

    @classmethod
    def empty(cls, world_size: int) -> "Placement":
        """No tokens yet."""
        return cls(((),) * world_size)

    @property
    def length(self) -> int:
        """Tokens on all ranks."""
        return sum(self.counts)

    def extended(self, new: Sequence[Spans]) -> "Placement":
        """This placement with more tokens at the end."""
        return Placement(tuple(_appended(*pair) for pair in zip(self.spans, new, strict=True)))

    def truncated(self, position: int) -> "Placement":
        """This placement without the positions from `position` on."""
        return Placement(tuple(_below(spans, position) for spans in self.spans))

    def count_below(self, rank: int, position: int) -> int:
        """The number of positions below `position` that a rank holds."""
        if position >= (self.spans[rank][-1].stop if self.spans[rank] else 0):
            return self.counts[rank]
        return sum(map(len, _below(self.spans[rank], position)))

    def positions(self, rank: int) -> Positions:
        """The positions a rank holds, ascending."""
        return positions_of(self.spans[rank])


def deal(counts: Sequence[int], num_new: int, order: Sequence[int]) -> list[int]:
    """How many of `num_new` tokens each rank gets, so that the counts become as even as possible.

    `order` breaks ties.
    """
    dealt = [0] * len(counts)
    ascending = sorted(order, key=lambda rank: counts[rank])
    left = num_new
    # Raise the lowest ranks to the count of the next one while tokens remain, then distribute the rest.
    for n in range(1, len(ascending) + 1):
        level = counts[ascending[n - 1]]
        above = counts[ascending[n]] if n < len(ascending) else level + left
        rise = min(n * (above - level), left)
        share, extra = divmod(rise, n)
        lowest = ascending[:n]
        for rank in lowest:
            dealt[rank] += share
        for rank in [rank for rank in order if rank in lowest][:extra]:
            dealt[rank] += 1
        left -= rise
        if not left:
            break
    return dealt


def place(start: int, dealt: Sequence[int]) -> tuple[Spans, ...]:
    """Spans for new tokens from `start` on: each rank's first half in rank order, its second half in reverse order."""
    halves = [(count + 1) // 2 for count in dealt] + [count // 2 for count in reversed(dealt)]
    cuts = np.cumsum([start, *halves]).tolist()
    chunks = [Span(cuts[i], cuts[i + 1]) for i in range(len(halves))]
    return tuple(_appended((), (chunks[rank], chunks[-1 - rank])) for rank in range(len(dealt)))


def positions_of(spans: Spans) -> Positions:
    return np.concatenate([np.empty(0, np.int64), *(span.positions() for span in spans)])


def _appended(spans: Spans, more: Spans) -> Spans:
    """All spans in order; neighbours that form one strided span are joined, such as tokens dealt in turn."""
    joined = list(spans)
    for span in more:
        if not len(span):
            continue
        if joined:
            last = joined[-1]
            step = span.start - last.last
            if (len(last) == 1 or last.step == step) and (len(span) == 1 or span.step == step):
                joined[-1] = Span(last.start, span.stop, step)
                continue
        joined.append(span)
    return tuple(joined)


def _below(spans: Spans, position: int) -> Spans:
    cut = (Span(span.start, min(span.stop, position), span.step) for span in spans if span.start < position)
    return tuple(cut)

"""Which rank holds which token of a sequence, and who gets the next ones?

Every rank knows this of all ranks, since each computes it in the same way from the same history; so no message ever
says where a token is. A `Placement` is a value: a turn makes new ones, and they count when the turn is committed.

New tokens level the ranks: each goes where the sequence has fewest, and as long as nothing is rolled back all ranks
hold the same number of a sequence's tokens, or one more. Within that, a rank gets an early and a late part of the new
tokens (arXiv 2411.01783, section 3.5.1), which balances causal attention, wherever the old tokens lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ringspan.span import Positions, Span

Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The tokens of one sequence: for every rank the spans of positions it holds, ascending."""

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
        """With tokens behind those that are there."""
        return Placement(tuple(_appended(*pair) for pair in zip(self.spans, new, strict=True)))

    def truncated(self, position: int) -> "Placement":
        """Without the positions from `position` on."""
        return Placement(tuple(_below(spans, position) for spans in self.spans))

    def count_below(self, rank: int, position: int) -> int:
        """How many positions below `position` a rank holds: the index of the first that is not."""
        if position >= (self.spans[rank][-1].stop if self.spans[rank] else 0):
            return self.counts[rank]
        return sum(map(len, _below(self.spans[rank], position)))

    def positions(self, rank: int) -> Positions:
        """The positions a rank holds, ascending."""
        return positions_of(self.spans[rank])


def deal(counts: Sequence[int], num_new: int, order: Sequence[int]) -> list[int]:
    """How many of `num_new` tokens each rank gets, so that all end as level as they can; `order` breaks ties."""
    dealt = [0] * len(counts)
    ascending = sorted(order, key=lambda rank: counts[rank])
    left = num_new
    # Raise the lowest ranks to the level of the next, as long as there are tokens; then share out the rest.
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
    """All positions of some spans."""
    return np.concatenate([np.empty(0, np.int64), *(span.positions() for span in spans)])


def _appended(spans: Spans, more: Spans) -> Spans:
    """All spans in order, neighbours joined where the two make one: tokens dealt in turn become one strided span."""
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

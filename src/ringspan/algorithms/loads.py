"""What does one step cost all ranks: seconds of compute by rank, and rounds of messages?

An algorithm's `loads` yields these records and the planner's timeline follows them. Seconds and bytes come from
`Costs`, which the planner implements, so that an algorithm can be priced without knowing a device.

A sequence is regular if every rank has as many tokens and the mask treats them alike: full, or causal with a zigzag or
striped layout. Then all ranks do the same at the same time, and two ranks in the same place of their nodes send over
the same kind of link. One such class of tiles and links is priced once, and one node is run for all nodes, so the
largest rings stay cheap: a `Schedule` for 16,384 ranks would have 268 million tiles. Contiguous shards under a causal
mask are the exception: all ranks are run.

Sliding windows are approximated. The number of keys that the busiest rank sees is exact, and every rank is priced like
it. The owners of those keys are estimated: if runs of tokens are at least as long as the window (contiguous or zigzag
shards), the rank itself; otherwise all ranks that may hold some, evenly: those within reach of a run, or every rank if
tokens are striped or cached. A tile of a window is priced as a rectangle of as many pairs. A window at least as long as
the sequence counts as no window.

`tests/unit/test_timeline.py` holds the loads of every algorithm against those of its real schedule.
"""

from collections import abc
from collections.abc import Callable, Collection
from math import lcm
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringspan.schedule import Kind

Seconds = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]

END = -1  # the message is read when the schedule is over
EXCHANGE_ROUNDS = 4  # a step with at least as many rounds is an all-to-all exchange


class Round(NamedTuple):
    """At most one message from each rank and to each rank. `is_far[i]`: message i leaves its node."""

    src: Ranks
    dst: Ranks
    nbytes: float | Seconds
    is_far: npt.NDArray[np.bool_]
    reads_at: int = 0  # the step that reads the message; 0 is the next one, END the end
    is_exchange: bool = False
    names: abc.Sequence[str] = ()

    def only(self, are_sent: npt.NDArray[np.bool_]) -> "Round":
        """Return the round with only some of its messages."""
        return self._replace(src=self.src[are_sent], dst=self.dst[are_sent], is_far=self.is_far[are_sent])


class Load(NamedTuple):
    """One step of all ranks."""

    attend_s: Seconds
    rounds: abc.Sequence[Round] = ()
    names: abc.Sequence[str] = ()


class Costs(Protocol):
    """The costs of one layer's attention on one device of one rank."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def joins_tiles(self) -> bool:
        """Whether blocks that arrived together, by an exchange of heads or a gather, are attended by one kernel."""

    @property
    def returns_after(self) -> bool:
        """Whether partial results of pass-Q go home in one exchange after the ring."""

    def tile_s(self, q_len: float, kv_len: float, *, is_causal: bool = False) -> float:
        """Seconds of a tile, forward or backward; a causal tile has q_len · (q_len + 1) / 2 pairs."""

    def merge_s(self, q_len: float) -> float:
        """Seconds to merge a partial result into q_len rows: of the output, or backward of dq."""

    def token_bytes(self, kind: Kind) -> float:
        """Bytes of one token of a block of this kind, as the block travels."""

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "Costs":
        """The same for another number of heads."""


class Sequence(NamedTuple):
    """A sequence of new tokens after cached ones; every new token sees all cached ones.

    With a window a token sees only the last `window` positions, its own among them; 0 is none.
    """

    new_tokens: int
    cached_tokens: int
    is_causal: bool
    layout: str  # contiguous, zigzag or striped
    window: int = 0


class Ring(NamedTuple):
    """The ranks of a call, in nodes of `per_node`; `inner` is the Ulysses degree, or the ring inside a node."""

    world_size: int
    per_node: int
    inner: int = 1


class RegularCall:
    """One layer's attention of a regular sequence: the parts from which an algorithm puts its loads together."""

    def __init__(self, ring: Ring, sequence: Sequence, costs: Costs, *, is_backward: bool) -> None:
        self.ring = ring
        self.sequence = sequence
        self.costs = costs
        self.is_backward = is_backward
        self.q_len = -(-sequence.new_tokens // ring.world_size)
        self.kv_len = -(-(sequence.new_tokens + sequence.cached_tokens) // ring.world_size)
        self.cached_len = self.kv_len - self.q_len
        self.window = sequence.window if sequence.window < sequence.new_tokens + sequence.cached_tokens else 0
        self.is_uneven = sequence.is_causal and sequence.layout == "contiguous" and not self.window
        self.period = self._period()
        self.ranks: Ranks = np.arange(self.period)
        self.none = np.zeros(self.period)

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "RegularCall":
        """The same call for another number of heads."""
        costs = self.costs.with_heads(num_heads, num_kv_heads)
        return RegularCall(self.ring, self.sequence, costs, is_backward=self.is_backward)

    def _period(self) -> int:
        """The number of ranks after which the pattern repeats."""
        size, per_node, inner = self.ring
        if self.is_uneven:
            return size
        period = inner if size <= per_node else lcm(inner, per_node)
        return period if size % period == 0 else size

    @property
    def is_pruned(self) -> bool:
        """Whether keys go to later ranks only: no query sees the keys of a rank whose tokens all come later."""
        return self.is_uneven and not self.cached_len

    @property
    def _is_zigzag(self) -> bool:
        return self.sequence.is_causal and self.sequence.layout == "zigzag"

    def moves(
        self,
        onward: Callable[[Ranks], Ranks],
        nbytes: float | Seconds,
        *,
        reads_at: int = 0,
        is_exchange: bool = False,
    ) -> Round:
        """A message from every rank to the rank that `onward` says."""
        dst = onward(self.ranks) % self.ring.world_size
        is_far = dst // self.ring.per_node != self.ranks // self.ring.per_node
        return Round(self.ranks, dst % self.period, nbytes, is_far, reads_at, is_exchange)

    def ahead(self, distance: int, nbytes: float, *, reads_at: int = 0, is_exchange: bool = False) -> Round:
        """A message from every rank to the rank `distance` places ahead."""
        return self.moves(lambda ranks: ranks + distance, nbytes, reads_at=reads_at, is_exchange=is_exchange)

    def everywhere(self, seconds: float) -> Seconds:
        """The same on all ranks."""
        return np.full(self.period, seconds)

    # Whom a rank sees. `times` ranks were joined by an exchange of heads, so that there are as many times the tokens.

    def seers(self, times: int = 1) -> Collection[int]:
        """The distances round the ring to the ranks, or groups of `times` ranks, that see a rank's keys; ascending."""
        size = self.ring.world_size // times
        if not self.window or self.sequence.cached_tokens or self.sequence.layout == "striped":
            return range(1, size)
        reach = min(size - 1, -(-(self.window - 1) * self._num_runs // (self.q_len * times)))
        if self.sequence.layout == "contiguous":
            return range(1, reach + 1)
        return sorted({*range(1, reach + 1), *range(size - reach, size)})  # a late run is seen from the ranks before

    def seen(self) -> Collection[int]:
        """The distances to the ranks whose keys a rank sees; ascending."""
        size, seers = self.ring.world_size, self.seers()
        return range(size - len(seers), size) if self.sequence.layout == "contiguous" else seers

    def keys_seen(self, times: int = 1) -> float:
        """Keys that a query sees of a window on average: the mean of min(window, position + 1).

        The queries are those of the rank or group that sees most: the last of contiguous ones, the middle one of
        zigzag; where tokens are dealt, all see as many.
        """
        new, cached, _, layout, _ = self.sequence
        count = new if layout == "striped" else min(new, self.q_len * times)
        before = cached + {"contiguous": new - count, "zigzag": (new - count) // 2, "striped": 0}[layout]
        rising = min(count, max(0, self.window - before))
        return (rising * before + rising * (rising + 1) / 2 + (count - rising) * self.window) / count

    @property
    def _num_runs(self) -> int:
        """Runs of tokens in a shard, where tokens are not dealt."""
        return 2 if self.sequence.layout == "zigzag" else 1

    # Tiles. Tokens that were joined are in one tile, or in one tile for every pair of blocks, as the practice is.

    def own_s(self, times: int = 1) -> float:
        """Seconds of a rank's queries against its own keys."""
        if self.window:
            return self._window_s(times, is_own=True)
        if times > 1 and not self.costs.joins_tiles:
            pairs = times * (times - 1) // (2 if self.is_uneven else 1)
            # Under zigzag one half of the blocks is seen by half of the queries only, and so merged into half of them.
            halves = 0.25 * self.merging_s(self.q_len) if self._is_zigzag else 0.0
            later_s = pairs * self.unseen_s() if self.is_uneven else 0.0  # of later blocks only cached keys are seen
            return times * self.own_s() + pairs * (self.other_s() - halves) + later_s
        q_len = self.q_len * times
        if not self.sequence.is_causal:
            return self.costs.tile_s(q_len, self.kv_len * times)
        return self.costs.tile_s(q_len, q_len, is_causal=True) + self.costs.tile_s(q_len, self.cached_len * times)

    def other_s(self, times: int = 1) -> float:
        """Seconds against another rank's keys, as far as the layout shows them; merging included."""
        if self.window:
            return self._window_s(times, is_own=False)
        if times > 1 and not self.costs.joins_tiles:
            return times**2 * self.other_s()
        q_len = self.q_len * times
        merging_s = self.merging_s(q_len)
        if not self.sequence.is_causal or self.is_uneven:
            return self.costs.tile_s(q_len, self.kv_len * times) + merging_s
        cached_s = self.costs.tile_s(q_len, self.cached_len * times) + merging_s
        if self._is_zigzag:
            return self.costs.tile_s(q_len, q_len / 2) + cached_s
        return self.costs.tile_s(q_len, q_len, is_causal=True) + cached_s

    def unseen_s(self, times: int = 1) -> float:
        """Seconds against a rank whose new tokens all come later: only its cached tokens are seen."""
        if not self.cached_len:
            return 0.0
        tiles = 1 if self.costs.joins_tiles else times
        q_len, cached_len = self.q_len * times / tiles, self.cached_len * times / tiles
        return tiles**2 * (self.costs.tile_s(q_len, cached_len) + self.merging_s(q_len))

    def gathered_s(self) -> Seconds:
        """Seconds by rank of its queries against all keys that it sees, in one kernel over gathered keys."""
        size = self.ring.world_size
        if self.window:
            return self.everywhere(self.own_s() + len(self.seers()) * self.other_s())
        if self.is_uneven:
            before = [self.costs.tile_s(self.q_len, self.kv_len * rank) for rank in range(self.period)]
            own_s = self.costs.tile_s(self.q_len, self.q_len, is_causal=True)
            return np.array(before) + own_s + self.costs.tile_s(self.q_len, self.cached_len * size)
        seen = (
            self.q_len * size / 2 if self.sequence.is_causal else self.q_len * size
        )  # zigzag, striped: half on average
        return self.everywhere(self.costs.tile_s(self.q_len, seen + self.cached_len * size))

    def gathers(self, nbytes: float, *, reads_at: int = 0) -> list[Round]:
        """A library's all-gather, or reduce-scatter, of equal parts: a ring in each node, all of whose ports are used.

        A rank sends its part to its likes in other nodes, and what its node received from one rank to the next.
        """
        size, per_node, _ = self.ring
        nodes = -(-size // min(size, per_node))
        inside = size // nodes
        far = [self.ahead(k * inside, nbytes, reads_at=reads_at, is_exchange=True) for k in range(1, nodes)]
        if inside == 1:
            return far

        def turn(ranks: Ranks) -> Ranks:
            return ranks - ranks % inside + (ranks % inside + 1) % inside

        return [*far, self.moves(turn, (inside - 1) * nodes * nbytes, reads_at=reads_at)]

    def merging_s(self, q_len: float) -> float:
        """Seconds to merge a part into the output, or its gradients into those of the queries."""
        return self.costs.merge_s(q_len)

    def _window_s(self, times: int, *, is_own: bool) -> float:
        """Seconds against the part of a window's keys on one rank or group; merging included if it is another."""
        q_len = self.q_len * times
        fits = self.window * self._num_runs <= q_len
        is_dealt = self.sequence.layout == "striped" or (self.sequence.cached_tokens > 0 and not fits)
        holders = 1 if fits and not is_dealt else len(self.seers(times)) + 1
        if holders == 1 and not is_own:
            return 0.0
        blocks = 1 if self.costs.joins_tiles else times
        tiles = blocks if is_dealt else 1  # of a block of queries: against every block of keys, or those beside it
        attend_s = self.costs.tile_s(q_len / blocks, self.keys_seen(times) / holders / tiles)
        merging_s = self.merging_s(q_len / blocks)
        return blocks * (tiles * attend_s + (tiles - 1 if is_own else tiles) * merging_s)


def next_stop(stops: Collection[int], t: int, home: int) -> int:
    """The first step from t on in which a block is where it is needed; then it goes home."""
    return t if t in stops else next((stop for stop in stops if stop > t), home)

"""What do regular sequences ask of a rank: how long do its tiles take, and who sends to whom?

All ranks are alike here, up to their place in a node (see `rings.py`). Sliding windows are approximated. How many keys
the busiest rank sees is exact, and all ranks are taken to be like it; where those keys are is not exact. In runs of
tokens no shorter than the window (contiguous or zigzag shards) they are taken to be the rank's own, else to be spread
evenly over the ranks that may hold some: those within reach of a run, or all where tokens are dealt (striped) or
cached. A tile of a window is priced as a rectangle of as many pairs. A window as long as the sequence is none.
"""

from collections.abc import Callable, Collection
from math import lcm
from typing import NamedTuple

import numpy as np

from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard, merge_s, tile_s
from ringspan.planner.timeline.run import Ranks, Round, Seconds


class Sequence(NamedTuple):
    """What is attended: new tokens after `cached` ones, which every new token sees.

    With a window a token sees only the last `window` positions, its own among them; 0 is none.
    """

    new_tokens: int
    cached_tokens: int
    is_causal: bool
    layout: str  # contiguous, zigzag or striped
    window: int = 0


class Ring(NamedTuple):
    """Who takes part: ranks in nodes of `per_node`; `inner` is the Ulysses degree, or the ring inside a node."""

    world_size: int
    per_node: int
    inner: int = 1


class Loads:
    """The parts that the algorithms are put together from."""

    def __init__(self, ring: Ring, sequence: Sequence, shard: Shard, device: Device, *, is_backward: bool) -> None:
        self.ring = ring
        self.sequence = sequence
        self.shard = shard
        self.device = device
        self.is_backward = is_backward
        self.q_len = -(-sequence.new_tokens // ring.world_size)
        self.kv_len = -(-(sequence.new_tokens + sequence.cached_tokens) // ring.world_size)
        self.cached_len = self.kv_len - self.q_len
        self.window = sequence.window if sequence.window < sequence.new_tokens + sequence.cached_tokens else 0
        self.is_uneven = sequence.is_causal and sequence.layout == "contiguous" and not self.window
        self.period = self._period()
        self.ranks: Ranks = np.arange(self.period)
        self.none = np.zeros(self.period)

    def _period(self) -> int:
        """After how many ranks the next one is like the first."""
        size, per_node, inner = self.ring
        if self.is_uneven:
            return size
        period = inner if size <= per_node else lcm(inner, per_node)
        return period if size % period == 0 else size

    @property
    def _is_zigzag(self) -> bool:
        return self.sequence.is_causal and self.sequence.layout == "zigzag"

    def moves(self, onward: Callable[[Ranks], Ranks], nbytes: float | Seconds, **options: object) -> Round:
        """A message from every rank to the rank that `onward` says."""
        dst = onward(self.ranks) % self.ring.world_size
        is_far = dst // self.ring.per_node != self.ranks // self.ring.per_node
        return Round(self.ranks, dst % self.period, nbytes, is_far, **options)  # type: ignore[arg-type]

    def ahead(self, distance: int, nbytes: float, **options: object) -> Round:
        """A message from every rank to the one so many places further."""
        return self.moves(lambda ranks: ranks + distance, nbytes, **options)

    def everywhere(self, seconds: float) -> Seconds:
        """The same on all ranks."""
        return np.full(self.period, seconds)

    # Whom a rank sees. `times` ranks were joined by an exchange of heads, so that there are as many times the tokens.

    def seers(self, times: int = 1) -> Collection[int]:
        """How many places round the ring it is to the ranks, or groups of `times`, that see one's keys; ascending."""
        size = self.ring.world_size // times
        if not self.window or self.sequence.cached_tokens or self.sequence.layout == "striped":
            return range(1, size)
        reach = min(size - 1, -(-(self.window - 1) * self._num_runs // (self.q_len * times)))
        if self.sequence.layout == "contiguous":
            return range(1, reach + 1)
        return sorted({*range(1, reach + 1), *range(size - reach, size)})  # a late run is seen from the ranks before

    def seen(self) -> Collection[int]:
        """How many places it is to the ranks whose keys one sees; ascending."""
        size, seers = self.ring.world_size, self.seers()
        return range(size - len(seers), size) if self.sequence.layout == "contiguous" else seers

    def keys_seen(self, times: int = 1) -> float:
        """Of a window, by a query on average: the mean of min(window, position + 1).

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

    def own_s(self, shard: Shard, times: int = 1) -> float:
        """A rank's queries against its own keys."""
        if self.window:
            return self._window_s(shard, times, is_own=True)
        if times > 1 and not shard.practice.joins_tiles:
            pairs = times * (times - 1) // (2 if self.is_uneven else 1)
            # Under zigzag one half of the blocks is seen by half of the queries only, and so merged into half of them.
            halves = 0.25 * self.merging_s(shard, self.q_len) if self._is_zigzag else 0.0
            return times * self.own_s(shard) + pairs * (self.other_s(shard) - halves)
        q_len = self.q_len * times
        if not self.sequence.is_causal:
            return self._tile(shard, q_len, self.kv_len * times)
        return self._tile(shard, q_len, q_len, True) + self._tile(shard, q_len, self.cached_len * times)

    def other_s(self, shard: Shard, times: int = 1) -> float:
        """Against another rank's keys, where it sees them as far as the layout lets it; merging included."""
        if self.window:
            return self._window_s(shard, times, is_own=False)
        if times > 1 and not shard.practice.joins_tiles:
            return times**2 * self.other_s(shard)
        q_len = self.q_len * times
        merging_s = self.merging_s(shard, q_len)
        if not self.sequence.is_causal or self.is_uneven:
            return self._tile(shard, q_len, self.kv_len * times) + merging_s
        cached_s = self._tile(shard, q_len, self.cached_len * times) + merging_s
        if self._is_zigzag:
            return self._tile(shard, q_len, q_len / 2) + cached_s
        return self._tile(shard, q_len, q_len, True) + cached_s

    def unseen_s(self, shard: Shard, times: int = 1) -> float:
        """Against a rank whose new tokens all come later: only its cached ones are seen."""
        if not self.cached_len:
            return 0.0
        tiles = 1 if shard.practice.joins_tiles else times
        q_len, cached_len = self.q_len * times / tiles, self.cached_len * times / tiles
        return tiles**2 * (self._tile(shard, q_len, cached_len) + self.merging_s(shard, q_len))

    def merging_s(self, shard: Shard, q_len: float) -> float:
        """Of a part into the output; gradients are added up as they are made."""
        return 0.0 if self.is_backward else merge_s(self.device, shard, q_len)

    def _window_s(self, shard: Shard, times: int, *, is_own: bool) -> float:
        """Against the part of a window's keys that one rank, or group, holds; merging included if it is another."""
        q_len = self.q_len * times
        fits = self.window * self._num_runs <= q_len
        is_dealt = self.sequence.layout == "striped" or (self.sequence.cached_tokens > 0 and not fits)
        holders = 1 if fits and not is_dealt else len(self.seers(times)) + 1
        if holders == 1 and not is_own:
            return 0.0
        blocks = 1 if shard.practice.joins_tiles else times
        tiles = blocks if is_dealt else 1  # of a block of queries: against every block of keys, or those beside it
        attend_s = self._tile(shard, q_len / blocks, self.keys_seen(times) / holders / tiles)
        merging_s = self.merging_s(shard, q_len / blocks)
        return blocks * (tiles * attend_s + (tiles - 1 if is_own else tiles) * merging_s)

    def _tile(self, shard: Shard, q_len: float, kv_len: float, is_causal: bool = False) -> float:
        return tile_s(self.device, shard, q_len, kv_len, is_causal=is_causal, is_backward=self.is_backward)

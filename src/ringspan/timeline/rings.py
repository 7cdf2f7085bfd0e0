"""The loads of every algorithm for regular sequences, step by step on demand: what a planner needs at any size.

A `Schedule` for 16,384 ranks would have 268 million tiles. But where every rank has as many tokens and a mask treats
them alike (full, or causal with a zigzag or striped layout), all ranks do the same at the same time, and two ranks in
the same place of their nodes also send over the same kind of link. One such class of tiles and links is priced once,
and one node is run for all of them. Contiguous shards under a causal mask are the exception: all ranks are run.

`tests/unit/test_timeline.py` holds these loads against those of the real schedules.
"""

from collections.abc import Callable, Iterator
from math import lcm
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.catalog import Device
from ringspan.cost import Shard, merge_s, tile_s
from ringspan.timeline.run import END, EXCHANGE_ROUNDS, Load, Ranks, Round, Seconds, Timeline, run_timeline


class Sequence(NamedTuple):
    """What is attended: new tokens after `cached` ones, which every new token sees; a window of 0 is none."""

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


def attention_timeline(
    algorithm: str,
    ring: Ring,
    sequence: Sequence,
    shard: Shard,
    device: Device,
    *,
    is_backward: bool = False,
) -> Timeline:
    """The timeline of one layer's attention, forward or backward."""
    loads = _Loads(ring, sequence, shard, device, is_backward=is_backward)
    steps = LOADS[algorithm](loads)
    return run_timeline(steps, loads.period, device.near, device.far)


class _Loads:
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
        self.is_uneven = sequence.is_causal and sequence.layout == "contiguous"
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
        return np.full(self.period, seconds)

    # Tiles. `times` ranks were joined by an exchange of heads, so that there are as many times the tokens: in one tile,
    # or in one tile for every pair of blocks, as the practice is.

    def own_s(self, shard: Shard, times: int = 1) -> float:
        """A rank's queries against its own keys."""
        if times > 1 and not shard.practice.joins_tiles:
            pairs = times * (times - 1) // (2 if self.is_uneven else 1)
            # Under zigzag one half of the blocks is seen by half of the queries only, and so merged into half of them.
            halves = 0.25 * self.merging_s(shard, self.q_len) if self._is_zigzag else 0.0
            return times * self.own_s(shard) + pairs * (self.other_s(shard) - halves)
        q_len = self.q_len * times
        if self.sequence.window:
            return self._tile(shard, q_len, min(q_len, self.sequence.window))
        if not self.sequence.is_causal:
            return self._tile(shard, q_len, self.kv_len * times)
        return self._tile(shard, q_len, q_len, True) + self._tile(shard, q_len, self.cached_len * times)

    def other_s(self, shard: Shard, times: int = 1) -> float:
        """Against another rank's keys, where it sees them as far as the layout lets it; merging included."""
        if self.sequence.window:
            return 0.0
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

    def _tile(self, shard: Shard, q_len: float, kv_len: float, is_causal: bool = False) -> float:
        return tile_s(self.device, shard, q_len, kv_len, is_causal=is_causal, is_backward=self.is_backward)


def _pass_kv(loads: _Loads) -> Iterator[Load]:
    """KV travels to the next rank; backward its gradient follows, and the last hop home is while own keys are read."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    own_s, other_s, unseen_s = loads.own_s(shard), loads.other_s(shard), loads.unseen_s(shard)
    hops = size - 1
    if loads.sequence.window and loads.sequence.layout == "contiguous":
        hops = min(hops, -(-loads.sequence.window // loads.q_len))
    home, later = loads.everywhere(own_s), loads.everywhere(other_s)
    is_home_last = loads.is_backward and hops > 0
    onward = loads.ahead(1, loads.kv_len * shard.kv_bytes)
    for t in range(hops + 1):
        attend_s, moves = later if t else loads.none if is_home_last else home, [onward] if t < hops else []
        if loads.is_uneven and not loads.sequence.window:
            if t:
                attend_s = np.where((ranks - t) % size < ranks, other_s, unseen_s)
            if not loads.cached_len:
                # No further than the last rank, which sees all; and what has come round to the first is not seen there.
                moves = [_some(one, (ranks >= t) & (ranks < size - 1)) for one in moves]
        if loads.is_backward and t > 1:
            moves.append(_follow_kv(loads, t, 0))
        yield Load(attend_s, moves)
    if is_home_last:
        yield Load(home, [_follow_kv(loads, hops + 1, END)])


def _follow_kv(loads: _Loads, t: int, reads_at: int) -> Round:
    """The gradients of what was attended in the step before, to the next rank that adds to them, or home."""
    size, nbytes = loads.ring.world_size, loads.kv_len * loads.shard.dkv_bytes
    if not loads.is_uneven:
        return loads.ahead(1, nbytes, reads_at=reads_at)
    one = loads.moves(lambda ranks: np.where(ranks < size - 1, ranks + 1, size - t), nbytes, reads_at=reads_at)
    return _some(one, loads.ranks >= t - 1)


def _some(one: Round, are_sent: npt.NDArray[np.bool_]) -> Round:
    return one._replace(src=one.src[are_sent], dst=one.dst[are_sent], is_far=one.is_far[are_sent])


def _pass_q(loads: _Loads) -> Iterator[Load]:
    """Queries travel; partial results go home, meanwhile or after the ring; backward dq follows the queries."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    merging_s = loads.merging_s(shard, loads.q_len)
    own_s, other_s = loads.own_s(shard), loads.other_s(shard) - merging_s
    unseen_s = max(0.0, loads.unseen_s(shard) - merging_s)
    sent, back = (shard.q_grad_bytes, shard.dq_bytes) if loads.is_backward else (shard.q_bytes, shard.out_bytes)
    onward = loads.ahead(1, loads.q_len * sent)
    first, later = loads.everywhere(own_s), loads.everywhere(other_s)
    is_pruned = loads.is_uneven and not loads.cached_len
    is_after = shard.practice.returns_after and not loads.is_backward
    for t in range(size + 1):
        attend_s = loads.none if t == size else later if t else first
        if loads.is_uneven and t < size:
            owners = (ranks - t) % size
            attend_s = np.where(owners == ranks, own_s, np.where(owners > ranks, other_s, unseen_s))
        moves = [onward] if t < size - 1 else []
        if is_pruned:
            moves = [_some(one, (ranks - t) % size > 0) for one in moves]  # nobody else is seen by the first rank
        if t > 1 and not is_after:
            hops = 1 if loads.is_backward else 1 - t
            home = loads.ahead(hops, loads.q_len * back, reads_at=_later(t, size))
            moves.append(_some(home, ranks < t - 1) if is_pruned else home)
        if not loads.is_backward and not is_after:
            attend_s = attend_s + _merges(loads, t, merging_s, is_pruned=is_pruned)
        yield Load(attend_s, moves)
    if size > 1 and is_after:
        nbytes = loads.q_len * back
        home_moves = [loads.ahead(-t, nbytes, is_exchange=True) for t in range(1, size)]
        yield Load(loads.none, home_moves)
        yield Load(loads.everywhere(merging_s * (size - 1)))
    elif not loads.is_backward:
        late = [_merges(loads, t, merging_s, is_pruned=is_pruned) for t in (size + 1, size + 2)]
        yield Load(late[0] + late[1])


def _later(t: int, size: int) -> int:
    """A sum is waited for two steps later, or at the end."""
    return t + 2 if t + 2 <= size else END


def _merges(loads: _Loads, t: int, merging_s: float, *, is_pruned: bool) -> Seconds:
    """Of the parts that were sent home two steps before, that is made three steps before."""
    made, size = t - 3, loads.ring.world_size
    if not 0 < made < size:
        return loads.none
    if not is_pruned:
        return loads.everywhere(merging_s)
    return np.where((loads.ranks + made) % size < loads.ranks, merging_s, 0.0)


def _all_gather(loads: _Loads) -> Iterator[Load]:
    """All of K and V first, then one attend; backward the gradients go straight home."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    own_s, other_s = loads.own_s(shard), loads.other_s(shard)
    is_pruned = loads.is_uneven and not loads.cached_len
    is_exchange = size > EXCHANGE_ROUNDS
    reach = min(size - 1, -(-loads.sequence.window // loads.q_len)) if loads.sequence.window else size - 1

    def messages(way: int, nbytes: float, reads_at: int) -> list[Round]:
        rounds = []
        for k in range(1, reach + 1):
            one = loads.ahead(way * k, nbytes, reads_at=reads_at, is_exchange=is_exchange)
            rounds.append(_some(one, ranks + k < size if way > 0 else ranks >= k) if is_pruned else one)
        return rounds

    yield Load(loads.everywhere(own_s), messages(1, loads.kv_len * shard.kv_bytes, 0))
    if size == 1:
        return
    yield Load(ranks * np.float64(other_s) if is_pruned else loads.everywhere((size - 1) * other_s))
    if loads.is_backward:
        yield Load(loads.none, messages(-1, loads.kv_len * shard.dkv_bytes, END))


def _hybrid(loads: _Loads) -> Iterator[Load]:
    """Heads are exchanged inside, KV goes round outside, results go straight home. Ulysses is the ring of one."""
    degree, shard = loads.ring.inner, loads.shard
    groups = loads.ring.world_size // degree
    joined = shard.with_heads(shard.num_heads // degree, max(1, shard.num_kv_heads // degree))
    sent = loads.q_len * (shard.q_grad_bytes if loads.is_backward else shard.q_bytes) / degree
    sent += loads.kv_len * joined.kv_bytes
    yield Load(loads.none, [_neighbour(loads, k, 0, sent) for k in range(1, degree)])
    own_s, other_s = loads.own_s(joined, degree), loads.other_s(joined, degree)
    unseen_s = loads.unseen_s(joined, degree)
    onward = loads.ahead(degree, loads.kv_len * degree * joined.kv_bytes)
    group = loads.ranks // degree
    dkv = loads.kv_len * joined.dkv_bytes
    for t in range(groups):
        attend_s, moves = loads.everywhere(other_s if t else own_s), [onward] if t < groups - 1 else []
        if loads.is_uneven:
            owners = (group - t) % groups
            attend_s = np.where(owners == group, own_s, np.where(owners < group, other_s, unseen_s))
            if not loads.cached_len:
                moves = [_some(one, (group >= t) & (group < groups - 1)) for one in moves]
        if loads.is_backward and t > 0:
            moves += [_neighbour(loads, k, t - 1, dkv) for k in range(degree) if k or t > 1]
        yield Load(attend_s, moves)
    back = loads.q_len * (shard.dq_bytes if loads.is_backward else shard.out_bytes) / degree
    rounds = [_neighbour(loads, k, 0, back, END) for k in range(1, degree)]
    if loads.is_backward:
        rounds += [_neighbour(loads, k, groups - 1, dkv, END) for k in range(degree) if k or groups > 1]
    yield Load(loads.none, rounds)
    if not loads.is_backward and degree > 1:
        yield Load(loads.everywhere((degree - 1) * loads.merging_s(joined, loads.q_len)))


def _neighbour(loads: _Loads, distance: int, groups_back: int, nbytes: float, reads_at: int = 0) -> Round:
    """To the rank so many places further in its group of `inner`, or in a group before."""
    degree = loads.ring.inner

    def onward(ranks: Ranks) -> Ranks:
        return ranks - ranks % degree + (ranks % degree + distance) % degree - groups_back * degree

    return loads.moves(onward, nbytes, reads_at=reads_at, is_exchange=degree > EXCHANGE_ROUNDS)


def _double_ring(loads: _Loads) -> Iterator[Load]:
    """An inner ring in each node; the block of the next phase crosses to the next node in the first step of this one.

    Gradients follow: round the node, and at the end of a phase to the next node, which the last one leaves for home,
    while own keys are read.
    """
    size, inner, shard = loads.ring.world_size, loads.ring.inner, loads.shard
    nbytes, outer = loads.kv_len * shard.kv_bytes, loads.ring.world_size // loads.ring.inner
    home, later = (loads.everywhere(seconds) for seconds in (loads.own_s(shard), loads.other_s(shard)))
    is_home_last = loads.is_backward and size > 1

    def turn(ranks: Ranks) -> Ranks:
        return ranks - ranks % inner + (ranks % inner + 1) % inner

    inside, across = loads.moves(turn, nbytes), loads.ahead(inner, nbytes)
    dkv = loads.kv_len * shard.dkv_bytes
    follow = (loads.moves(turn, dkv), loads.moves(lambda ranks: turn(ranks) + inner, dkv))
    for t in range(size):
        phase, hop = divmod(t, inner)
        moves = [inside] if hop < inner - 1 else []
        if hop == 0 and phase < outer - 1:
            moves.append(across._replace(reads_at=t + inner))
        if loads.is_backward and t > 1:
            moves.append(follow[t % inner == 0])
        yield Load(later if t else loads.none if is_home_last else home, moves)
    if is_home_last:
        yield Load(home, [follow[1]._replace(reads_at=END)])


def _all_merge(loads: _Loads) -> Iterator[Load]:
    """Decode with a query on every rank: each attends its part of the cache, and one merge leaves the result on all."""
    size, shard, new_tokens = loads.ring.world_size, loads.shard, loads.sequence.new_tokens
    yield Load(loads.everywhere(tile_s(loads.device, shard, new_tokens, loads.kv_len)))
    nbytes, is_exchange = new_tokens * shard.out_bytes, size > EXCHANGE_ROUNDS
    yield Load(
        loads.none,
        [loads.ahead(k, nbytes, is_exchange=is_exchange) for k in range(1, size)],
    )
    yield Load(loads.everywhere(loads.merging_s(shard, new_tokens) * (size - 1)))


LOADS: dict[str, Callable[[_Loads], Iterator[Load]]] = {
    "pass_kv": _pass_kv,
    "pass_q": _pass_q,
    "all_gather": _all_gather,
    "ulysses": _hybrid,
    "hybrid": _hybrid,
    "double_ring": _double_ring,
    "all_merge": _all_merge,
}

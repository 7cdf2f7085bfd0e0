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

from ringspan.catalog import Device
from ringspan.cost import Shard, merge_s, tile_s
from ringspan.timeline.run import END, Load, Ranks, Round, Seconds, Timeline, run_timeline


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

    def __init__(
        self, ring: Ring, sequence: Sequence, shard: Shard, device: Device, *, is_backward: bool
    ) -> None:
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

    def moves(self, onward: Callable[[Ranks], Ranks], nbytes: float | Seconds, **options: object) -> Round:
        """A message from every rank to the rank that `onward` says."""
        dst = onward(self.ranks) % self.ring.world_size
        is_far = dst // self.ring.per_node != self.ranks // self.ring.per_node
        return Round(self.ranks, dst % self.period, nbytes, is_far, **options)  # type: ignore[arg-type]

    def everywhere(self, seconds: float) -> Seconds:
        return np.full(self.period, seconds)

    # Tiles. `times` ranks were joined by an exchange of heads, so that a tile has as many times the tokens.

    def own_s(self, shard: Shard, times: int = 1) -> float:
        """A rank's queries against its own keys."""
        q_len = self.q_len * times
        if self.sequence.window:
            return self._tile(shard, q_len, min(q_len, self.sequence.window))
        if not self.sequence.is_causal:
            return self._tile(shard, q_len, self.kv_len * times)
        own = self._tile(shard, q_len, q_len, True)
        return own + self._tile(shard, q_len, self.cached_len * times)

    def other_s(self, shard: Shard, times: int = 1) -> float:
        """Against another rank's keys, where it sees them as far as the layout lets it; merging included."""
        q_len = self.q_len * times
        merging = 0.0 if self.is_backward else merge_s(self.device, shard, q_len)
        if self.sequence.window:
            return 0.0
        if not self.sequence.is_causal or self.sequence.layout == "contiguous":
            return self._tile(shard, q_len, self.kv_len * times) + merging
        cached = self._tile(shard, q_len, self.cached_len * times)
        if self.sequence.layout == "zigzag":
            return self._tile(shard, q_len, q_len / 2) + cached + merging
        return self._tile(shard, q_len, q_len, True) + cached + merging

    def unseen_s(self, shard: Shard) -> float:
        """Against a rank whose new tokens all come later: only its cached ones are seen."""
        if not self.cached_len:
            return 0.0
        merging = 0.0 if self.is_backward else merge_s(self.device, shard, self.q_len)
        return self._tile(shard, self.q_len, self.cached_len) + merging

    def _tile(self, shard: Shard, q_len: float, kv_len: float, is_causal: bool = False) -> float:
        return tile_s(self.device, shard, q_len, kv_len, is_causal=is_causal, is_backward=self.is_backward)

    def attend_s(self, owners: Ranks, own_s: float, other_s: float, unseen_s: float) -> Seconds:
        """By rank, for the block of those owners."""
        if not self.is_uneven:
            return self.everywhere(own_s if owners[0] == self.ranks[0] else other_s)
        return np.where(owners == self.ranks, own_s, np.where(owners < self.ranks, other_s, unseen_s))


def _pass_kv(loads: _Loads) -> Iterator[Load]:
    """KV travels to the next rank; backward its gradient follows, and goes home from the last."""
    size, shard = loads.ring.world_size, loads.shard
    own_s, other_s, unseen_s = loads.own_s(shard), loads.other_s(shard), loads.unseen_s(shard)
    nbytes = loads.kv_len * shard.kv_bytes
    hops = size - 1
    if loads.sequence.window and loads.sequence.layout == "contiguous":
        hops = min(hops, -(-loads.sequence.window // loads.q_len))
    uniform = {0: loads.everywhere(own_s), 1: loads.everywhere(other_s)}
    onward = loads.moves(lambda ranks: ranks + 1, nbytes)
    gradient = loads.moves(lambda ranks: ranks + 1, loads.kv_len * shard.dkv_bytes)
    for t in range(hops + 1):
        if loads.is_uneven:
            owners = (loads.ranks - t) % size
            attend_s = loads.attend_s(owners, own_s, other_s, unseen_s)
            travels = owners + t < size - 1 if not loads.cached_len else np.full(size, t < hops)
            moves = [_some(onward, travels)] if t < hops and travels.any() else []
        else:
            attend_s = uniform[min(t, 1)]
            moves = [onward] if t < hops else []
        if loads.is_backward and t > 0:
            moves.append(gradient)
        yield Load(attend_s, moves)
    if loads.is_backward and hops:
        yield Load(loads.none, [gradient._replace(reads_at=END)])


def _some(one: Round, are_sent: np.ndarray) -> Round:  # type: ignore[type-arg]
    return one._replace(src=one.src[are_sent], dst=one.dst[are_sent], is_far=one.is_far[are_sent])


def _pass_q(loads: _Loads) -> Iterator[Load]:
    """Queries travel; partial results go home, meanwhile or after the ring."""
    size, shard = loads.ring.world_size, loads.shard
    if loads.is_backward:
        yield from _pass_q_backward(loads)
        return
    own_s, other_s, unseen_s = loads.own_s(shard), loads.other_s(shard), loads.unseen_s(shard)
    merging_s = merge_s(loads.device, shard, loads.q_len)
    onward = loads.moves(lambda ranks: ranks + 1, loads.q_len * shard.q_bytes)
    nbytes = loads.q_len * shard.out_bytes
    for t in range(size):
        owners = (loads.ranks - t) % size
        # The queries came from `owners`: those are who sees whom, and the part is not merged here.
        if not loads.is_uneven:
            attend_s = loads.everywhere(own_s if t == 0 else other_s - merging_s)
        else:
            visible_s = np.where(owners > loads.ranks, other_s - merging_s, max(0.0, unseen_s - merging_s))
            attend_s = np.where(owners == loads.ranks, own_s, visible_s)
        moves = [onward] if t < size - 1 else []
        if t > 1 and not shard.practice.returns_after:
            moves.append(_home(loads, t - 1, nbytes, t + 2 if t + 2 < size else END))
            attend_s = attend_s + (merging_s if t > 2 else 0.0)
        yield Load(attend_s, moves)
    if size > 1 and not shard.practice.returns_after:
        yield Load(loads.everywhere(merging_s * min(2, size - 1)), [_home(loads, size - 1, nbytes, END)])
    elif size > 1:
        back = [_home(loads, t, nbytes, size + 1)._replace(is_exchange=True) for t in range(1, size)]
        yield Load(loads.none, back)
        yield Load(loads.everywhere(merging_s * (size - 1)))


def _pass_q_backward(loads: _Loads) -> Iterator[Load]:
    """q, dout, out and lse travel; dq follows."""
    size, shard = loads.ring.world_size, loads.shard
    onward = loads.moves(lambda ranks: ranks + 1, loads.q_len * shard.q_grad_bytes)
    gradient = loads.moves(lambda ranks: ranks + 1, loads.q_len * shard.dq_bytes)
    own_s, other_s, unseen_s = loads.own_s(shard), loads.other_s(shard), loads.unseen_s(shard)
    for t in range(size):
        owners = (loads.ranks - t) % size
        attend_s = loads.everywhere(own_s if t == 0 else other_s)
        if loads.is_uneven:
            attend_s = np.where(owners == loads.ranks, own_s, np.where(owners > loads.ranks, other_s, unseen_s))
        moves = ([onward] if t < size - 1 else []) + ([gradient] if t else [])
        yield Load(attend_s, moves)
    if size > 1:
        yield Load(loads.none, [gradient._replace(reads_at=END)])


def _home(loads: _Loads, distance: int, nbytes: float, reads_at: int) -> Round:
    return loads.moves(lambda ranks: ranks - distance, nbytes, reads_at=reads_at)


def _all_gather(loads: _Loads) -> Iterator[Load]:
    """All of K and V first, then one attend; backward the gradients go straight home."""
    size, shard = loads.ring.world_size, loads.shard
    nbytes = loads.kv_len * shard.kv_bytes
    gathers = [
        _gathered(loads, distance, nbytes) for distance in range(1, size) if not (loads.sequence.window and distance > 2)
    ]
    own_s, other_s = loads.own_s(shard), loads.other_s(shard)
    yield Load(loads.everywhere(own_s), gathers)
    if size == 1:
        return
    if loads.is_uneven and not loads.cached_len:
        rest_s = loads.ranks * other_s
    else:
        rest_s = loads.everywhere((size - 1) * other_s)
    yield Load(rest_s)
    if loads.is_backward:
        back = [_home(loads, t, loads.kv_len * shard.dkv_bytes, END)._replace(is_exchange=True) for t in range(1, size)]
        yield Load(loads.none, back)


def _gathered(loads: _Loads, distance: int, nbytes: float) -> Round:
    one = loads.moves(lambda ranks: ranks + distance, nbytes, is_exchange=True)
    if loads.is_uneven and not loads.cached_len:
        return _some(one, loads.ranks + distance < loads.ring.world_size)
    return one


def _exchanged(loads: _Loads) -> Shard:
    """The shard after every `inner` neighbours have exchanged tokens for heads."""
    degree, shard = loads.ring.inner, loads.shard
    kv_heads = max(1, shard.num_kv_heads // degree)
    return Shard(
        batch=shard.batch,
        num_heads=shard.num_heads // degree,
        num_kv_heads=kv_heads,
        head_dim=shard.head_dim,
        v_head_dim=shard.v_head_dim,
        kv_elements=shard.kv_elements * kv_heads // shard.num_kv_heads,
        itemsize=shard.itemsize,
        wire=shard.wire,
        practice=shard.practice,
    )


def _hybrid(loads: _Loads) -> Iterator[Load]:
    """Heads are exchanged inside, KV goes round outside, results are exchanged back. Ulysses is the ring of one."""
    size, degree = loads.ring.world_size, loads.ring.inner
    groups, joined, shard = size // degree, _exchanged(loads), loads.shard
    sent = loads.q_len * (shard.q_grad_bytes if loads.is_backward else shard.q_bytes) / degree
    sent += loads.kv_len * joined.kv_bytes
    yield Load(loads.none, [_neighbour(loads, k, sent, 0) for k in range(1, degree)])
    own_s, other_s = loads.own_s(joined, degree), loads.other_s(joined, degree)
    kv_len = loads.kv_len * degree
    onward = loads.moves(lambda ranks: ranks + degree, kv_len * joined.kv_bytes)
    gradient = loads.moves(lambda ranks: ranks + degree, kv_len * joined.dkv_bytes)
    for t in range(groups):
        if loads.is_uneven:
            mine = loads.ranks // degree
            owners = (mine - t) % groups
            attend_s = np.where(owners == mine, own_s, np.where(owners < mine, other_s, loads.unseen_s(joined) * degree))
        else:
            attend_s = loads.everywhere(own_s if t == 0 else other_s)
        moves = [onward] if t < groups - 1 else []
        if loads.is_backward and 0 < t:
            moves.append(gradient)
        yield Load(attend_s, moves)
    back = loads.q_len * (shard.dq_bytes if loads.is_backward else shard.out_bytes) / degree
    back += loads.kv_len * joined.dkv_bytes if loads.is_backward else 0.0
    last = [gradient] if loads.is_backward and groups > 1 else []
    yield Load(loads.none, [*last, *(_neighbour(loads, k, back, END) for k in range(1, degree))])


def _neighbour(loads: _Loads, distance: int, nbytes: float, reads_at: int) -> Round:
    """To the neighbour so many places further in the group of `inner` ranks."""
    degree = loads.ring.inner

    def onward(ranks: Ranks) -> Ranks:
        return ranks - ranks % degree + (ranks % degree + distance) % degree

    return loads.moves(onward, nbytes, reads_at=reads_at, is_exchange=True)


def _double_ring(loads: _Loads) -> Iterator[Load]:
    """An inner ring in each node; the block of the next phase crosses to the next node in the first step of this one."""
    size, inner = loads.ring.world_size, loads.ring.inner
    outer, shard = size // inner, loads.shard
    nbytes = loads.kv_len * shard.kv_bytes
    first, other = (loads.everywhere(seconds) for seconds in (loads.own_s(shard), loads.other_s(shard)))

    def turn(ranks: Ranks) -> Ranks:
        return ranks - ranks % inner + (ranks % inner + 1) % inner

    inside, across = loads.moves(turn, nbytes), loads.moves(lambda ranks: ranks + inner, nbytes)
    gradient = loads.moves(turn, loads.kv_len * shard.dkv_bytes)
    for t in range(size):
        phase, hop = divmod(t, inner)
        moves = [inside] if hop < inner - 1 else []
        if hop == 0 and phase < outer - 1:
            moves.append(across._replace(reads_at=t + inner))
        if loads.is_backward and t:
            moves.append(gradient)
        yield Load(other if t else first, moves)
    if loads.is_backward and size > 1:
        yield Load(loads.none, [gradient._replace(reads_at=END)])


def _all_merge(loads: _Loads) -> Iterator[Load]:
    """Decode with a query on every rank: each attends its part of the cache, and one merge leaves the result on all."""
    size, shard = loads.ring.world_size, loads.shard
    new_tokens = loads.sequence.new_tokens
    seconds = tile_s(loads.device, shard, new_tokens, loads.kv_len)
    yield Load(loads.everywhere(seconds))
    nbytes = new_tokens * shard.out_bytes
    parts = [loads.moves(lambda ranks, k=k: ranks + k, nbytes, is_exchange=True) for k in range(1, size)]  # type: ignore[misc]
    yield Load(loads.none, parts)
    yield Load(loads.everywhere(merge_s(loads.device, shard, new_tokens) * (size - 1)))


LOADS: dict[str, Callable[[_Loads], Iterator[Load]]] = {
    "pass_kv": _pass_kv,
    "pass_q": _pass_q,
    "all_gather": _all_gather,
    "ulysses": _hybrid,
    "hybrid": _hybrid,
    "double_ring": _double_ring,
    "all_merge": _all_merge,
}

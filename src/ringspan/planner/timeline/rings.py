"""The loads of every algorithm for regular sequences, step by step on demand: what a planner needs at any size.

A `Schedule` for 16,384 ranks would have 268 million tiles. But where every rank has as many tokens and a mask treats
them alike (full, or causal with a zigzag or striped layout), all ranks do the same at the same time, and two ranks in
the same place of their nodes also send over the same kind of link. One such class of tiles and links is priced once
(`loads.py`), and one node is run for all of them. Contiguous shards under a causal mask are the exception: all ranks
are run.

`tests/unit/test_timeline.py` holds these loads against those of the real schedules.
"""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import numpy.typing as npt

from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard, tile_s
from ringspan.planner.timeline.loads import Loads, Ring, Sequence
from ringspan.planner.timeline.run import END, EXCHANGE_ROUNDS, Load, Ranks, Round, Seconds, Timeline, run_timeline


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
    loads = Loads(ring, sequence, shard, device, is_backward=is_backward)
    steps = LOADS[algorithm](loads)
    return run_timeline(steps, loads.period, device.near, device.far)


def _pass_kv(loads: Loads) -> Iterator[Load]:
    """KV travels to the next rank; backward its gradient follows, and the last hop home is while own keys are read."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    seers = loads.seers()
    hops = max(seers, default=0)
    own_s, other_s, unseen_s = loads.own_s(shard), loads.other_s(shard), loads.unseen_s(shard)
    home, later = loads.everywhere(own_s), loads.everywhere(other_s)
    is_home_last = loads.is_backward and hops > 0
    onward = loads.ahead(1, loads.kv_len * shard.kv_bytes)
    for t in range(hops + 1):
        attend_s, moves = later if t in seers else loads.none, [onward] if t < hops else []
        if t == 0 and not is_home_last:
            attend_s = home
        if loads.is_uneven:
            if t:
                attend_s = np.where((ranks - t) % size < ranks, other_s, unseen_s)
            if not loads.cached_len:
                # No further than the last rank, which sees all; and what has come round to the first is not seen there.
                moves = [_some(one, (ranks >= t) & (ranks < size - 1)) for one in moves]
        if loads.is_backward and t - 1 in seers:
            stop = _next_stop(seers, t, size)
            moves.append(_follow_kv(loads, t, stop - t + 1, 0 if stop == t else t + 2))
        yield Load(attend_s, moves)
    if is_home_last:
        yield Load(home, [_follow_kv(loads, hops + 1, size - hops, END)])


def _follow_kv(loads: Loads, t: int, distance: int, reads_at: int) -> Round:
    """The gradients of what was attended in the step before, to the next rank that adds to them, or home."""
    size, nbytes = loads.ring.world_size, loads.kv_len * loads.shard.dkv_bytes
    if not loads.is_uneven:
        return loads.ahead(distance, nbytes, reads_at=reads_at)
    one = loads.moves(lambda ranks: np.where(ranks < size - 1, ranks + 1, size - t), nbytes, reads_at=reads_at)
    return _some(one, loads.ranks >= t - 1)


def _next_stop(stops: Collection[int], t: int, home: int) -> int:
    """The first step from t on in which a block is where it is needed; then it goes home."""
    return t if t in stops else next((stop for stop in stops if stop > t), home)


def _some(one: Round, are_sent: npt.NDArray[np.bool_]) -> Round:
    return one._replace(src=one.src[are_sent], dst=one.dst[are_sent], is_far=one.is_far[are_sent])


def _pass_q(loads: Loads) -> Iterator[Load]:
    """Queries travel; partial results go home, meanwhile or after the ring; backward dq follows the queries."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    merging_s = loads.merging_s(shard, loads.q_len)
    stops = loads.seen()
    hops = max(stops, default=0)
    own_s, other_s = loads.own_s(shard), max(0.0, loads.other_s(shard) - merging_s)
    unseen_s = max(0.0, loads.unseen_s(shard) - merging_s)
    sent, back = (shard.q_grad_bytes, shard.dq_bytes) if loads.is_backward else (shard.q_bytes, shard.out_bytes)
    onward = loads.ahead(1, loads.q_len * sent)
    first, later = loads.everywhere(own_s), loads.everywhere(other_s)
    is_pruned = loads.is_uneven and not loads.cached_len
    is_after = shard.practice.returns_after and not loads.is_backward
    for t in range(size + 1):
        attend_s = later if t in stops else loads.none if t else first
        if loads.is_uneven and t < size:
            owners = (ranks - t) % size
            attend_s = np.where(owners == ranks, own_s, np.where(owners > ranks, other_s, unseen_s))
        moves = [onward] if t < hops else []
        if is_pruned:
            moves = [_some(one, (ranks - t) % size > 0) for one in moves]  # nobody else is seen by the first rank
        if t - 1 in stops and not is_after:
            stop = _next_stop(stops, t, size) if loads.is_backward else size
            distance, is_passed_on = stop - t + 1, stop == t < size
            home = loads.ahead(distance, loads.q_len * back, reads_at=0 if is_passed_on else _later(t, size))
            moves.append(_some(home, ranks < t - 1) if is_pruned else home)
        if not loads.is_backward and not is_after:
            attend_s = attend_s + _merges(loads, stops, t, merging_s)
        yield Load(attend_s, moves)
    if size > 1 and is_after:
        nbytes = loads.q_len * back
        home_moves = [loads.ahead(-t, nbytes, is_exchange=True) for t in stops]
        yield Load(loads.none, home_moves)
        yield Load(loads.everywhere(merging_s * len(stops)))
    elif not loads.is_backward:
        late = [_merges(loads, stops, t, merging_s) for t in (size + 1, size + 2)]
        yield Load(late[0] + late[1])


def _later(t: int, size: int) -> int:
    """A sum is waited for two steps later, or at the end."""
    return t + 2 if t + 2 <= size else END


def _merges(loads: Loads, stops: Collection[int], t: int, merging_s: float) -> Seconds:
    """Of the parts that were sent home two steps before, that is made three steps before."""
    made, size = t - 3, loads.ring.world_size
    if made not in stops:
        return loads.none
    if not loads.is_uneven or loads.cached_len:
        return loads.everywhere(merging_s)
    return np.where((loads.ranks + made) % size < loads.ranks, merging_s, 0.0)


def _all_gather(loads: Loads) -> Iterator[Load]:
    """All of K and V first, then one attend; backward the gradients go straight home."""
    size, shard, ranks = loads.ring.world_size, loads.shard, loads.ranks
    own_s, other_s = loads.own_s(shard), loads.other_s(shard)
    is_pruned = loads.is_uneven and not loads.cached_len
    seers = loads.seers()
    is_exchange = len(seers) >= EXCHANGE_ROUNDS

    def messages(way: int, nbytes: float, reads_at: int) -> list[Round]:
        rounds = []
        for k in seers:
            one = loads.ahead(way * k, nbytes, reads_at=reads_at, is_exchange=is_exchange)
            rounds.append(_some(one, ranks + k < size if way > 0 else ranks >= k) if is_pruned else one)
        return rounds

    yield Load(loads.everywhere(own_s), messages(1, loads.kv_len * shard.kv_bytes, 0))
    if size == 1:
        return
    yield Load(ranks * np.float64(other_s) if is_pruned else loads.everywhere(len(seers) * other_s))
    if loads.is_backward:
        yield Load(loads.none, messages(-1, loads.kv_len * shard.dkv_bytes, END))


def _hybrid(loads: Loads) -> Iterator[Load]:
    """Heads are exchanged inside, KV goes round outside, results go straight home. Ulysses is the ring of one."""
    degree, shard = loads.ring.inner, loads.shard
    groups, seers = loads.ring.world_size // degree, loads.seers(degree)
    hops = max(seers, default=0)
    joined = shard.with_heads(shard.num_heads // degree, max(1, shard.num_kv_heads // degree))
    sent = loads.q_len * (shard.q_grad_bytes if loads.is_backward else shard.q_bytes) / degree
    sent += loads.kv_len * joined.kv_bytes
    yield Load(loads.none, [_neighbour(loads, k, 0, sent) for k in range(1, degree)])
    own_s, other_s = loads.own_s(joined, degree), loads.other_s(joined, degree)
    unseen_s = loads.unseen_s(joined, degree)
    onward = loads.ahead(degree, loads.kv_len * degree * joined.kv_bytes)
    group = loads.ranks // degree
    dkv = loads.kv_len * joined.dkv_bytes
    for t in range(hops + 1):
        seconds = other_s if t in seers else 0.0 if t else own_s
        attend_s, moves = loads.everywhere(seconds), [onward] if t < hops else []
        if loads.is_uneven:
            owners = (group - t) % groups
            attend_s = np.where(owners == group, own_s, np.where(owners < group, other_s, unseen_s))
            if not loads.cached_len:
                moves = [_some(one, (group >= t) & (group < groups - 1)) for one in moves]
        if loads.is_backward and (t == 1 or t - 1 in seers):
            moves += [_neighbour(loads, k, t - 1, dkv) for k in range(degree) if k or t > 1]
        yield Load(attend_s, moves)
    back = loads.q_len * (shard.dq_bytes if loads.is_backward else shard.out_bytes) / degree
    rounds = [_neighbour(loads, k, 0, back, END) for k in range(1, degree)]
    if loads.is_backward:
        rounds += [_neighbour(loads, k, hops, dkv, END) for k in range(degree) if k or hops]
    yield Load(loads.none, rounds)
    if not loads.is_backward and degree > 1:
        yield Load(loads.everywhere((degree - 1) * loads.merging_s(joined, loads.q_len)))


def _neighbour(loads: Loads, distance: int, groups_back: int, nbytes: float, reads_at: int = 0) -> Round:
    """To the rank so many places further in its group of `inner`, or in a group before."""
    degree = loads.ring.inner

    def onward(ranks: Ranks) -> Ranks:
        return ranks - ranks % degree + (ranks % degree + distance) % degree - groups_back * degree

    return loads.moves(onward, nbytes, reads_at=reads_at, is_exchange=degree > EXCHANGE_ROUNDS)


def _double_ring(loads: Loads) -> Iterator[Load]:
    """An inner ring in each node; the block of the next phase crosses to the next node in the first step of this one.

    Gradients follow: round the node, and at the end of a phase to the next node, which the last one leaves for home,
    while own keys are read.
    """
    size, inner, shard = loads.ring.world_size, loads.ring.inner, loads.shard
    nbytes, outer = loads.kv_len * shard.kv_bytes, loads.ring.world_size // loads.ring.inner
    # The keys that a window reaches come by in no simple order, so the work is spread over all steps.
    other_s = loads.other_s(shard) * (len(loads.seers()) / max(1, size - 1))
    home, later = loads.everywhere(loads.own_s(shard)), loads.everywhere(other_s)
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


def _all_merge(loads: Loads) -> Iterator[Load]:
    """Decode with a query on every rank: each attends its part of the cache, and one merge leaves the result on all."""
    size, shard, new_tokens = loads.ring.world_size, loads.shard, loads.sequence.new_tokens
    kv_len = loads.keys_seen() / size if loads.window else loads.kv_len
    yield Load(loads.everywhere(tile_s(loads.device, shard, new_tokens, kv_len)))
    nbytes, is_exchange = new_tokens * shard.out_bytes, size > EXCHANGE_ROUNDS
    yield Load(
        loads.none,
        [loads.ahead(k, nbytes, is_exchange=is_exchange) for k in range(1, size)],
    )
    yield Load(loads.everywhere(loads.merging_s(shard, new_tokens) * (size - 1)))


LOADS: dict[str, Callable[[Loads], Iterator[Load]]] = {
    "pass_kv": _pass_kv,
    "pass_q": _pass_q,
    "all_gather": _all_gather,
    "ulysses": _hybrid,
    "hybrid": _hybrid,
    "double_ring": _double_ring,
    "all_merge": _all_merge,
}

"""pass-KV: queries stay, K and V go round the ring (arXiv 2411.01783, algorithm 2).

Every rank keeps its queries and their running output, so no result has to return. It is the right choice when there are
many new queries: full prefill and training.
"""

from collections.abc import Iterator

import numpy as np

from ringspan.algorithms.loads import END, Load, RegularCall, Round, next_stop
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.ring import Direction, Side, build_ring
from ringspan.schedule import Route, Schedule, Visible


def build_pass_kv(
    visible: Visible, *, direction: Direction = "forward", backward: Side | None = None, route: Route = "follow"
) -> Schedule:
    """Build the forward schedule, or the backward one with the side that travels and the route of its gradients."""
    return build_ring(visible, "kv", direction, backward, route)


def pass_kv_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads: KV travels to the next rank; backward, its gradient follows, and own keys hide the last hop."""
    size, ranks, seers = call.ring.world_size, call.ranks, call.seers()
    hops = max(seers, default=0)
    own_s, other_s, unseen_s = call.own_s(), call.other_s(), call.unseen_s()
    home, later = call.everywhere(own_s), call.everywhere(other_s)
    is_home_last = call.is_backward and hops > 0
    onward = call.ahead(1, call.kv_len * call.costs.token_bytes("kv"))
    for t in range(hops + 1):
        attend_s, moves = later if t in seers else call.none, [onward] if t < hops else []
        if t == 0 and not is_home_last:
            attend_s = home
        if call.is_uneven and t:
            attend_s = np.where((ranks - t) % size < ranks, other_s, unseen_s)
        if call.is_pruned:
            # A block stops at the last rank, because no later queries see it.
            moves = [one.only((ranks >= t) & (ranks < size - 1)) for one in moves]
        if call.is_backward and t - 1 in seers:
            stop = next_stop(seers, t, size)
            moves.append(_follow_kv(call, t, stop - t + 1, 0 if stop == t else t + 2))
        yield Load(attend_s, moves)
    if is_home_last:
        yield Load(home, [_follow_kv(call, hops + 1, size - hops, END)])


def _follow_kv(call: RegularCall, t: int, distance: int, reads_at: int) -> Round:
    """Send the gradients of the previous step to the next rank that adds to them, or home."""
    size, nbytes = call.ring.world_size, call.kv_len * call.costs.token_bytes("dkv")
    if not call.is_uneven:
        return call.ahead(distance, nbytes, reads_at=reads_at)
    one = call.moves(lambda ranks: np.where(ranks < size - 1, ranks + 1, size - t), nbytes, reads_at=reads_at)
    return one.only(call.ranks >= t - 1)


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count the K and V in use and those that arrive."""
    return min(2, sizes.world_size - 1) * sizes.kv


PASS_KV = Algorithm(
    name="pass_kv",
    build=build_pass_kv,
    options=frozenset({"direction", "route"}),
    label="pass-KV",
    idea="queries stay, keys and values travel",
    loads=pass_kv_loads,
    buffer_bytes=_buffer_bytes,
)

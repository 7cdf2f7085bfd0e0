"""pass-Q: keys stay, queries go round the ring and their partial results return (arXiv 2411.01783, algorithm 3).

A partial result goes straight to its owner in the step after it was computed, while the ring goes on; the paper sends
all of them in one all-to-all at the end. It is the right choice for few new queries against a long cache.
"""

from collections.abc import Collection, Iterator

import numpy as np

from ringspan.algorithms.loads import END, Load, RegularCall, Seconds, next_stop
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.ring import Direction, Side, build_ring
from ringspan.schedule import Route, Schedule, Visible


def build_pass_q(
    visible: Visible, *, direction: Direction = "forward", backward: Side | None = None, route: Route = "follow"
) -> Schedule:
    """Build the forward schedule, or the backward one with the side that travels and the route of its gradients."""
    return build_ring(visible, "q", direction, backward, route)


def pass_q_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads: queries travel, partial results go home during or after the ring; backward, dq follows q."""
    size, ranks = call.ring.world_size, call.ranks
    merging_s = call.merging_s(call.q_len)
    stops = call.seen()
    hops = max(stops, default=0)
    own_s, other_s = call.own_s(), max(0.0, call.other_s() - merging_s)
    unseen_s = max(0.0, call.unseen_s() - merging_s)
    sent, back = (call.costs.token_bytes(kind) for kind in (("q_grad", "dq") if call.is_backward else ("q", "out")))
    onward = call.ahead(1, call.q_len * sent)
    first, later = call.everywhere(own_s), call.everywhere(other_s)
    is_after = call.costs.returns_after and not call.is_backward
    for t in range(size + 1):
        attend_s = later if t in stops else call.none if t else first
        if call.is_uneven and t < size:
            owners = (ranks - t) % size
            attend_s = np.where(owners == ranks, own_s, np.where(owners > ranks, other_s, unseen_s))
        moves = [onward] if t < hops else []
        if call.is_pruned:
            moves = [one.only((ranks - t) % size > 0) for one in moves]  # the first rank sees only itself
        if t - 1 in stops and not is_after:
            stop = next_stop(stops, t, size) if call.is_backward else size
            distance, is_passed_on = stop - t + 1, stop == t < size
            home = call.ahead(distance, call.q_len * back, reads_at=0 if is_passed_on else _later(t, size))
            moves.append(home.only(ranks < t - 1) if call.is_pruned else home)
        if not call.is_backward and not is_after:
            attend_s = attend_s + _merges(call, stops, t, merging_s)
        yield Load(attend_s, moves)
    if size > 1 and is_after:
        nbytes = call.q_len * back
        yield Load(call.none, [call.ahead(-t, nbytes, is_exchange=True) for t in stops])
        yield Load(call.everywhere(merging_s * len(stops)))
    elif not call.is_backward:
        late = [_merges(call, stops, t, merging_s) for t in (size + 1, size + 2)]
        yield Load(late[0] + late[1])


def _later(t: int, size: int) -> int:
    """Return the step that waits for a sum: two steps later, or the end."""
    return t + 2 if t + 2 <= size else END


def _merges(call: RegularCall, stops: Collection[int], t: int, merging_s: float) -> Seconds:
    """Return the seconds to merge the parts that were computed three steps earlier and sent home two steps earlier."""
    made, size = t - 3, call.ring.world_size
    if made not in stops:
        return call.none
    if not call.is_pruned:
        return call.everywhere(merging_s)
    return np.where((call.ranks + made) % size < call.ranks, merging_s, 0.0)


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count the queries in use, arriving and leaving, and the partial results under way."""
    return min(3, sizes.world_size - 1) * sizes.q + min(3, sizes.world_size) * sizes.out


PASS_Q = Algorithm(
    name="pass_q",
    build=build_pass_q,
    options=frozenset({"direction", "route"}),
    label="pass-Q",
    idea="keys and values stay, queries travel",
    loads=pass_q_loads,
    buffer_bytes=_buffer_bytes,
    moves_kv=False,
)

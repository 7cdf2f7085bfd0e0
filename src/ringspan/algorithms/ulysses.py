"""Ulysses: tokens are exchanged for heads, so that each rank attends all tokens for its share of the heads.

There is one exchange before and one after, for any number of ranks. The ranks must divide the query heads, and divide
the KV heads or be a multiple of them (several ranks then receive the same KV head).
"""

from collections.abc import Iterator

import numpy as np

from ringspan.algorithms.loads import END, EXCHANGE_ROUNDS, Load, Ranks, RegularCall, Round
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.ring import Holdings, Side, q_kind
from ringspan.errors import UnsupportedError
from ringspan.schedule import ALL, Attend, Block, Heads, Kind, Schedule, Step, Transfer, Visible, complete

MOST_LISTED = 1024  # a refusal proposes at most so many ranks, which bounds its time


def build_ulysses(visible: Visible, *, heads: Heads, backward: Side | None = None) -> Schedule:
    """Build the forward or the backward schedule; both sides travel, so "kv" and "q" give the same one."""
    world_size = visible.world_size
    held, exchange = exchange_heads(visible, heads, world_size, q_kind(backward))
    attends = []
    for rank in range(world_size):
        attend = visible.prune(Attend(held.qs[rank], (*held.kvs[rank], held.replicated[rank])))
        attends.append([] if attend is None else [attend])
    steps = [Step([()] * world_size, exchange), Step(attends)]
    return complete(Schedule.of_steps(world_size, heads, steps), visible)


def exchange_heads(visible: Visible, heads: Heads, degree: int, kind: Kind) -> tuple[Holdings, list[Transfer]]:
    """Return what each rank holds after groups of `degree` neighbours exchanged tokens for heads, and the transfers."""
    check_heads(heads, degree)
    world_size = visible.world_size
    asks, is_asked = visible.matrix.max(axis=1), visible.matrix.max(axis=0)
    qs, kvs, replicated, transfers = [], [], [], []
    for rank in range(world_size):
        q_heads, kv_heads = head_range(heads.num_heads, degree, rank), head_range(heads.num_kv_heads, degree, rank)
        group = range(rank - rank % degree, rank - rank % degree + degree)
        qs.append(tuple(Block(kind, owner, q_heads) for owner in group if asks[owner]))
        kvs.append(tuple(Block("kv", owner, kv_heads) for owner in group if is_asked[owner]))
        replicated.append(Block("kv", ALL, kv_heads))
        transfers += [Transfer(block, block.owner, rank) for block in (*qs[-1], *kvs[-1]) if block.owner != rank]
    return Holdings(qs, kvs, replicated), transfers


def head_range(num_heads: int, degree: int, rank: int) -> range:
    """Return the heads of a rank among `degree` neighbours; with fewer heads than ranks, several ranks share one."""
    part = rank % degree
    return range(part * num_heads // degree, max(1, num_heads // degree) + part * num_heads // degree)


def check_heads(heads: Heads, degree: int) -> None:
    """Raise UnsupportedError if the heads cannot be split over `degree` ranks."""
    if not _divides(heads, degree):
        legal = [size for size in range(1, min(heads.num_heads, MOST_LISTED) + 1) if _divides(heads, size)]
        raise UnsupportedError(
            f"Ulysses over {_count(degree, 'rank')} with {_count(heads.num_heads, 'query head')} and "
            f"{_count(heads.num_kv_heads, 'KV head')}: the ranks must divide the query heads, and "
            "divide or be a multiple of the KV heads",
            remedy=f"use {_one_of(legal)} rank{'' if legal == [1] else 's'}, or an algorithm that leaves "
            "heads whole (pass_kv, pass_q, all_gather)",
        )


def _divides(heads: Heads, degree: int) -> bool:
    split = heads.num_kv_heads % degree == 0 or degree % heads.num_kv_heads == 0
    return heads.num_heads % degree == 0 and split


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _one_of(sizes: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, sizes[:-1])), str(sizes[-1])) if part)


def exchange_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads of hybrid: heads are exchanged inside, KV goes round outside, results go straight home.

    Ulysses is a hybrid with one group. If the software joins tiles, results travel in the type of the inputs and are
    not merged.
    """
    degree, costs = call.ring.inner, call.costs
    is_whole = costs.joins_tiles
    groups, seers = call.ring.world_size // degree, call.seers(degree)
    hops = max(seers, default=0)
    joined = call.with_heads(costs.num_heads // degree, max(1, costs.num_kv_heads // degree))
    sent = call.q_len * costs.token_bytes("q_grad" if call.is_backward else "q") / degree
    sent += call.kv_len * joined.costs.token_bytes("kv")
    yield Load(call.none, [_neighbour(call, k, 0, sent) for k in range(1, degree)])
    own_s, other_s, unseen_s = joined.own_s(degree), joined.other_s(degree), joined.unseen_s(degree)
    onward = call.ahead(degree, call.kv_len * degree * joined.costs.token_bytes("kv"))
    group = call.ranks // degree
    dkv = call.kv_len * joined.costs.token_bytes("kv" if is_whole else "dkv")
    for t in range(hops + 1):
        seconds = other_s if t in seers else 0.0 if t else own_s
        attend_s, moves = call.everywhere(seconds), [onward] if t < hops else []
        if call.is_uneven:
            owners = (group - t) % groups
            attend_s = np.where(owners == group, own_s, np.where(owners < group, other_s, unseen_s))
        if call.is_pruned:
            moves = [one.only((group >= t) & (group < groups - 1)) for one in moves]
        if call.is_backward and (t == 1 or t - 1 in seers):
            moves += [_neighbour(call, k, t - 1, dkv) for k in range(degree) if k or t > 1]
        yield Load(attend_s, moves)
    sums: Kind = "dq" if call.is_backward else "out"
    back = call.q_len * costs.token_bytes("q" if is_whole else sums) / degree
    rounds = [_neighbour(call, k, 0, back, END) for k in range(1, degree)]
    if call.is_backward:
        rounds += [_neighbour(call, k, hops, dkv, END) for k in range(degree) if k or hops]
    yield Load(call.none, rounds)
    if not call.is_backward and degree > 1 and not is_whole:
        yield Load(call.everywhere((degree - 1) * joined.merging_s(call.q_len)))


def _neighbour(call: RegularCall, distance: int, groups_back: int, nbytes: float, reads_at: int = 0) -> Round:
    """Send to the rank `distance` places further in its group, or in the group `groups_back` before it."""
    degree = call.ring.inner

    def onward(ranks: Ranks) -> Ranks:
        return ranks - ranks % degree + (ranks % degree + distance) % degree - groups_back * degree

    return call.moves(onward, nbytes, reads_at=reads_at, is_exchange=degree > EXCHANGE_ROUNDS)


def exchange_buffer_bytes(sizes: BufferSizes) -> float:
    """Count the exchanged blocks that arrive and the results for other ranks that leave.

    With two or more groups K and V also go round; the first of those blocks are the ones that arrived.
    """
    degree = sizes.inner
    abroad = (degree - 1) / degree
    kv = sizes.kv * max(1.0, degree / sizes.num_kv_heads)
    rings = sizes.world_size // degree
    return abroad * (sizes.q + kv + 2 * sizes.out) + min(1.5, 1.25 * (rings - 1)) * kv


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count with all ranks in one group."""
    return exchange_buffer_bytes(sizes._replace(inner=sizes.world_size))


ULYSSES = Algorithm(
    name="ulysses",
    build=build_ulysses,
    options=frozenset({"heads"}),
    label="Ulysses",
    idea="exchange tokens for heads, attend, exchange back",
    loads=exchange_loads,
    buffer_bytes=_buffer_bytes,
)

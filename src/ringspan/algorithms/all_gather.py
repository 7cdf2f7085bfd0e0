"""all-gather: every rank first receives all blocks it needs, then attends them at once.

It has two steps instead of a ring, and needs memory for the blocks of all ranks. A block goes only to ranks that need
it.
"""

from collections.abc import Iterator

import numpy as np

from ringspan.algorithms.loads import END, EXCHANGE_ROUNDS, Load, RegularCall, Round
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.ring import Side, q_kind, whole_blocks
from ringspan.schedule import Attend, Schedule, Step, Transfer, Visible, complete

MOST_PLANNED_RANKS = 2048  # every device holds the K and V of all ranks


def build_all_gather(visible: Visible, *, backward: Side | None = None) -> Schedule:
    """Build the forward schedule, or the backward one with the gathered side; its gradients go straight home."""
    world_size = visible.world_size
    ranks = range(world_size)
    held = whole_blocks(world_size, q_kind(backward))
    moving = held.qs if backward == "q" else held.kvs

    def needs(rank: int, owner: int) -> bool:
        return visible.sees(owner, rank) if backward == "q" else visible.sees(rank, owner)

    def attends(rank: int, owners: list[int]) -> list[Attend]:
        blocks = tuple(moving[owner][0] for owner in owners)
        pair = (blocks, held.kvs[rank]) if backward == "q" else (held.qs[rank], blocks)
        return [Attend(*pair)] if blocks else []

    def local(rank: int) -> list[Attend]:
        replicated = visible.prune(Attend(held.qs[rank], (held.replicated[rank],)))
        return attends(rank, [rank] if needs(rank, rank) else []) + ([replicated] if replicated else [])

    foreign = [[owner for owner in ranks if owner != rank and needs(rank, owner)] for rank in ranks]
    transfers = [Transfer(moving[owner][0], owner, rank) for rank in ranks for owner in foreign[rank]]
    steps = [Step([local(rank) for rank in ranks], transfers)]
    if transfers:
        steps.append(Step([attends(rank, foreign[rank]) for rank in ranks]))
    return complete(Schedule.of_steps(world_size, None, steps), visible)


def all_gather_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads: all of K and V, then one attend; backward, the gradients go straight home.

    If the software joins tiles, its collective gathers the blocks, and one kernel attends all keys without merges.
    """
    if call.costs.joins_tiles and call.ring.world_size > 1:
        yield from _gathered_loads(call)
        return
    size, ranks = call.ring.world_size, call.ranks
    own_s, other_s = call.own_s(), call.other_s()
    seers = call.seers()
    is_exchange = len(seers) >= EXCHANGE_ROUNDS

    def messages(way: int, nbytes: float, reads_at: int) -> list[Round]:
        rounds = []
        for k in seers:
            one = call.ahead(way * k, nbytes, reads_at=reads_at, is_exchange=is_exchange)
            rounds.append(one.only(ranks + k < size if way > 0 else ranks >= k) if call.is_pruned else one)
        return rounds

    yield Load(call.everywhere(own_s), messages(1, call.kv_len * call.costs.token_bytes("kv"), 0))
    if size == 1:
        return
    yield Load(ranks * np.float64(other_s) if call.is_pruned else call.everywhere(len(seers) * other_s))
    if call.is_backward:
        yield Load(call.none, messages(-1, call.kv_len * call.costs.token_bytes("dkv"), END))


def _gathered_loads(call: RegularCall) -> Iterator[Load]:
    yield Load(call.none, call.gathers(call.kv_len * call.costs.token_bytes("kv")))
    yield Load(call.gathered_s())
    if call.is_backward:
        yield Load(call.none, call.gathers(call.kv_len * call.costs.token_bytes("dkv"), reads_at=END))


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count the K and V of all other ranks."""
    return (sizes.world_size - 1) * sizes.kv


ALL_GATHER = Algorithm(
    name="all_gather",
    build=build_all_gather,
    label="all-gather",
    idea="fetch all keys and values, then attend them in one go",
    loads=all_gather_loads,
    buffer_bytes=_buffer_bytes,
    most_ranks=MOST_PLANNED_RANKS,
)

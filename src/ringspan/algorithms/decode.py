"""Decode: one new token per sequence against a cache that stays where it is.

Queries that are sharded by sequence travel round the ring and their partial results return (arXiv 2411.01783,
algorithm 4): this is pass-Q. If every rank holds the query, as in `generate()`, every rank attends its part of the
cache at once and one merge leaves the result on all ranks.

Decode has no direction option. The direction of a ring matters if its links differ in bandwidth; a decode step sends
the queries of one token, and its latency is the same either way.
"""

from collections.abc import Iterator
from typing import Literal

from ringspan.algorithms.loads import EXCHANGE_ROUNDS, Load, RegularCall
from ringspan.algorithms.pass_q import PASS_Q, build_pass_q
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.arguments import TEXT, check_arguments
from ringspan.errors import UnsupportedError
from ringspan.schedule import ALL, AllMerge, Attend, Block, Schedule, Step, Visible
from ringspan.schedule.visible import A_VISIBLE

Query = Literal["sharded", "replicated"]


def build_decode(visible: Visible, *, query: Query = "sharded") -> Schedule:
    """Build the schedule of one decode step; it depends on who holds queries and keys, not on the number of keys."""
    check_arguments(visible=(A_VISIBLE, visible), query=(TEXT, query))
    if query == "sharded":
        return build_pass_q(visible)
    if query != "replicated":
        raise UnsupportedError(
            'the new tokens are "sharded" by sequence or "replicated" on all ranks', argument="query", value=query
        )
    return _build_all_merge(visible)


def _build_all_merge(visible: Visible) -> Schedule:
    attends = []
    for rank in range(visible.world_size):
        # Replicated keys are attended by one rank only: the merge would count them once per rank.
        kvs = [rank, ALL] if rank == 0 else [rank]
        seen = tuple(Block("kv", owner) for owner in kvs if visible.sees(ALL, owner))
        attends.append([Attend((Block("q", ALL),), seen)] if seen else [])
    steps = [Step(attends)]
    if any(attends):
        steps.append(Step([()] * visible.world_size, merges=[AllMerge(Block("out", ALL))]))
    return Schedule.of_steps(visible.world_size, None, steps)


def all_merge_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads: each rank attends its part of the cache with all queries, then all ranks merge."""
    size, new_tokens = call.ring.world_size, call.sequence.new_tokens
    kv_len = call.keys_seen() / size if call.window else call.kv_len
    yield Load(call.everywhere(call.costs.tile_s(new_tokens, kv_len)))
    nbytes, is_exchange = new_tokens * call.costs.token_bytes("out"), size > EXCHANGE_ROUNDS
    yield Load(call.none, [call.ahead(k, nbytes, is_exchange=is_exchange) for k in range(1, size)])
    yield Load(call.everywhere(call.merging_s(new_tokens) * (size - 1)))


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count the partial results of all other ranks."""
    return (sizes.world_size - 1) * sizes.out


ALL_MERGE = Algorithm(
    name="all_merge",
    build=_build_all_merge,
    label="all-merge",
    idea="every rank attends its part of the cache, and one merge leaves the result on all",
    loads=all_merge_loads,
    buffer_bytes=_buffer_bytes,
    moves_kv=False,
)
BY_QUERY: dict[Query, Algorithm] = {"replicated": ALL_MERGE, "sharded": PASS_Q}

"""What does every rank have after each step, also when something goes wrong?

The simulator proves a schedule before it runs it, so it runs nothing that is broken. Here the same bound programs run
through the same executor without the proof, a snapshot of the outputs is taken after every step, and a fault may
change what a message delivers or how outputs are added up. Without a fault the results are those of the simulator.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.layout import Layout
from ringspan.program.bind import Message, Tile, bind
from ringspan.program.execute import BlockSizes, Event, RankState, Value, execute
from ringspan.program.problem import Problem, softmax_scale
from ringspan.schedule import ALL, Block, Schedule, Transfer, compile_rank
from ringspan.simulate.blockwise import Blockwise

Array = npt.NDArray[np.floating]
Deliver = Callable[[int, Transfer], tuple[int, Transfer]]
"""Which message arrives in place of the one that was sent in a step."""


class ReplayInputs(NamedTuple):
    """Whole q (heads, q tokens, dim), k and v (KV heads, tokens, dim)."""

    q: Array
    k: Array
    v: Array


class Replay(NamedTuple):
    """Outputs of the query rows, in order, after each step; rows no rank has a result for yet are 0 with lse -inf."""

    outs: list[Array]
    lses: list[Array]
    events: list[Event]

    @property
    def out(self) -> Array:
        return self.outs[-1]


class PlainSum(RankState):
    """The mistake: outputs of blocks are added without weighting them by their share of the softmax."""

    def attend(self, tile: Tile) -> None:
        """Attend the tile by itself, then add it. The log-sum-exp stays right, so only the outputs are wrong."""
        block = tile.sums[0]
        before = self.sums.pop(block, None)
        super().attend(tile)
        if before is not None:
            out, lse = self.sums[block]
            out += before[0]
            lse[...] = np.logaddexp(lse, before[1])


def as_sent(step: int, transfer: Transfer) -> tuple[int, Transfer]:
    """Deliver every message as it was sent."""
    return step, transfer


def replay(
    schedule: Schedule,
    problem: Problem,
    inputs: ReplayInputs,
    *,
    state: type[RankState] = RankState,
    deliver: Deliver = as_sent,
) -> Replay:
    """Run a forward schedule on all ranks in lockstep. Shards have equal lengths where `deliver` swaps messages."""
    arithmetic = Blockwise(np.result_type(inputs.q.dtype, np.float32), softmax_scale(None, inputs.q.shape[-1]))
    network = _ReplayNetwork(deliver)
    sizes = BlockSizes(problem.world_size, problem.block_shapes)
    events: list[Event] = []
    owner_of_q = ALL if problem.layout.replicated else None
    states = [state(rank, sizes, _blocks_of(rank, problem, inputs), arithmetic) for rank in range(problem.world_size)]
    runs = [execute(bind(compile_rank(schedule, one.rank), problem), one, network, events.append) for one in states]
    snapshots = []
    for _ in range(schedule.num_steps):
        for run in runs:
            next(run)
        snapshots.append(_snapshot(states, problem.layout, owner_of_q, inputs))
    for run in runs:
        for _ in run:
            raise AssertionError("a program exchanges once in each step")
    snapshots.append(_snapshot(states, problem.layout, owner_of_q, inputs))
    outs, lses = zip(*snapshots[1:], strict=True)
    return Replay(list(outs), list(lses), events)


class _ReplayNetwork:
    """Messages by step and transfer; `deliver` decides which message arrives."""

    def __init__(self, deliver: Deliver) -> None:
        self.deliver = deliver
        self.messages: dict[tuple[int, Transfer], Value] = {}

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:  # noqa: ARG002
        for message, value in sends:
            self.messages[step, message.transfer] = value

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        return self.messages[self.deliver(step, transfer)]

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Do nothing: messages are passed by reference."""

    def release(self, value: Value, /) -> None:
        """Do nothing: there are no buffers to reuse."""


def _blocks_of(rank: int, problem: Problem, inputs: ReplayInputs) -> dict[Block, Value]:
    q = problem.layout.shard(inputs.q, rank, -2)
    kv = tuple(problem.kv_layout.shard(x, rank, -2) for x in (inputs.k, inputs.v))
    return {Block("q", ALL if problem.layout.replicated else rank): (q,), Block("kv", rank): kv}


def _snapshot(states: list[RankState], layout: Layout, owner: int | None, inputs: ReplayInputs) -> tuple[Array, Array]:
    outs, lses = [], []
    dtype = np.result_type(inputs.q.dtype, np.float32)
    for state in states:
        held = state.sums.get(Block("out", state.rank if owner is None else owner))
        rows = (inputs.q.shape[0], layout.shard_len(state.rank))
        outs.append(np.zeros((*rows, inputs.v.shape[-1]), dtype) if held is None else held[0].copy())
        lses.append(np.full((*rows, 1), -np.inf, dtype) if held is None else held[1].copy())
    return layout.unshard(outs, -2), layout.unshard(lses, -2)[..., 0]

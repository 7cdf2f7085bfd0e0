"""How does one rank run attention for real: with tensors, a kernel and a transport?

The bound program and the executor are those of the simulator; `arithmetic.py` and `wire.py` add what they leave open.
What a signature needs is prepared once and cached, so that a repeated call only walks its program.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from ringspan.algorithms import Direction, Mesh, Side, build_schedule
from ringspan.kernels.base import Gradients, Merged
from ringspan.kernels.softmax import Partial
from ringspan.layout import Layout
from ringspan.program.bind import BoundProgram, LocalRows, Problem, bind, local_rows
from ringspan.program.execute import Arithmetic, Event, RankState, Value, Wire, execute
from ringspan.program.reproducible.bind import Growth, bind_grid
from ringspan.program.reproducible.state import TreeState
from ringspan.schedule import ALL, Block, Schedule, compile_rank, validate, visible_blocks


class Prepared(NamedTuple):
    """All that one signature needs on one rank; `growth` where sums are trees."""

    problem: Problem
    schedule: Schedule
    program: BoundProgram
    growth: Growth | None = None

    def state(self, rank: int, inputs: dict[Block, Value], arithmetic: Arithmetic) -> RankState:
        """What the rank holds when it begins."""
        if self.growth is None:
            return RankState(rank, self.problem, inputs, arithmetic)
        return TreeState(rank, self.problem, inputs, arithmetic, self.growth)


@lru_cache(maxsize=256)
def prepare(
    problem: Problem,
    rank: int,
    algorithm: str,
    mesh: Mesh | None,
    direction: Direction | None,
    backward: Side | None = None,
    at_once: int | None = None,
) -> Prepared:
    """Build, prove, compile and bind the schedule of a signature.

    With `at_once` sums are trees over the tiles of the grid, and a kernel call takes up to so many tiles of queries.
    """
    visible = visible_blocks(problem.mask, problem.layout, problem.kv_layout)
    schedule = build_schedule(
        algorithm,
        visible,
        heads=problem.shapes.heads,
        mesh=mesh,
        direction=direction,
        backward=backward,
        route="follow" if at_once is None else "straight",
    )
    validate(schedule, visible)
    if at_once is not None:
        return Prepared(problem, schedule, *bind_grid(schedule, rank, problem, at_once))
    return Prepared(problem, schedule, bind(compile_rank(schedule, rank), problem))


def run_forward(
    prepared: Prepared,
    q: torch.Tensor,
    *kv: torch.Tensor,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Partial:
    """This rank's out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq), in the accumulator type.

    `kv` is k and v, or the four tensors that stand for them if they are encoded.
    """
    inputs = {Block("q", rank): (q,)} | _kv_inputs(prepared.problem.kv_layout, rank, *kv)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    out, lse = state.sum(Block("out", rank))
    return Partial(out, lse.squeeze(-1))


def run_backward(
    prepared: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    *,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Gradients:
    """This rank's dq, dk and dv, in the accumulator type; those of replicated keys are its own share of the sum."""
    dout, out, lse = merged
    # The weights of a row that sees nothing are 0, by an lse of +inf; one whose scores reach +inf has none.
    lse = lse.masked_fill(lse == torch.inf, torch.nan).masked_fill_(lse == -torch.inf, torch.inf)
    queries = (q, dout, out, lse.unsqueeze(-1))
    layout = prepared.problem.kv_layout
    inputs = {Block("q_grad", rank): queries} | _kv_inputs(layout, rank, k, v)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    (dq,) = state.sum(Block("dq", rank))
    dkv = state.sum(Block("dkv", rank))
    if layout.replicated:
        dkv = _join(local_rows(layout, rank), dkv, state.sum(Block("dkv", ALL)))
    return Gradients(dq, *dkv)


def _kv_inputs(layout: Layout, rank: int, *kv: torch.Tensor) -> dict[Block, Value]:
    if not layout.replicated:
        return {Block("kv", rank): kv}
    own, replicated = local_rows(layout, rank)
    return {
        Block("kv", rank): tuple(x[..., own, :] for x in kv),
        Block("kv", ALL): tuple(x[..., replicated, :] for x in kv),
    }


def _join(rows: LocalRows, own: Value, replicated: Value) -> Value:
    """A rank's shard of a block of its own and the one that all ranks hold."""

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(*x.shape[:-2], x.shape[-2] + y.shape[-2], x.shape[-1])
        whole[..., rows.own, :], whole[..., rows.replicated, :] = x, y
        return whole

    return tuple(map(joined, own, replicated))

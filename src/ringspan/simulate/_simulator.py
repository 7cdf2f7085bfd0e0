"""What does every rank do and hold, step by step, and what is the result? All ranks in one process, in NumPy.

The simulator runs the same bound programs as the runtime, through the same executor, all ranks in lockstep; a
dictionary is the network. Results are exact to rounding, and no array of seq_len × seq_len is allocated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.algorithms import Direction, Side, as_mesh
from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.arguments import FLAG, TEXT, check_arguments, instance_of, optional
from ringspan.errors import ScheduleError, ShapeError
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.bind import Message
from ringspan.program.execute import Event, RankState, Value, execute
from ringspan.program.prepare import DEFAULT, REPRODUCIBLE, ProgramOptions, build, prepare_ranks
from ringspan.program.problem import Problem, Scores, Shapes, check_kinds, check_scores, local_rows
from ringspan.schedule import ALL, Block, Heads, Schedule, Transfer
from ringspan.simulate.blockwise import Blockwise

Array = npt.NDArray[np.floating]
_SCHEDULE = instance_of(Schedule, "that of rs.schedule.build_schedule")


class RankStep(NamedTuple):
    """One rank's blocks and events in one step."""

    rank: int
    step: int
    held: tuple[Block, ...]
    events: tuple[Event, ...]
    lse: Array | None
    """(..., heads, seq), of the rank's own queries after the step; None in a backward pass."""

    @property
    def attended(self) -> tuple[Event, ...]:
        """The computed tiles, with coverage and visible pairs."""
        return tuple(event for event in self.events if event.action == "attend")

    @property
    def sent(self) -> tuple[Event, ...]:
        """The sent messages, with peer and bytes."""
        return tuple(event for event in self.events if event.action == "send")


Trace = tuple[tuple[RankStep, ...], ...]
"""trace[step][rank]"""


def bytes_sent(trace: Trace) -> int:
    """Bytes of all messages."""
    return sum(event.nbytes for step in trace for of_rank in step for event in of_rank.sent)


class Gradients(NamedTuple):
    """Gradients of q, k and v, with the schedule and trace that made them."""

    dq: Array
    dk: Array
    dv: Array
    schedule: Schedule
    trace: Trace


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Simulation:
    """The result of a forward pass with its schedule and trace.

    out is (..., heads, seq, v_head_dim), lse (..., heads, seq).
    """

    out: Array
    lse: Array
    schedule: Schedule
    trace: Trace
    case: "Case"

    def __repr__(self) -> str:
        return f"<Simulation: out {self.out.shape} {self.out.dtype} by {self.schedule!r}>"

    def _repr_html_(self) -> str:
        told = (
            f"Attention on {self.schedule.world_size} ranks: out {self.out.shape} {self.out.dtype}, "
            f"{bytes_sent(self.trace):,} bytes sent in {self.schedule.num_steps} steps"
        )
        return f"<p>{told}</p>{self.case.problem.layout._repr_html_()}{self.schedule._repr_html_()}"

    def gradients(self, dout: Array, schedule: Schedule | None = None) -> Gradients:
        """The backward pass for `dout`: by the same algorithm with the lighter side moving, or by `schedule`."""
        check_arguments(schedule=(optional(_SCHEDULE), schedule))
        if schedule is None:
            schedule = self.case.schedule(self.case.problem.lighter_side())
        return _simulate_backward(self, dout, schedule)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """The arguments of a simulation."""

    q: Array
    k: Array
    v: Array
    problem: Problem
    scores: Scores
    algorithm: str | Schedule
    direction: Direction | None
    mesh: tuple[int, int] | None
    reproducible: bool

    def schedule(self, backward: Side | None = None) -> Schedule:
        """The schedule of the algorithm, or the given one."""
        if isinstance(self.algorithm, Schedule):
            if backward is not None:
                raise ScheduleError(
                    "the forward pass ran a custom schedule, so its backward schedule is not known",
                    argument="schedule",
                    value=None,
                    remedy="pass gradients(dout, schedule=…)",
                )
            return self.algorithm
        return build(self.problem, self.algorithm, self.options(backward))

    def options(self, backward: Side | None = None) -> ProgramOptions:
        """The options of a program besides its algorithm."""
        mode = REPRODUCIBLE if self.reproducible else DEFAULT
        return ProgramOptions(as_mesh(self.mesh), self.direction, backward, mode)


def simulate_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    layout: Layout,
    kv_layout: Layout | None = None,
    algorithm: str | Schedule = DEFAULT_ALGORITHM,
    direction: Direction | None = None,
    mesh: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    reproducible: bool = False,
) -> Simulation:
    """Attention of whole arrays (..., heads, seq, dim) or (seq, dim), sharded over the ranks of the layout.

    Row i of q is the i-th position of `layout`, row j of k and v the j-th of `kv_layout` (by default the same).
    `algorithm` is a name or any Schedule; it is proved to compute exactly the visible pairs before it runs. `softcap`
    caps the scores: s becomes softcap · tanh(s / softcap). With `reproducible` the results have the same bits for any
    number of ranks.
    """
    check_arguments(
        kv_layout=(optional(instance_of(Layout, "zigzag(1000, 4)")), kv_layout),
        direction=(optional(TEXT), direction),
        reproducible=(FLAG, reproducible),
    )
    check_kinds(mask, layout, kv_layout or layout)
    if isinstance(algorithm, Schedule):
        _refuse_options(direction=direction, mesh=mesh)
    q, k, v = (_check_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    problem = Problem(mask, layout, kv_layout or layout, _check_shapes(q, k, v, layout, kv_layout or layout))
    scores = check_scores(scale, softcap, q.shape[-1])
    case = Case(q, k, v, problem, scores, algorithm, direction, mesh, reproducible)
    return _simulate_forward(case)


def _refuse_options(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise ScheduleError(
                "algorithm is a schedule, which has its own",
                argument=name,
                value=value,
                remedy="leave it out, or name an algorithm",
            )


def _simulate_forward(case: Case) -> Simulation:
    schedule = case.schedule()
    layout = case.problem.layout
    has_replicated_query = _has_replicated_query(schedule, layout)

    def inputs(rank: int) -> dict[Block, Value]:
        queries = (_with_heads(layout.shard(case.q, rank, -2)),)
        return {Block("q", ALL if has_replicated_query else rank): queries} | _kv_inputs(case, rank)

    states, trace = _run(schedule, case, inputs, backward=False)
    results = [state.sum(Block("out", ALL if has_replicated_query else state.rank)) for state in states]
    out, lse = (layout.unshard([result[i] for result in results], -2) for i in (0, 1))
    if case.q.ndim == 2:
        out, lse = out[0], lse[0]
    return Simulation(out.astype(case.q.dtype), lse[..., 0], schedule, trace, case)


def _simulate_backward(forward: Simulation, dout: Array, schedule: Schedule) -> Gradients:
    case, layout = forward.case, forward.case.problem.layout
    dout = _check_array("dout", dout)
    if dout.shape != forward.out.shape:
        raise ShapeError(
            "out has another shape", argument="dout.shape", value=dout.shape, remedy=f"give {forward.out.shape}"
        )

    def inputs(rank: int) -> dict[Block, Value]:
        arrays = [layout.shard(x, rank, -2) for x in (case.q, dout, forward.out, forward.lse[..., None])]
        if rank > 0 and layout.replicated:
            # Every rank computes the replicated queries; their gradient counts once, on rank 0.
            arrays[1] = arrays[1].copy()
            arrays[1][..., local_rows(layout, rank).replicated, :] = 0
        return {Block("q_grad", rank): tuple(map(_with_heads, arrays))} | _kv_inputs(case, rank)

    states, trace = _run(schedule, case, inputs, backward=True)
    dq = layout.unshard([state.sum(Block("dq", state.rank))[0] for state in states], -2)
    dk, dv = (_unshard_keys(states, case.problem.kv_layout, i) for i in (0, 1))
    if case.q.ndim == 2:
        dq, dk, dv = dq[0], dk[0], dv[0]
    return Gradients(dq.astype(case.q.dtype), dk.astype(case.k.dtype), dv.astype(case.v.dtype), schedule, trace)


class _Network:
    """Messages by step and transfer; lockstep guarantees that a message is sent before it is received."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, Transfer], Value] = {}

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:  # noqa: ARG002
        for message, value in sends:
            self.messages[step, message.transfer] = value

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        return self.messages.pop((step, transfer))

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Do nothing: messages are passed by reference."""

    def release(self, value: Value, /) -> None:
        """Do nothing: there are no buffers to reuse."""


def _run(
    schedule: Schedule, case: Case, inputs: Callable[[int], dict[Block, Value]], *, backward: bool
) -> tuple[list[RankState], Trace]:
    problem = case.problem
    if schedule.is_backward != backward and any(any(step.attends) for step in schedule.steps):
        found, wanted = ("backward", "forward") if schedule.is_backward else ("forward", "backward")
        raise ScheduleError(f"this is a {found} schedule", argument="schedule", remedy=f"build a {wanted} one")
    if schedule.heads not in (None, problem.shapes.heads):
        raise ScheduleError(
            f"it splits {tuple(schedule.heads)} heads, and the arrays have {tuple(problem.shapes.heads)}",
            argument="schedule",
            remedy="build it for the heads of the arrays",
        )
    prepared = prepare_ranks(problem, schedule, case.options())
    arithmetic = Blockwise(np.result_type(case.q.dtype, np.float32), *case.scores)
    network = _Network()
    events: list[Event] = []
    states = [own.state(rank, inputs(rank), arithmetic) for rank, own in enumerate(prepared)]
    runs = [execute(own.program, state, network, events.append) for own, state in zip(prepared, states, strict=True)]
    held, lses = [], []
    for _ in range(schedule.num_steps):
        for run in runs:
            next(run)
        held.append([set(state.inputs) for state in states])
        lses.append([_lse(state) for state in states])
    for run in runs:
        for _ in run:
            raise AssertionError("a program exchanges once in each step")
    lses.append([_lse(state) for state in states])
    return states, _trace(events, held, lses[1:])


def _trace(events: list[Event], held: list[list[set[Block]]], lses: list[list[Array | None]]) -> Trace:
    done: list[list[list[Event]]] = [[[] for _ in of_step] for of_step in held]
    for event in events:
        done[event.step][event.rank].append(event)
        if event.action == "attend":
            held[event.step][event.rank].update(event.blocks)
    return tuple(
        tuple(
            RankStep(rank, t, tuple(sorted(held[t][rank], key=str)), tuple(done[t][rank]), lses[t][rank])
            for rank in range(len(held[t]))
        )
        for t in range(len(held))
    )


def _lse(state: RankState) -> Array | None:
    for owner in (ALL, state.rank):
        if (out := state.sums.get(Block("out", owner))) is not None:
            lse: Array = out[1][..., 0].copy()
            return lse
    return None


def _has_replicated_query(schedule: Schedule, layout: Layout) -> bool:
    owners = {q.owner for step in schedule.steps for attends in step.attends for attend in attends for q in attend.qs}
    if ALL in owners and any(layout.spans_by_rank):
        raise ScheduleError(
            "it attends q*, queries that every rank holds, and the layout shards the queries",
            argument="schedule",
            remedy="use a layout with replicated positions only",
        )
    return ALL in owners


def _kv_inputs(case: Case, rank: int) -> dict[Block, Value]:
    """This rank's own keys and values, and the replicated ones."""
    layout = case.problem.kv_layout
    whole = tuple(_with_heads(layout.shard(x, rank, -2)) for x in (case.k, case.v))
    if not layout.replicated:
        return {Block("kv", rank): whole}
    own, replicated = local_rows(layout, rank)
    return {
        Block("kv", rank): tuple(x[..., own, :] for x in whole),
        Block("kv", ALL): tuple(x[..., replicated, :] for x in whole),
    }


def _unshard_keys(states: list[RankState], layout: Layout, i: int) -> Array:
    """All of dk (i = 0) or dv (i = 1); parts of replicated keys are summed over the ranks."""
    replicated = sum(state.sum(Block("dkv", ALL))[i] for state in states)
    parts = []
    for state in states:
        own = state.sum(Block("dkv", state.rank))[i]
        part = np.empty((*own.shape[:-2], layout.shard_len(state.rank), own.shape[-1]), own.dtype)
        rows = local_rows(layout, state.rank)
        part[..., rows.own, :], part[..., rows.replicated, :] = own, replicated
        parts.append(part)
    return layout.unshard(parts, -2)


def _with_heads(x: Array) -> Array:
    """Add a heads dim to (seq, dim)."""
    return x[None] if x.ndim == 2 else x


def _check_array(name: str, x: npt.ArrayLike) -> Array:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"expected an array: {error}", argument=name, remedy="give a NumPy array") from None
    if array.dtype not in (np.float16, np.float32, np.float64) or array.ndim < 2:
        raise ShapeError(
            f"it has shape {array.shape} and dtype {array.dtype}",
            argument=name,
            remedy="give a float16, float32 or float64 array of shape (seq, dim) or (..., heads, seq, dim)",
        )
    return array


def _check_shapes(q: Array, k: Array, v: Array, layout: Layout, kv_layout: Layout) -> Shapes:
    shapes = f"q.shape={q.shape}, k.shape={k.shape}, v.shape={v.shape}"
    if not q.ndim == k.ndim == v.ndim or not q.dtype == k.dtype == v.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ShapeError(
            f"{shapes} with dtypes {dtypes}: q, k and v must have as many dims as each other and one dtype"
        )
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"{shapes}: batch dims must be equal, and k and v must agree in all but the last dim")
    if q.shape[-1] != k.shape[-1] or not q.shape[-1]:
        raise ShapeError(f"{shapes}: q and k must have the same head_dim, at least 1")
    heads = Heads(q.shape[-3], k.shape[-3]) if q.ndim > 2 else Heads(1, 1)
    if not heads.num_heads or not heads.num_kv_heads or heads.num_heads % heads.num_kv_heads:
        raise ShapeError(
            f"{shapes}: the {heads.num_heads} query heads must be a multiple of the {heads.num_kv_heads} KV heads"
        )
    for name, x, of in (("q", q, layout), ("k", k, kv_layout)):
        if x.shape[-2] != of.num_positions:
            raise ShapeError(
                f"its layout has {of.num_positions} positions",
                argument=f"{name}.shape",
                value=x.shape,
                remedy="give one row for each",
            )
    sum_itemsize = np.result_type(q.dtype, np.float32).itemsize
    return Shapes(q.shape[:-3], heads, q.shape[-1], v.shape[-1], q.dtype.itemsize, sum_itemsize)

"""What does each rank hold, compute and send for one long sequence, and is the result right?

In the reproducible mode also: are the bits those of one device, and what does that cost?
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ringspan.algorithms.choose import DEFAULT_ALGORITHM, KV_RING
from ringspan.layout import Layout, Work, contiguous
from ringspan.program.prepare import DEFAULT, build
from ringspan.program.problem import Problem
from ringspan.program.reproducible.bind import bind_grid
from ringspan.schedule import Block, format_schedule
from ringspan.simulate._simulator import RankStep, Simulation, bytes_sent, simulate_attention
from ringspan.simulate.lesson.dense import TOLERANCE, Array, Check, check, dense_attention
from ringspan.simulate.lesson.settings import LayoutChoice, LessonSettings


@dataclass(frozen=True, slots=True)
class Bits:
    """A run in reproducible mode compared with one device; bytes count all messages."""

    digest: str  # of the bits of out and lse
    is_same: bool
    pending_nodes: int  # the largest number of pending nodes of one tile of a sum on any rank
    sent_bytes_by_default: int  # in the default mode, which sends sums instead of nodes


def digest_bits(simulation: Simulation) -> str:
    """Hash every bit of out and lse to a few characters."""
    found = hashlib.blake2b(digest_size=6)
    for x in (simulation.out, simulation.lse):
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def compare_bits(simulation: Simulation, alone: Simulation) -> Bits:
    case, problem = simulation.case, simulation.case.problem
    grown = [bind_grid(simulation.schedule, rank, problem) for rank in range(problem.world_size)]
    assert isinstance(case.algorithm, str)
    by_default = build(problem, case.algorithm, case.options()._replace(mode=DEFAULT))
    return Bits(
        digest=digest_bits(simulation),
        is_same=digest_bits(simulation) == digest_bits(alone),  # -0.0 has other bits than 0.0
        pending_nodes=max(growth.pending for _, growth in grown),
        sent_bytes_by_default=sum(
            problem.block_bytes(transfer.block) for step in by_default.steps for transfer in step.transfers
        ),
    )


SAMPLE = 4  # number of reference values to print


@dataclass(frozen=True, slots=True)
class Tokens:
    """q (heads, seq, dim), k and v (kv_heads, seq, dim) of some positions, float32."""

    q: Array
    k: Array
    v: Array

    @classmethod
    def random(cls, settings: LessonSettings, num_tokens: int, rng: np.random.Generator) -> "Tokens":
        heads = (settings.num_heads, settings.num_kv_heads, settings.num_kv_heads)
        return cls(*(rng.standard_normal((n, num_tokens, settings.head_dim), dtype=np.float32) for n in heads))

    def then(self, more: "Tokens") -> "Tokens":
        pairs = ((self.q, more.q), (self.k, more.k), (self.v, more.v))
        return Tokens(*(np.concatenate(pair, axis=1) for pair in pairs))


@dataclass(frozen=True, slots=True)
class LessonShard:
    """The positions that a rank holds; `spans` is the short form."""

    rank: int
    spans: tuple[str, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayoutWork:
    """Visible (query, key) pairs under a layout: by rank, and by [ring step][rank] in pass-KV."""

    layout: str
    pairs_per_rank: tuple[int, ...]
    pairs_per_step: tuple[tuple[int, ...], ...]
    imbalance: float  # time over ideal time of a ring that waits for its busiest rank at every step


@dataclass(frozen=True, slots=True)
class Reference:
    """The dense float64 result, and the error of plain float32 attention."""

    visible_pairs: int
    all_pairs: int
    out_shape: tuple[int, ...]
    out_sample: tuple[float, ...]  # the first values of head 0 at the last position
    float32_error: float | None
    tolerance: float


@dataclass(frozen=True, slots=True)
class Attended:
    q: str
    kv: str
    coverage: str
    pairs: int


@dataclass(frozen=True, slots=True)
class SentBytes:
    block: str
    dst: int
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class TraceCell:
    """The blocks that a rank held, the tiles it computed and the messages it sent in one step."""

    rank: int
    held: tuple[str, ...]
    attends: tuple[Attended, ...]
    sends: tuple[SentBytes, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """All messages of one kind (q, kv, out) in a run; `shapes` and `bytes_per_element` describe a largest one."""

    kind: str
    num_messages: int
    smallest_bytes: int
    largest_bytes: int
    total_bytes: int
    shapes: tuple[tuple[int, ...], ...]
    bytes_per_element: int


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm: its schedule, its trace, and the difference of its result from the reference."""

    algorithm: str
    num_steps: int
    grid: str
    steps: tuple[tuple[TraceCell, ...], ...]
    traffic: tuple[Traffic, ...]
    sent_bytes: int
    sent_bytes_per_rank: tuple[int, ...]
    largest_rank_step_bytes: int
    check: Check
    bits: Bits | None  # in reproducible mode only


@dataclass(frozen=True, slots=True)
class Meeting:
    """One query and one block of keys, with the block's share of the query's softmax weight."""

    step: int
    kv_owner: int
    weight_fraction: float


@dataclass(frozen=True, slots=True)
class OneQuery:
    """How the output of one query is merged in pass-KV; `added_error` is the error of adding its parts unweighted."""

    position: int
    rank: int
    head: int
    meetings: tuple[Meeting, ...]
    added_error: float


@dataclass(frozen=True, slots=True)
class Prefill:
    shards: tuple[LessonShard, ...]
    work: tuple[LayoutWork, ...]
    reference: Reference
    runs: tuple[Run, ...]
    one_query: OneQuery | None
    one_device_digest: str | None  # in reproducible mode only: `Bits.digest` of one device


def run_prefill(settings: LessonSettings, tokens: Tokens, progress: Callable[[str], None]) -> Prefill:
    """Run every chosen algorithm on the tokens and compare it with the dense reference."""
    layout = settings.build_layout(settings.layout)
    positions = np.arange(settings.seq_len)
    arrays = (tokens.q, tokens.k, tokens.v, settings.mask, positions, positions)
    progress("dense reference")
    truth = dense_attention(*arrays, np.float64)
    float32 = check(*dense_attention(*arrays, np.float32), *truth)
    runs, one_query, alone = [], None, None
    if settings.reproducible:
        progress("one device")
        alone = _simulate(settings, tokens, contiguous(settings.seq_len, 1), DEFAULT_ALGORITHM)
    for algorithm in settings.algorithms:
        progress(algorithm)
        simulation = _simulate(settings, tokens, layout, algorithm)
        bits = None if alone is None else compare_bits(simulation, alone)
        runs.append(_run(algorithm, simulation, check(simulation.out, simulation.lse, *truth), bits))
        if algorithm == KV_RING:
            one_query = _follow_one_query(simulation, *truth)
    work = tuple(_work(settings, choice) for choice in _compared(settings.layout))
    return Prefill(
        shards=tuple(_shard(layout, rank) for rank in range(settings.world_size)),
        work=work,
        reference=Reference(
            visible_pairs=sum(work[0].pairs_per_rank),
            all_pairs=settings.seq_len**2,
            out_shape=truth[0].shape,
            out_sample=tuple(truth[0][0, -1, :SAMPLE].tolist()),
            float32_error=float32.out_error,
            tolerance=TOLERANCE,
        ),
        runs=tuple(runs),
        one_query=one_query,
        one_device_digest=None if alone is None else digest_bits(alone),
    )


def _simulate(settings: LessonSettings, tokens: Tokens, layout: Layout, algorithm: str) -> Simulation:
    return simulate_attention(
        tokens.q,
        tokens.k,
        tokens.v,
        mask=settings.mask,
        layout=layout,
        algorithm=algorithm,
        reproducible=settings.reproducible,
        **settings.options(algorithm),  # type: ignore[arg-type]
    )


def _shard(layout: Layout, rank: int) -> LessonShard:
    return LessonShard(rank, tuple(map(str, layout.spans_by_rank[rank])), tuple(layout.positions(rank).tolist()))


def _compared(chosen: LayoutChoice) -> tuple[LayoutChoice, ...]:
    """Return the chosen layout with contiguous and zigzag, for comparison."""
    return tuple(dict.fromkeys((LayoutChoice("contiguous"), LayoutChoice("zigzag"), chosen)))


def _work(settings: LessonSettings, choice: LayoutChoice) -> LayoutWork:
    work = settings.build_layout(choice).work(settings.mask)
    per_rank, per_step = work.per_rank, work.per_step
    if settings.direction == "reverse":
        # With the ranks in reverse order (r becomes P-1-r), a reverse ring is a forward ring.
        work = Work(work.pairs[::-1, ::-1])
        per_step = work.per_step[:, ::-1]
    return LayoutWork(str(choice), tuple(per_rank.tolist()), tuple(map(tuple, per_step.tolist())), work.imbalance)


def _run(algorithm: str, simulation: Simulation, result: Check, bits: Bits | None) -> Run:
    sent = [[sum(event.nbytes for event in cell.sent) for cell in step] for step in simulation.trace]
    return Run(
        algorithm=algorithm,
        num_steps=simulation.schedule.num_steps,
        grid=format_schedule(simulation.schedule),
        steps=tuple(tuple(map(_trace_cell, step)) for step in simulation.trace),
        traffic=count_traffic(simulation),
        sent_bytes=bytes_sent(simulation.trace),
        sent_bytes_per_rank=tuple(map(sum, zip(*sent, strict=True))),
        largest_rank_step_bytes=max(map(max, sent)),
        check=result,
        bits=bits,
    )


def _trace_cell(cell: RankStep) -> TraceCell:
    return TraceCell(
        rank=cell.rank,
        held=tuple(map(str, cell.held)),
        attends=tuple(
            Attended(str(tile.blocks[0]), str(tile.blocks[1]), tile.coverage.value, tile.pairs)
            for tile in cell.attended
            if tile.coverage is not None
        ),
        sends=tuple(
            SentBytes(str(message.blocks[0]), message.peer, message.nbytes)
            for message in cell.sent
            if message.peer is not None
        ),
    )


def count_traffic(simulation: Simulation) -> tuple[Traffic, ...]:
    """Count the messages of a run by kind, in the order of first appearance."""
    by_kind: dict[str, list[tuple[int, Block]]] = {}
    for step in simulation.trace:
        for cell in step:
            for message in cell.sent:
                block = message.blocks[0]
                by_kind.setdefault(block.kind, []).append((message.nbytes, block))
    return tuple(_traffic(kind, messages, simulation.case.problem) for kind, messages in by_kind.items())


def _traffic(kind: str, messages: list[tuple[int, Block]], problem: Problem) -> Traffic:
    sizes = [nbytes for nbytes, _ in messages]
    nbytes, largest = max(messages, key=lambda message: message[0])
    # A part of a sum may travel as several nodes with the same rows.
    times = Fraction(nbytes, problem.block_bytes(largest) or 1)
    return Traffic(
        kind=kind,
        num_messages=len(messages),
        smallest_bytes=min(sizes),
        largest_bytes=max(sizes),
        total_bytes=sum(sizes),
        shapes=tuple((*shape[:-2], int(times * shape[-2]), shape[-1]) for shape in problem.block_shapes(largest)),
        bytes_per_element=problem.shapes.sum_itemsize if largest.is_sum else problem.shapes.itemsize,
    )


def _follow_one_query(simulation: Simulation, true_out: Array, true_lse: Array) -> OneQuery | None:
    """Follow one query through pass-KV in head 0: the last of the queries that see the most blocks."""
    case = simulation.case
    mask, layout, head = case.problem.mask, case.problem.layout, 0
    positions = np.arange(true_lse.shape[-1])
    owners = range(layout.world_size)
    num_met = sum(mask.allowed(positions, layout.positions(owner)).any(axis=1).astype(int) for owner in owners)
    if not np.any(num_met):
        return None
    position = int(np.flatnonzero(num_met == np.max(num_met))[-1])
    rank = next(rank for rank in range(layout.world_size) if position in layout.positions(rank))
    meetings, added = [], np.zeros(true_out.shape[-1])
    for cell in (step[rank] for step in simulation.trace if step[rank].attended):
        owner = cell.attended[0].blocks[1].owner
        keys = layout.positions(owner)
        one = case.q[:1, position : position + 1], case.k[:1, keys], case.v[:1, keys]
        out, lse = dense_attention(*one, mask, np.array([position]), keys, np.float64)
        if np.isneginf(lse[0, 0]):
            continue  # only other queries of the rank see this block
        meetings.append(Meeting(cell.step, owner, float(np.exp(lse[0, 0] - true_lse[head, position]))))
        added += out[0, 0]
    return OneQuery(position, rank, head, tuple(meetings), float(np.abs(added - true_out[head, position]).max()))

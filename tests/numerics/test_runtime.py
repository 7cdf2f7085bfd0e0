"""How does the runtime run a schedule: what does it record and send, and when does it reuse a buffer?"""

import math
import time
from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
import ringspan.kernels.choose
import ringspan.runtime.arithmetic
from ringspan.kernels.base import KernelGradients, Merged
from ringspan.kernels.reference import ReferenceKernel
from ringspan.kernels.softmax import Partial, merge_
from ringspan.program.execute import Event
from ringspan.program.pieces import Piece, PieceKind
from ringspan.program.problem import Problem, Shapes
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.transports.base import CountingTransport
from ringspan.transports.in_process import InProcessRank
from support.attention_cases import Job, check_gradients, job_of_case, lse_dtype, make_job, options_of, run, run_both
from support.cases import ROWS, make_mask, select

HEADS = rs.Heads(8, 2)
CAUSAL = ("causal",)

each_algorithm = pytest.mark.parametrize("algorithm", [row.algorithm for row in ROWS])


def record(job: Job, **options: Any) -> list[list[Event]]:
    def attend(group: InProcessRank) -> list[Event]:
        events: list[Event] = []
        job.attend(group, group.rank, record=events.append, **options)
        return events

    return rs.run_in_process(attend, job.layout.world_size)


@each_algorithm
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_the_recorded_events_are_those_of_the_simulator(
    subtests: pytest.Subtests, algorithm: str, world_size: int
) -> None:
    cases = select(algorithm=algorithm, world_size=world_size)[::5]
    for case in cases:
        with subtests.test(str(case)):
            job = job_of_case(case, torch.float32)
            simulation = rs.simulate_attention(
                *(x.numpy() for x in (job.q, job.k, job.v)),
                mask=make_mask(case.spec),
                layout=job.layout,
                **case.options,
            )
            simulated = [
                [event for step in simulation.trace for event in step[rank].events] for rank in range(world_size)
            ]
            assert record(job) == simulated, case
            assert any(simulated), case


def test_auto_is_pass_kv() -> None:
    job = make_job("auto", CAUSAL, rs.zigzag(24, 3), HEADS)
    assert record(job, algorithm="auto") == record(job, algorithm="pass_kv")


@each_algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_bytes_on_the_wire_are_those_of_the_schedule(
    subtests: pytest.Subtests, algorithm: str, dtype: torch.dtype, counted: dict[int, CountingTransport]
) -> None:
    for case in [case for size in (2, 3, 4, 5) for case in select(algorithm=algorithm, world_size=size)[::7]]:
        with subtests.test(str(case)):
            job = job_of_case(case, dtype)
            run(job)
            problem = problem_of(job)
            visible = rs.schedule.visible_blocks(problem.mask, job.layout, job.layout)
            expected = np.zeros((case.world_size, case.world_size), dtype=int)
            for step in case.make_schedule(visible).steps:
                for block, src, dst in step.transfers:
                    expected[src, dst] += problem.block_bytes(block)
            got = np.array([counted[rank].bytes_sent for rank in range(case.world_size)])
            assert (got == expected).all(), case


def problem_of(job: Job) -> Problem:
    heads = rs.Heads(job.q.shape[1], job.k.shape[1])
    sum_itemsize = lse_dtype(job.q.dtype).itemsize
    shapes = Shapes((job.q.shape[0],), heads, job.q.shape[3], job.v.shape[3], job.q.element_size(), sum_itemsize)
    return Problem(make_mask(job.spec), job.layout, job.kv_layout, shapes)


def test_bytes_on_the_wire_by_hand(subtests: pytest.Subtests, counted: dict[int, CountingTransport]) -> None:
    """Full mask, 4 ranks of 6 tokens, batch 2, 8 heads over 2, dims 4 and 3, bfloat16."""
    layout = rs.contiguous(24, 4)
    kv, q, out, lse = 2 * 2 * 6 * (4 + 3) * 2, 2 * 8 * 6 * 4 * 2, 2 * 8 * 6 * 3 * 4, 2 * 8 * 6 * 4
    a_head_of_kv = kv // 2  # two ranks share each of the two KV heads
    expected = {
        "pass_kv": 3 * kv,
        "all_gather": 3 * kv,
        "double_ring": 3 * kv,
        "pass_q": 3 * q + 3 * (out + lse),
        "ulysses": 3 * (q // 4) + 3 * a_head_of_kv + 3 * (out + lse) // 4,
    }
    for algorithm, nbytes in expected.items():
        with subtests.test(algorithm):
            run(make_job("bytes", ("full",), layout, HEADS, dtype=torch.bfloat16, **options_of(algorithm, 4)))
            assert [sum(counted[rank].bytes_sent) for rank in range(4)] == [nbytes] * 4, algorithm


@each_algorithm
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_that_dawdle_at_any_point(algorithm: str, world_size: int) -> None:
    """Messages are copied when both ends are posted, so a buffer that is reused too early shows."""
    heads = HEADS if world_size == 2 else rs.Heads(5, 5)
    jobs = [
        make_job(str(i), spec, rs.zigzag(40, world_size), heads, **options_of(algorithm, world_size))
        for i, spec in enumerate((("full",), CAUSAL))
    ]

    def attend(group: InProcessRank) -> list[rs.Attention]:
        pauses = np.random.default_rng(group.rank)

        def dawdle(_: Event) -> None:
            time.sleep(pauses.choice([0.0, 0.0, 0.0005, 0.002]))

        results = []
        for job in jobs * 3:
            qkv = [x.clone() for x in job.shards(group.rank)]
            results.append(
                rs.attention(
                    *qkv,
                    mask=make_mask(job.spec),
                    layout=job.layout,
                    group=group,
                    record=dawdle,
                    return_lse=True,
                    **job.options,
                )
            )
            for x in qkv:  # after the call the inputs belong to the caller again
                x.fill_(math.nan)
        return results

    for rank, results in enumerate(rs.run_in_process(attend, world_size)):
        for job, got in zip(jobs * 3, results, strict=True):
            job.check(rank, got)


@pytest.mark.parametrize("slab_bytes", [1, 3000, 20_000])
@each_algorithm
def test_pieces_in_slabs_of_any_size(
    subtests: pytest.Subtests, algorithm: str, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", slab_bytes)
    rows = ("per_row", (CAUSAL, ("documents", (13, 24))))
    for heads in (rs.Heads(8, 8), rs.Heads(8, 4), rs.Heads(8, 1)):
        with subtests.test(heads=heads):
            for spec in (("full",), CAUSAL, rows):
                job = make_job("slabs", spec, rs.zigzag(37, 4), heads, **options_of(algorithm, 4))
                halves = make_job(
                    "halves", spec, rs.zigzag(37, 4), heads, dtype=torch.float16, **options_of(algorithm, 4)
                )
                for one in (job, halves):
                    for rank, got in enumerate(run(one)):
                        one.check(rank, got, (heads, spec))


class InTypeOfKeys(ReferenceKernel):
    """A kernel that returns the dtype it was given, like kernels for GPUs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, *operands: Any) -> Partial:
        out, lse = super().forward(q, k, *operands)
        return Partial(out.to(k.dtype), lse)

    def backward(self, q: torch.Tensor, k: torch.Tensor, *operands: Any) -> KernelGradients:
        return KernelGradients(*(x.to(k.dtype) for x in super().backward(q, k, *operands)))


@each_algorithm
def test_sums_are_wide_whatever_a_kernel_returns(
    subtests: pytest.Subtests, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    added_to = []

    def merge_and_note(into: Partial, part: Partial) -> None:
        added_to.append(into.out.dtype)
        merge_(into, part)

    def add_and_note(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> None:
        added_to.append(total.dtype)
        add(total, part, is_first)

    add = ringspan.runtime.arithmetic._add
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_add", add_and_note)
    monkeypatch.setattr(ringspan.runtime.arithmetic.TorchArithmetic, "merge_parts", staticmethod(merge_and_note))
    monkeypatch.setattr(ringspan.kernels.choose, "KERNELS", (InTypeOfKeys(),))
    for spec in (CAUSAL, ("full",)):
        with subtests.test(spec=spec):
            job = make_job("wide", spec, rs.zigzag(37, 4), HEADS, dtype=torch.bfloat16, **options_of(algorithm, 4))
            results = run_both(job)
            check_gradients(job, [gradients for _, gradients in results], algorithm, {"rtol": 0.02, "atol": 0.02})
            for rank, (got, _) in enumerate(results):
                out = job.layout.shard(job.out, rank, 2)
                torch.testing.assert_close(got.out.double(), out, rtol=0.02, atol=0.02)
    assert set(added_to) == {torch.float32}


class Noting(ReferenceKernel):
    """A kernel that keeps its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[torch.Tensor] = []

    def forward(self, q: torch.Tensor, *operands: Any) -> Partial:
        self.queries.append(q)
        return super().forward(q, *operands)


def test_own_queries_of_a_half_type_are_converted_once() -> None:
    kernel, piece = Noting(), Piece(slice(0, 8), slice(0, 8), PieceKind.FULL, None, None)
    q, *kv = torch.randn(3, 1, 2, 8, 4).bfloat16()
    arithmetic = TorchArithmetic(kernel, 0.5, q)
    own = (q,)
    out = arithmetic.begin(piece, own, tuple(kv))
    for _ in range(3):
        arithmetic.attend(piece, own, tuple(kv), out, False)
    assert {x.dtype for x in kernel.queries} == {torch.float32}
    assert len({x.data_ptr() for x in kernel.queries}) == 1


def test_own_queries_are_those_of_the_pass_they_are_asked_for() -> None:
    kernel, piece = ReferenceKernel(), Piece(slice(0, 8), slice(0, 8), PieceKind.FULL, None, None)
    q, k, v, dout = torch.randn(4, 1, 2, 8, 4).bfloat16()
    arithmetic = TorchArithmetic(kernel, 0.5, q)
    out, lse = arithmetic.begin(piece, (q,), (k, v))
    (dq,), dkv = arithmetic.attend_grad(piece, (q, dout, out, lse), (k, v), None, None)
    expected = kernel.backward(q, k, v, Merged(dout, out, lse.squeeze(-1)), piece, 0.5)
    torch.testing.assert_close((dq, *dkv), tuple(expected))


def test_queries_of_others_come_in_buffers_that_are_used_again() -> None:
    kernel, piece = Noting(), Piece(slice(0, 8), slice(0, 8), PieceKind.FULL, None, None)
    q, buffer, *kv = torch.randn(4, 1, 2, 8, 4).bfloat16()
    arithmetic = TorchArithmetic(kernel, 0.5, q)
    received = (buffer,)
    for _ in range(2):
        buffer.normal_()
        out = arithmetic.begin(piece, received, tuple(kv))
        expected = ReferenceKernel().forward(buffer, *kv, piece, 0.5)
        torch.testing.assert_close(out[0], expected.out)

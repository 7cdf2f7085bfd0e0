"""The backward pass of `rs.attention` on ranks as threads: inputs that the case table does not vary."""

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
import ringspan.runtime.arithmetic
from ringspan.program.execute import Event
from ringspan.program.problem import Problem, Shapes
from ringspan.transports.base import CountingTransport
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.attention_cases import (
    Gradients,
    Job,
    check_gradients,
    dense_sink_gradients,
    job_of_case,
    make_dout,
    make_job,
    options_of,
    run_both,
)
from support.cases import ROWS, make_mask, replicated, select

HEADS = rs.Heads(8, 2)
CAUSAL = ("causal",)

each_algorithm = pytest.mark.parametrize("algorithm", [row.algorithm for row in ROWS])


def check(job: Job, what: object = "", tolerance: dict[str, float] | None = None, **options: Any) -> None:
    check_gradients(job, [gradients for _, gradients in run_both(job, **options)], what, tolerance)


@each_algorithm
@pytest.mark.parametrize("heads", [HEADS, rs.Heads(8, 8)], ids=str)
def test_cross_attention(subtests: pytest.Subtests, algorithm: str, heads: rs.Heads) -> None:
    """More keys than queries and fewer, so that either side is the smaller one and travels."""
    for q_len, kv_len in ((11, 40), (40, 11)):
        with subtests.test(q_len=q_len, kv_len=kv_len):
            for kv_layout in (rs.contiguous(kv_len, 4), replicated(kv_len, 4)):
                layout = rs.zigzag(q_len, 4)
                job = make_job("cross", ("full",), layout, heads, kv_layout=kv_layout, **options_of(algorithm, 4))
                check(job, (q_len, kv_len))


@each_algorithm
def test_masks_by_row_and_rows_that_see_nothing(algorithm: str) -> None:
    rows = ("per_row", (CAUSAL, ("documents", (13, 24)), ("sliding_window", -2, 9)))
    check(make_job("rows", rows, rs.zigzag(37, 4), HEADS, batch=3, **options_of(algorithm, 4)))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill newly allocated memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("slab_bytes", [1, 3000, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.usefixtures("poisoned_memory")
def test_sums_that_begin_with_their_first_piece(
    subtests: pytest.Subtests, dtype: torch.dtype, slab_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are not zeroed first; with slabs smaller than a group of heads, several add to the same keys."""
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", slab_bytes)
    coarse = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else None  # a missing slab is more
    for heads in (rs.Heads(8, 8), rs.Heads(8, 2)):
        with subtests.test(heads=heads):
            for algorithm in ("pass_kv", "pass_q", "all_gather"):
                for layout in (rs.zigzag(37, 4), rs.contiguous(37, 1)):
                    job = make_job("first", CAUSAL, layout, heads, dtype=dtype)
                    check(job, (heads, layout), coarse, algorithm=algorithm)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("scale", [0.0, 0.7, -1.3])
def test_any_scale_and_kernel(kernel: str, scale: float) -> None:
    check(make_job("scale", CAUSAL, rs.zigzag(24, 3), HEADS, scale=scale), kernel=kernel)


def test_both_directions(subtests: pytest.Subtests) -> None:
    for direction in ("forward", "reverse"):
        with subtests.test(direction=direction):
            check(make_job("directions", CAUSAL, rs.zigzag(37, 4), HEADS), direction=direction)


@each_algorithm
def test_nothing_to_attend(subtests: pytest.Subtests, algorithm: str) -> None:
    for layout, kv_layout, batch in (
        (rs.zigzag(0, 2), rs.zigzag(0, 2), 2),
        (rs.zigzag(5, 2), rs.zigzag(5, 2), 0),
        (rs.zigzag(5, 2), rs.zigzag(0, 2), 1),
        (rs.zigzag(0, 2), rs.zigzag(5, 2), 1),
    ):
        with subtests.test(layout=layout, kv_layout=kv_layout, batch=batch):
            check(
                make_job(
                    "empty", ("full",), layout, HEADS, kv_layout=kv_layout, batch=batch, **options_of(algorithm, 2)
                )
            )


@each_algorithm
@pytest.mark.parametrize("world_size", [1, 3])
def test_sinks(subtests: pytest.Subtests, algorithm: str, world_size: int) -> None:
    """By autograd on the definition: a sink is one more column of scores, and its weight is dropped."""
    heads = rs.Heads(6, 3)
    for spec in (CAUSAL, ("sliding_window", -2, 9)):
        with subtests.test(spec=spec):
            job = make_job("sinks", spec, rs.zigzag(24, world_size), heads, **options_of(algorithm, world_size))
            values = torch.tensor([0.0, 1.5, -2.0, 4.0, -30.0, -math.inf], dtype=torch.float64)

            def differentiate(
                group: InProcessRank, job: Job = job, values: torch.Tensor = values
            ) -> list[torch.Tensor]:
                leaves = [x.clone().requires_grad_() for x in (*job.shards(group.rank), values)]
                out = job.attend(group, group.rank, tensors=leaves[:3], sinks=leaves[3]).out
                return list(torch.autograd.grad(out, leaves, job.layout.shard(make_dout(job), group.rank, 2)))

            parts = rs.run_in_process(differentiate, world_size)
            got = [job.layout.unshard([part[i] for part in parts], 2) for i in range(3)]
            got.append(torch.stack([part[3] for part in parts]).sum(0))
            for mine, wanted in zip(got, dense_sink_gradients(job, values), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_tokens", [200, 600])
@pytest.mark.parametrize("mask", [rs.causal(), rs.sliding_window(177, 0)], ids=str)
def test_a_score_of_infinity_makes_nan_of_all_it_has_a_part_in(mask: rs.Mask, num_tokens: int) -> None:
    """A query with such a score has an output of NaN, and the values that it sees have gradients of NaN."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, num_tokens, 8, generator=generator) for _ in range(3))
    k[0, 0, 100, 3] = math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rs.attention(*leaves, mask=mask, layout=rs.contiguous(num_tokens, 1))
    _, _, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    allowed = torch.from_numpy(mask.allowed(range(num_tokens), range(num_tokens)))
    is_lost = allowed[:, 100] & (q[0, 0, :, 3] > 0)
    assert torch.equal(out[0, 0].isnan().all(-1), is_lost)
    assert torch.equal(dv[0, 0].isnan().all(-1), (allowed & is_lost[:, None]).any(0))


@each_algorithm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_the_error_of_half_types_is_small_and_flat(
    subtests: pytest.Subtests, algorithm: str, dtype: torch.dtype
) -> None:
    """The error is at most twice that of plain attention in the dtype, and equal from 2 to 16 ranks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16, 256, 32, generator=generator).to(dtype) for _ in range(3))
    one = make_job("flat", CAUSAL, rs.zigzag(256, 1), rs.Heads(16, 16), batch=1)
    job = one._replace(q=q, k=k, v=v, out=torch.empty(1, 16, 256, 32))
    dout = make_dout(job)
    positions = job.layout.all_positions()
    arrays = (x.double().numpy() for x in (q, k, v))
    exact = oracle.dense_gradients(*arrays, oracle.dense_mask(CAUSAL, positions, positions), dout.double().numpy())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        plain = torch.autograd.grad(scaled_dot_product_attention(*leaves, is_causal=True), leaves, dout)
    allowed = [2 * error_of(mine, wanted) for mine, wanted in zip(plain, exact, strict=True)]
    at_two: list[float] = []
    for world_size in (2, 4, 8, 16):
        with subtests.test(f"{world_size}"):
            layout = rs.zigzag(256, world_size)
            spread = job._replace(layout=layout, kv_layout=layout, options=options_of(algorithm, world_size))
            parts = [gradients for _, gradients in run_both(spread)]
            errors = [
                error_of(layout.unshard([part[i] for part in parts], 2), wanted) for i, wanted in enumerate(exact)
            ]
            at_two = at_two or errors
            assert all(error <= limit for error, limit in zip(errors, allowed, strict=True)), (
                world_size,
                errors,
                allowed,
            )
            assert all(error <= 1.1 * first for error, first in zip(errors, at_two, strict=True)), (errors, at_two)


def error_of(mine: torch.Tensor, exact: np.ndarray[Any, Any]) -> float:
    """Return the root mean square."""
    return float((mine.double() - torch.from_numpy(exact)).square().mean().sqrt())


@each_algorithm
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_events_and_bytes_are_those_of_the_simulator(
    subtests: pytest.Subtests, algorithm: str, world_size: int, counted: dict[int, CountingTransport]
) -> None:
    for case in select(algorithm=algorithm, world_size=world_size)[::9]:
        with subtests.test(str(case)):
            job = job_of_case(case, torch.float32)
            recorded: list[list[Event]] = [[] for _ in range(world_size)]

            def differentiate(group: InProcessRank, job: Job = job, recorded: Any = recorded) -> Gradients:
                leaves = [x.clone().requires_grad_() for x in job.shards(group.rank)]
                out = job.attend(group, group.rank, tensors=leaves, record=recorded[group.rank].append).out
                recorded[group.rank].clear()
                counted[group.rank].bytes_sent[:] = [0] * world_size
                return Gradients(*torch.autograd.grad(out, leaves, torch.ones_like(out)))

            rs.run_in_process(differentiate, world_size)
            arrays = [x.numpy() for x in (job.q, job.k, job.v)]
            simulation = rs.simulate_attention(*arrays, mask=make_mask(case.spec), layout=job.layout, **case.options)
            gradients = simulation.gradients(np.ones_like(simulation.out))
            simulated = [
                [event for step in gradients.trace for event in step[rank].events] for rank in range(world_size)
            ]
            assert recorded == simulated, case
            problem = Problem(
                make_mask(case.spec),
                job.layout,
                job.layout,
                Shapes((job.q.shape[0],), case.heads, job.q.shape[3], job.v.shape[3], 4, 4),
            )
            expected = np.zeros((world_size, world_size), dtype=int)
            for step in gradients.schedule.steps:
                for block, src, dst in step.transfers:
                    expected[src, dst] += problem.block_bytes(block)
            assert (np.array([counted[rank].bytes_sent for rank in range(world_size)]) == expected).all(), case


def test_the_side_with_fewer_bytes_travels() -> None:
    """Many heads over few KV heads: keys travel; few keys with many heads each: queries would cost more."""

    def sent(heads: rs.Heads, q_len: int, kv_len: int) -> set[str]:
        events: list[Event] = []

        def differentiate(group: InProcessRank) -> None:
            layout, kv_layout = rs.contiguous(q_len, 2), rs.contiguous(kv_len, 2)
            job = make_job("side", ("full",), layout, heads, kv_layout=kv_layout)
            leaves = [x.clone().requires_grad_() for x in job.shards(group.rank)]
            out = job.attend(group, group.rank, tensors=leaves, record=events.append if group.rank == 0 else None).out
            events.clear()
            out.sum().backward()

        rs.run_in_process(differentiate, 2)
        return {block.kind for event in events if event.action == "send" for block in event.blocks}

    assert sent(rs.Heads(8, 1), 64, 64) == {"kv", "dkv"}
    assert sent(rs.Heads(8, 8), 4, 256) == {"q_grad", "dq"}


def test_between_the_passes_only_shards_are_kept() -> None:
    """q, k, v, out and lse of this rank are saved; nothing of sequence size, and nothing after the backward pass."""
    world_size, shard_len = 4, 64
    layout = rs.zigzag(world_size * shard_len, world_size)

    def on_rank(group: InProcessRank) -> tuple[int, bool]:
        leaves = [torch.randn(1, 8, shard_len, 16, requires_grad=True) for _ in range(3)]
        out = rs.attention(*leaves, mask=rs.causal(), layout=layout, group=group)
        saved = [x for x in out.grad_fn.saved_tensors if x is not None]
        largest = max(x.untyped_storage().nbytes() for x in saved)
        kept = weakref.ref(saved[-1])
        del saved
        out.sum().backward()
        del out
        gc.collect()
        return largest, kept() is None

    for largest, is_gone in rs.run_in_process(on_rank, world_size):
        assert largest <= 8 * shard_len * 16 * 4
        assert is_gone


@each_algorithm
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_odd_values_reach_only_what_sees_them(algorithm: str, value: float) -> None:
    """NaN in the first document must not reach a gradient of the second."""
    layout = rs.zigzag(24, 4)
    job = make_job("odd", ("documents", (10, 14)), layout, HEADS, dtype=torch.float32, **options_of(algorithm, 4))
    for x in (job.q, job.k, job.v):
        x[0, 0, 3, 1] = value
    parts = [gradients for _, gradients in run_both(job)]
    clean = job._replace(**{name: getattr(job, name)[:, :, 10:].contiguous() for name in "qkv"})
    allowed = oracle.dense_mask(("full",), np.arange(14), np.arange(14))
    arrays = (x.double().numpy() for x in (clean.q, clean.k, clean.v))
    wanted = oracle.dense_gradients(*arrays, allowed, make_dout(job)[:, :, 10:].double().numpy())
    for i, exact in enumerate(wanted):
        got = layout.unshard([part[i] for part in parts], 2)
        torch.testing.assert_close(got[:, :, 10:], torch.from_numpy(exact).float())
        assert not got[0, :, :10].isfinite().all()

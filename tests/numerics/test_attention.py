"""`rs.attention` on ranks as threads against the dense oracle: the case table, and inputs that it does not vary."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
import ringspan.runtime.session
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.attention_cases import (
    Job,
    check_gradients,
    covering_third,
    job_of,
    job_of_case,
    lse_dtype,
    make_job,
    options_of,
    run,
    run_both,
)
from support.cases import CASES, LAYOUTS, ROWS, replicated, select, wide_from
from support.oracle import MaskSpec

HEADS = rs.Heads(8, 2)
CAUSAL: MaskSpec = ("causal",)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

each_algorithm = pytest.mark.parametrize("algorithm", [row.algorithm for row in ROWS])


def check(job: Job, what: object = "", **options: Any) -> None:
    for rank, got in enumerate(run(job, **options)):
        job.check(rank, got, what)


def check_both(job: Job, what: object = "") -> None:
    """Compute out, lse and the gradients of all ranks."""
    results = run_both(job)
    for rank, (got, _) in enumerate(results):
        job.check(rank, got, what)
    check_gradients(job, [gradients for _, gradients in results], what)


# The table


@each_algorithm
@pytest.mark.parametrize("world_size", wide_from(3))
def test_the_table_in_float64(subtests: pytest.Subtests, algorithm: str, world_size: int) -> None:
    """Forward and backward: all cases up to 3 ranks, a third of the cases for more ranks."""
    cases = select(CASES if world_size <= 3 else covering_third(0), algorithm=algorithm, world_size=world_size)
    assert len(cases) >= 21
    for case in cases:
        with subtests.test(str(case)):
            check_both(job_of_case(case), case)


@pytest.mark.slow
@each_algorithm
def test_a_sixth_of_the_table_in_float32(subtests: pytest.Subtests, algorithm: str) -> None:
    cases = select(covering_third(1), algorithm=algorithm)[::2]
    assert len(cases) >= 63
    for case in cases:
        with subtests.test(str(case)):
            check_both(job_of_case(case, torch.float32), case)


# Inputs that the table does not vary


@each_algorithm
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sinks_are_one_more_logit_in_the_softmax(subtests: pytest.Subtests, algorithm: str, world_size: int) -> None:
    """Also rows that see no key ("ahead"), and sinks far above, far below and absent (-inf)."""
    layout = rs.zigzag(24, world_size)
    for spec in (CAUSAL, ("sliding_window", -2, 9)):
        with subtests.test(spec=spec):
            job = make_job("sinks", spec, layout, HEADS, **options_of(algorithm, world_size))
            sinks = torch.tensor([0.0, 1.5, -2.0, 30.0, -30.0, -math.inf, 3.0, 0.5], dtype=torch.float64)
            wanted = job._replace(**dense_with_sinks(job, sinks))
            for rank, got in enumerate(run(job, sinks=sinks)):
                wanted.check(rank, got, spec)


def dense_with_sinks(job: Job, sinks: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the definition: the sink is one more column of scores, and its weight is dropped."""
    positions = job.layout.all_positions()
    allowed = torch.from_numpy(oracle.dense_mask(job.spec, positions, positions))
    group = job.q.shape[1] // job.k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (job.k, job.v))
    scores = (job.q.double() @ k.mT / math.sqrt(k.shape[-1])).masked_fill(~allowed, -math.inf)
    column = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
    logits = torch.cat([scores, column], -1)
    has_weight = (logits > -math.inf).any(-1, keepdim=True)
    weights = torch.where(has_weight, torch.softmax(logits, -1), 0.0)
    return {"out": weights[..., :-1] @ v, "lse": torch.logsumexp(logits, -1)}


def test_without_return_lse_only_out_comes_back() -> None:
    job = make_job("out only", CAUSAL, rs.zigzag(24, 2), HEADS)

    def both(group: InProcessRank) -> bool:
        out = rs.attention(*job.shards(group.rank), mask=rs.causal(), layout=job.layout, group=group)
        return isinstance(out, torch.Tensor) and torch.equal(out, job.attend(group, group.rank).out)

    assert rs.run_in_process(both, 2) == [True, True]


@pytest.mark.wide
@each_algorithm
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_cross_attention(subtests: pytest.Subtests, algorithm: str, world_size: int) -> None:
    """Different numbers of queries and keys in different layouts; some ranks hold only keys or only queries."""
    heads = HEADS if world_size != 3 else rs.Heads(6, 3)
    pairs = [
        (rs.zigzag(17, world_size), rs.striped(40, world_size)),
        (rs.contiguous(1, world_size), rs.contiguous(29, world_size)),
        (rs.contiguous(8, world_size, start=32), rs.zigzag(40, world_size)),
        (rs.zigzag(13, world_size), replicated(30, world_size)),
        (replicated(30, world_size), rs.contiguous(30, world_size)),
    ]
    for spec, (layout, kv_layout) in itertools.product((("full",), CAUSAL), pairs):
        with subtests.test(spec=spec, layout=layout, kv_layout=kv_layout):
            job = make_job("cross", spec, layout, heads, kv_layout=kv_layout, **options_of(algorithm, world_size))
            check(job, (spec, layout, kv_layout))


@each_algorithm
@pytest.mark.parametrize("layout", ["zigzag", "irregular", "replicated"])
def test_a_mask_for_each_row(algorithm: str, layout: str) -> None:
    """Rows that are padded, causal, windowed, or that see no key of some ranks."""
    rows = (CAUSAL, ("documents", (13, 24)), ("sliding_window", 3, 0), ("full",), ("and", ("prefix", 6), CAUSAL))
    spec = ("per_row", rows)
    world_size = 4
    positions = LAYOUTS[layout](37, world_size, rs.causal())
    job = make_job("rows", spec, positions, HEADS, batch=len(rows), **options_of(algorithm, world_size))
    check(job)


def strided(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same numbers with other strides."""
    yield x.transpose(1, 2).contiguous().transpose(1, 2)
    yield x.mT.contiguous().mT
    yield torch.stack([x, x], -1)[..., 0]


@each_algorithm
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_inputs_in_any_memory_order(algorithm: str, kernel: str) -> None:
    job = make_job("strided", CAUSAL, rs.zigzag(25, 4), HEADS, **options_of(algorithm, 4))

    def attend(group: InProcessRank) -> list[rs.Attention]:
        views = zip(*map(strided, job.shards(group.rank)), strict=True)
        options = {"mask": rs.causal(), "layout": job.layout, "group": group, "return_lse": True, "kernel": kernel}
        results = []
        for qkv in views:
            assert not any(x.is_contiguous() for x in qkv)
            results.append(rs.attention(*qkv, **options, **job.options))
        return results

    for rank, results in enumerate(rs.run_in_process(attend, 4)):
        for got in results:
            job.check(rank, got)


@each_algorithm
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_type(subtests: pytest.Subtests, algorithm: str, dtype: torch.dtype) -> None:
    """out has the dtype of the inputs; lse is float32, or float64 for float64."""
    for world_size in (1, 3, 4):
        with subtests.test(world_size=world_size):
            heads = rs.Heads(6, 3) if world_size == 3 else HEADS
            job = make_job(
                "types", CAUSAL, rs.zigzag(37, world_size), heads, dtype=dtype, **options_of(algorithm, world_size)
            )
            for rank, got in enumerate(run(job)):
                assert (got.out.dtype, got.lse.dtype) == (dtype, lse_dtype(dtype))
                job.check(rank, got, world_size)


@pytest.mark.parametrize("scale", [0.0, 0.7, -1.3])
def test_any_finite_scale(scale: float) -> None:
    check(make_job("scale", CAUSAL, rs.zigzag(24, 3), HEADS, scale=scale))


@pytest.mark.parametrize("widths", [(1, 1), (5, 9), (16, 3)])
def test_any_head_dims(subtests: pytest.Subtests, widths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 24, width, generator=generator, dtype=torch.float64)
        for heads, width in zip((8, 2, 2), (widths[0], *widths), strict=True)
    )
    layout = rs.zigzag(24, 4)
    for row in ROWS:
        with subtests.test(row.algorithm):
            check(job_of(q, k, v, CAUSAL, layout, layout, options_of(row.algorithm, 4)), row.algorithm)


@each_algorithm
def test_nothing_to_attend(subtests: pytest.Subtests, algorithm: str) -> None:
    """No tokens, no batch rows, no keys: the result is empty or zero."""
    for layout, kv_layout, batch in (
        (rs.zigzag(0, 2), rs.zigzag(0, 2), 2),
        (rs.zigzag(5, 2), rs.zigzag(5, 2), 0),
        (rs.zigzag(5, 2), rs.zigzag(0, 2), 1),
        (rs.zigzag(0, 2), rs.zigzag(5, 2), 1),
    ):
        with subtests.test(layout=layout, kv_layout=kv_layout, batch=batch):
            job = make_job(
                "empty", ("full",), layout, HEADS, kv_layout=kv_layout, batch=batch, **options_of(algorithm, 2)
            )
            check(job, (layout, kv_layout, batch))


@pytest.mark.parametrize("kernel", ["auto", "reference", "sdpa_cpu"])
def test_autocast_rounds_the_inputs_and_nothing_else(kernel: str) -> None:
    """Like PyTorch's own attention: autocast must not round products and sums of the merge."""
    job = make_job("autocast", CAUSAL, rs.zigzag(24, 2), HEADS, dtype=torch.float32)
    half = job._replace(q=job.q.half(), k=job.k.half(), v=job.v.half())

    def attend(group: InProcessRank) -> rs.Attention:
        with torch.autocast("cpu", dtype=torch.float16):
            return job.attend(group, group.rank, kernel=kernel)

    got = rs.run_in_process(attend, 2)
    for mine, wanted in zip(got, run(half, kernel=kernel), strict=True):
        assert mine.out.dtype == torch.float16
        assert torch.equal(mine.out, wanted.out)
        assert torch.equal(mine.lse, wanted.lse)


# Half dtypes


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@each_algorithm
def test_the_error_of_half_types_is_small_and_flat(algorithm: str, dtype: torch.dtype) -> None:
    """The error is at most twice that of plain attention, and equal from 2 to 16 ranks, as maximum and on average.

    The remaining error is the rounding of the result, so it does not grow with the number of merged parts.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 16, 256, 32, generator=generator).to(dtype) for _ in range(3))
    one = rs.zigzag(256, 1)
    job = job_of(q, k, v, CAUSAL, one, one, {})
    # The fused operator's half-precision code cannot run on every CPU; this is plain attention by definition.
    with sdpa_kernel(SDPBackend.MATH):
        plain = errors_of(job, scaled_dot_product_attention(q, k, v, is_causal=True))
    errors = {}
    for world_size in (2, 4, 8, 16):
        layout = rs.zigzag(256, world_size)
        spread = job._replace(layout=layout, kv_layout=layout, options=options_of(algorithm, world_size))
        errors[world_size] = errors_of(job, layout.unshard([got.out for got in run(spread)], 2))
    for of_ranks in errors.values():
        assert (of_ranks <= 2 * plain).all(), (errors, plain)
        assert (of_ranks <= 1.02 * errors[2]).all(), errors


def errors_of(job: Job, out: torch.Tensor) -> torch.Tensor:
    """Return the largest error and the root mean square error."""
    difference = out.double() - job.out
    return torch.stack([difference.abs().max(), difference.square().mean().sqrt()])


# NaN and infinity


@pytest.mark.wide
@each_algorithm
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_odd_values_reach_only_the_rows_that_see_them(
    subtests: pytest.Subtests, algorithm: str, value: float, dtype: torch.dtype
) -> None:
    masks: list[MaskSpec] = [CAUSAL, ("sliding_window", 5, 0), ("documents", (7, 1, 12, 40))]
    for spec, layout in itertools.product(masks, (rs.zigzag(24, 4), rs.striped(24, 4), replicated(24, 4))):
        with subtests.test(spec=spec, layout=layout):
            clean = make_job("odd", spec, layout, HEADS, dtype=dtype, **options_of(algorithm, 4))
            for name, at in (("q", (0, 5, 7, 1)), ("k", (1, 1, 3, 2)), ("v", (0, 0, 9, 1)), ("v", (1, 1, 20, 0))):
                getattr(clean, name)[at] = value
            job = clean._replace(**row_by_row(clean))
            for rank, got in enumerate(run(job)):
                check_odd(job, rank, got)


def row_by_row(job: Job) -> dict[str, torch.Tensor]:
    """Attend every row alone to the keys that it sees, so that nothing else can reach it."""
    group = job.q.shape[1] // job.k.shape[1]
    q, k, v = job.q.double(), *(x.double().repeat_interleave(group, 1) for x in (job.k, job.v))
    allowed = torch.from_numpy(oracle.dense_mask(job.spec, job.layout.all_positions(), job.layout.all_positions()))
    out, lse = torch.zeros_like(job.out), torch.full_like(job.lse, -math.inf)
    for row, seen in enumerate(allowed):
        if seen.any():
            scores = q[:, :, row, None] @ k[:, :, seen].mT / math.sqrt(q.shape[-1])
            has_weight = scores.ne(-math.inf).any(-1, keepdim=True)
            weights = torch.where(has_weight, torch.softmax(scores, -1), 0.0)
            out[:, :, row] = (weights @ v[:, :, seen]).squeeze(2)
            lse[:, :, row] = torch.logsumexp(scores, -1).squeeze(2)
    return {"out": out, "lse": lse}


def check_odd(job: Job, rank: int, got: rs.Attention) -> None:
    out, lse = (job.layout.shard(x, rank, 2) for x in (job.out, job.lse))
    torch.testing.assert_close(got.out, out.to(got.out.dtype), equal_nan=True)
    # A sum with an infinite score is infinite or NaN, depending on the order of operations.
    lost = ~(lse.isfinite() | lse.isneginf())
    torch.testing.assert_close(got.lse[~lost], lse[~lost].to(got.lse.dtype))
    assert not got.lse[lost].isfinite().any()

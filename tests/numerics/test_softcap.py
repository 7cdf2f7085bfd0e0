"""`softcap=` against the dense oracle: both passes, sinks, the cache, and what is refused."""

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.kernels import KERNELS, KernelRequest, choose_kernel
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.attention_cases import (
    check_gradients,
    dense_sink_gradients,
    job_of_case,
    make_dout,
    make_job,
    run,
    run_both,
)
from support.cases import CASES, ROWS, expect, make_arrays, select, wide_from
from support.conversations import Story, live_through

SOFTCAP = 1.5
CAUSAL = ("causal",)
HEADS = rs.Heads(8, 2)

each_algorithm = pytest.mark.parametrize("algorithm", [row.algorithm for row in ROWS])


@each_algorithm
@pytest.mark.parametrize("world_size", wide_from(3))
def test_the_table_with_a_softcap(subtests: pytest.Subtests, algorithm: str, world_size: int) -> None:
    """Out, lse and gradients; the lse is that of the capped scores."""
    cases = select(algorithm=algorithm, world_size=world_size)[::6]
    assert len(cases) >= 4
    for case in cases:
        with subtests.test(case=str(case)):
            job = job_of_case(case, softcap=SOFTCAP)
            results = run_both(job)
            for rank, (got, _) in enumerate(results):
                job.check(rank, got)
            check_gradients(job, [gradients for _, gradients in results])


def test_the_table_is_one_that_a_softcap_changes() -> None:
    """Otherwise the tests above would pass without a softcap."""
    case = select(CASES, world_size=2)[0]
    plain, capped = job_of_case(case), job_of_case(case, softcap=SOFTCAP)
    assert (plain.out - capped.out).abs().max() > 0.05
    assert (plain.lse - capped.lse).abs().max() > 0.05


@pytest.mark.parametrize("softcap", [0.1, 3, np.float32(50), 1e30])
def test_any_finite_softcap(softcap: float) -> None:
    job = make_job("cap", CAUSAL, rs.zigzag(24, 3), HEADS, softcap=softcap, scale=0.9)
    results = run_both(job)
    for rank, (got, _) in enumerate(results):
        job.check(rank, got)
    check_gradients(job, [gradients for _, gradients in results])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Within the defaults of assert_close; half types are computed in float32 and rounded once."""
    job = make_job("cap dtype", CAUSAL, rs.zigzag(37, 3), HEADS, dtype=dtype, softcap=SOFTCAP)
    for rank, got in enumerate(run(job)):
        job.check(rank, got)


def test_with_sinks() -> None:
    """A sink is not capped."""
    job = make_job("cap sinks", CAUSAL, rs.zigzag(24, 3), HEADS, softcap=SOFTCAP)
    sinks = torch.linspace(-2, 3, 8, dtype=torch.float64)

    def both(group: InProcessRank) -> list[torch.Tensor]:
        leaves = [*(x.clone().requires_grad_() for x in job.shards(group.rank)), sinks.clone().requires_grad_()]
        out = job.attend(group, group.rank, tensors=leaves[:3], sinks=leaves[3]).out
        return list(torch.autograd.grad(out, leaves, job.layout.shard(make_dout(job), group.rank, 2)))

    *parts, dsinks = zip(*rs.run_in_process(both, 3), strict=True)
    wanted = dense_sink_gradients(job, sinks)
    for found, whole in zip([*(job.layout.unshard(list(part), 2) for part in parts), sum(dsinks)], wanted, strict=True):
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


def test_infinite_scores_are_capped_and_hidden_ones_reach_no_row() -> None:
    """A key of infinity has the score ±softcap; a hidden key of NaN changes nothing."""
    job = make_job("cap infinity", CAUSAL, rs.contiguous(12, 3), rs.Heads(2, 2), batch=1, softcap=SOFTCAP)
    job.k[:, :, 4] = torch.inf * job.k[:, :, 4].sign()
    job.q.abs_(), job.k[:, :, 4].abs_()
    job.k[:, :, 9] = torch.nan
    out = job.layout.unshard([got.out for got in run(job)], 2)
    assert out[:, :, 9:].isnan().all()
    k = job.k.nan_to_num(nan=0.0, posinf=1e6).numpy()
    allowed = oracle.dense_mask(CAUSAL, range(12), range(12))
    wanted, _ = oracle.dense_attention(job.q.numpy(), k, job.v.numpy(), allowed, softcap=SOFTCAP)
    torch.testing.assert_close(out[:, :, :9], torch.from_numpy(wanted)[:, :, :9], rtol=0, atol=1e-12)


def test_encoded_keys_on_the_way() -> None:
    """With wire= the error is that of rounding K and V, not that of a missing cap."""
    job = make_job("cap wire", CAUSAL, rs.zigzag(24, 3), HEADS, softcap=SOFTCAP)
    for rank, got in enumerate(run(job, wire="int8")):
        error = (got.out - job.layout.shard(job.out, rank, 2)).abs().max()
        assert 0 < error < 0.03


def test_compiled_programs_know_their_softcap() -> None:
    job = make_job("cap compiled", CAUSAL, rs.contiguous(24, 1), HEADS)
    mask, layout = rs.causal(), job.layout

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softcap: float) -> torch.Tensor:
        out = rs.attention(q, k, v, mask=mask, layout=layout, softcap=softcap)
        assert isinstance(out, torch.Tensor)
        return out

    for softcap in (SOFTCAP, 0.5):
        wanted = make_job("cap compiled", CAUSAL, layout, HEADS, softcap=softcap).out
        torch.testing.assert_close(attend(job.q, job.k, job.v, softcap), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "all_gather", "ulysses"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_the_simulator(algorithm: str, reproducible: bool) -> None:
    length = 3 * rs.TILE if reproducible else 37
    layout = rs.contiguous(length, 3, align=rs.TILE if reproducible else 1)
    heads = rs.Heads(3, 3)
    q, k, v, dout = make_arrays("cap simulate", heads, length, length)
    found = rs.simulate_attention(
        q, k, v, mask=rs.causal(), layout=layout, algorithm=algorithm, softcap=SOFTCAP, reproducible=reproducible
    )
    allowed = oracle.dense_mask(CAUSAL, range(length), range(length))
    wanted = (
        *oracle.dense_attention(q, k, v, allowed, softcap=SOFTCAP),
        *oracle.dense_gradients(q, k, v, allowed, dout, softcap=SOFTCAP),
    )
    gradients = found.gradients(dout)
    for x, y in zip((found.out, found.lse, gradients.dq, gradients.dk, gradients.dv), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-11)
    plain = expect(CAUSAL, layout, layout, make_arrays("cap simulate", heads, length, length))
    assert abs(plain.out - found.out).max() > 0.01


# The cache


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("storage", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_conversation_whose_layers_have_different_softcaps(
    world_size: int, storage: str | None, dtype: torch.dtype
) -> None:
    """Prefill and decode, sharded and replicated queries; a quantised cache keeps its error bound."""
    story = Story(7, HEADS, [CAUSAL, ("and", CAUSAL, ("sliding_window", 5, 0)), CAUSAL], dtype, storage=storage)
    story.softcaps = [SOFTCAP, 0.5, None]
    story.turn({0: 17, 1: 5}).turn({0: 1, 1: 1}).turn({1: 9}, algorithm="pass_q").turn({0: 6}, query="replicated")
    story.turn({0: 1})
    rs.run_in_process(lambda group: live_through(story, group), world_size)


# Refusals


def test_kernels_without_a_softcap_refuse_by_name() -> None:
    request = KernelRequest(torch.device("cpu"), torch.float32, 8, 8, softcap=SOFTCAP)
    assert [kernel.name for kernel in KERNELS if kernel.refuses(request) is None] == ["reference"]
    assert choose_kernel("auto", request).name == "reference"
    job = make_job("cap kernel", CAUSAL, rs.contiguous(12, 1), HEADS, softcap=SOFTCAP)
    with pytest.raises(
        rs.UnsupportedError, match=r"kernel='sdpa_cpu'.*softcap=1\.5: sdpa_cpu has no softcap.*reference"
    ):
        run(job, kernel="sdpa_cpu")


def test_the_reproducible_mode_has_no_softcap() -> None:
    layout = rs.contiguous(rs.TILE, 1, align=rs.TILE)
    job = make_job("cap reproducible", CAUSAL, layout, HEADS, softcap=SOFTCAP)
    with pytest.raises(rs.UnsupportedError, match=r"has no softcap.*leave out softcap or reproducible"):
        run(job, reproducible=True)


@pytest.mark.parametrize("softcap", [0, -1.0, float("inf"), float("nan"), "50", True, torch.tensor(50.0)])
def test_values_that_cap_nothing(softcap: object) -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(rs.ShapeError, match=r"softcap=.*a finite number above 0"):
        rs.attention(q, q, q, mask=rs.causal(), layout=rs.contiguous(4, 1), softcap=softcap)  # type: ignore[arg-type]


def test_ranks_with_different_softcaps() -> None:
    job = make_job("cap ranks", CAUSAL, rs.zigzag(24, 2), HEADS)
    with pytest.raises(rs.TransportError, match="softcap"):
        rs.run_in_process(lambda group: job.attend(group, group.rank, softcap=1.0 + group.rank), 2)


def test_ranks_with_different_softcaps_in_a_turn() -> None:
    story = Story(3, HEADS, [CAUSAL])

    def run_turn(group: InProcessRank) -> None:
        turn = story.cache(group).begin({0: 6})
        rows = turn.num_rows
        q, kv = torch.zeros(1, 8, rows, 8).double(), torch.zeros(1, 2, rows, 8).double()
        turn.prefill(q, kv, kv[..., :6], layer=0, softcap=1.0 + group.rank)

    with pytest.raises(rs.TransportError, match="softcap"):
        rs.run_in_process(run_turn, 2)

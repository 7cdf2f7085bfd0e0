"""`rs.attention` and `rs.gather` on gloo processes: a smaller table, every kind of group, and memory."""

import gc
import math
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringspan as rs
from ringspan.runtime.session import session_of
from support.attention_cases import Job, covering_third, job_of_case, make_job, options_of
from support.cases import ROWS, replicated, select
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

each_world_size = pytest.mark.parametrize("world_size", [2, 3, 4])
HEADS = rs.Heads(8, 4)
CAUSAL = ("causal",)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ALGORITHMS = [row.algorithm for row in ROWS]


def check(job: Job, rank: int, group: Any = None, what: object = "", **options: Any) -> None:
    group_rank = rank if group is None else options.pop("group_rank", rank)
    job.check(group_rank, job.attend(group, group_rank, **options), what)


# The table


@each_world_size
def test_a_part_of_the_table(world_size: int) -> None:
    counts = values(run_ranks(run_table, world_size, world_size))
    assert len(set(counts)) == 1
    assert counts[0] >= 150


def run_table(rank: int, world_size: int) -> int:
    """Run all algorithms with all masks and layouts; the dtypes alternate."""
    cases = select(covering_third(2), world_size=world_size)
    for number, case in enumerate(cases):
        check(job_of_case(case, DTYPES[number % len(DTYPES)]), rank, what=case)
    assert {case.algorithm for case in cases} == set(ALGORITHMS)
    return len(cases)


# Groups


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 1), (1, 3), (2, 2), (4, 1)])
def test_meshes_of_two_dimensions(shape: tuple[int, int]) -> None:
    values(run_ranks(run_mesh, math.prod(shape), shape))


def run_mesh(rank: int, shape: tuple[int, int]) -> None:
    """The mesh comes from the group, so `mesh` is optional; rings run on it too; another mesh is refused."""
    world_size = math.prod(shape)
    heads = rs.Heads(6, 3) if 3 in shape else HEADS
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    for algorithm in ("hybrid", "double_ring", "pass_kv", "ulysses"):
        job = make_job(algorithm, CAUSAL, rs.zigzag(37, world_size), heads, algorithm=algorithm)
        for _ in range(2):
            check(job, rank, mesh, algorithm)
    hybrid = job._replace(options={"algorithm": "hybrid"})
    check(hybrid, rank, mesh, mesh=shape)
    if shape[0] != shape[1]:
        with pytest.raises(rs.LayoutError) as raised:
            hybrid.attend(mesh, rank, mesh=shape[::-1])
        assert f"mesh={shape[::-1]}" in str(raised.value)
        assert f"the group's own mesh is {shape}" in str(raised.value)


@each_world_size
def test_meshes_of_one_dimension(world_size: int) -> None:
    values(run_ranks(run_flat_mesh, world_size, world_size))


def run_flat_mesh(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    for algorithm in ("pass_kv", "double_ring"):
        check(
            make_job("flat", CAUSAL, rs.zigzag(37, world_size), HEADS, **options_of(algorithm, world_size)), rank, mesh
        )
    with pytest.raises(rs.UnsupportedError, match="3 dimensions"):
        make_job("cube", CAUSAL, rs.zigzag(37, world_size), HEADS).attend(
            init_device_mesh("cpu", (world_size, 1, 1)), rank
        )
    with pytest.raises(rs.UnsupportedError, match=r"only if they have names; .* mesh_dim_names="):
        make_job("nameless", CAUSAL, rs.zigzag(37, world_size), HEADS).attend(
            init_device_mesh("cpu", (world_size, 1)), rank
        )


def test_a_dimension_of_a_mesh() -> None:
    values(run_ranks(run_part_of_mesh, 4))


def run_part_of_mesh(rank: int) -> None:
    """Two replicas, each with a context-parallel group of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    replica, position = divmod(rank, 2)
    job = make_job(f"replica {replica}", CAUSAL, rs.zigzag(29, 2), HEADS)
    for group in (mesh["cp"], mesh.get_group("cp")):
        job.check(position, job.attend(group, position))


def test_a_dimension_of_a_mesh_is_one_group_in_all_steps() -> None:
    values(run_ranks(run_steps, 2))


def run_steps(rank: int) -> None:
    """mesh["cp"] is a new object each time and lives as long as the graph of a loss; one rank keeps all of them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    layout = rs.zigzag(29, 2)
    whole = torch.randn(1, 2, 29, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = whole.clone().requires_grad_()
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).square().sum().backward()
    assert x.grad is not None
    losses, sessions = [], []
    for _ in range(4):
        mine = layout.shard(whole, rank, 2).clone().requires_grad_()
        loss = rs.attention(mine, mine, mine, mask=rs.causal(), layout=layout, group=mesh["cp"]).square().sum()
        loss.backward()
        torch.testing.assert_close(mine.grad, layout.shard(x.grad, rank, 2))
        sessions.append(session_of(mesh["cp"]))
        if rank == 0:
            losses.append(loss)
    assert all(session is sessions[0] for session in sessions)
    both = session_of(mesh)
    assert (both.mesh, sessions[0].mesh) == ((1, 2), None)
    assert both.transport is sessions[0].transport  # the same ranks: messages must stay in order
    assert both is session_of(mesh)


def test_a_mesh_of_new_process_groups() -> None:
    values(run_ranks(run_new_mesh, 2))


def run_new_mesh(rank: int) -> None:
    """The new group equals the old one, which is partly alive, but has other ranks."""
    job = make_job("new mesh", CAUSAL, rs.zigzag(37, 2), HEADS)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    part = mesh["cp"]
    check(job, rank, part)
    old = weakref.ref(session_of(part).transport)
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    with pytest.raises(rs.TransportError, match=r"its process group is gone .*; make a new mesh"):
        job.attend(part, rank)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    again = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    assert again["cp"] == part
    check(job, rank, again["cp"])
    assert session_of(again["cp"]).transport is not old()
    del mesh, part
    for _ in range(50):  # a thread may hold a reference for a moment
        gc.collect()
        time.sleep(0.0 if old() is None else 0.1)
    assert old() is None, "what a group held is gone with it"


@pytest.mark.parametrize("world_size", [3, 4])
def test_groups_of_some_of_the_ranks(world_size: int) -> None:
    values(run_ranks(run_some, world_size, world_size))


def run_some(rank: int, world_size: int) -> None:
    """Ranks are numbered inside the group; several groups are used at once and do not mix."""
    members = [[0, 2], [1, 2], list(range(world_size))[1:]]
    groups = [dist.new_group(ranks) for ranks in members]
    for _ in range(2):
        for number, (ranks, group) in enumerate(zip(members, groups, strict=True)):
            if rank in ranks:
                size = len(ranks)
                job = make_job(
                    f"group {number}", CAUSAL, rs.zigzag(37, size), rs.Heads(6, 6), **options_of("pass_q", size)
                )
                job.check(ranks.index(rank), job.attend(group, ranks.index(rank)), ranks)
        check(make_job("all", CAUSAL, rs.zigzag(37, world_size), HEADS), rank)


def test_a_group_of_one() -> None:
    values(run_ranks(run_one, 1))


def run_one(rank: int) -> None:
    job = make_job("one", CAUSAL, rs.zigzag(37, 1), HEADS)
    check(job, 0)
    dist.destroy_process_group()
    check(job, 0)  # without a group


def test_a_new_default_group() -> None:
    values(run_ranks(run_new_group, 2))


def run_new_group(rank: int) -> None:
    """The agreements of a group are dropped with it."""
    job = make_job("new", CAUSAL, rs.zigzag(37, 2), HEADS)
    check(job, rank)
    store = dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    check(job, rank)


# Calls one after the other


@each_world_size
def test_calls_one_after_the_other(world_size: int) -> None:
    values(run_ranks(run_sequence, world_size, world_size))


def run_sequence(rank: int, world_size: int) -> None:
    """Results stay valid while later calls, with this and other signatures, reuse the buffers."""
    heads = rs.Heads(12, 12)
    layouts = (rs.zigzag(36, world_size), rs.contiguous(41, world_size), replicated(30, world_size))
    jobs = [
        make_job(f"{number} {algorithm}", spec, layout, heads, dtype=dtype, **options_of(algorithm, world_size))
        for algorithm in ALGORITHMS
        for number, (spec, layout, dtype) in enumerate(zip((("full",), CAUSAL, CAUSAL), layouts, DTYPES, strict=True))
    ]
    results = [job.attend(None, rank, contract=number % 5 > 0) for number, job in enumerate(jobs * 3)]
    for job, got in zip(jobs * 3, results, strict=True):
        job.check(rank, got, job.options)


@each_world_size
@pytest.mark.parametrize("algorithm", ["pass_kv", "ulysses"])
def test_inputs_are_the_callers_again_when_the_call_returns(algorithm: str, world_size: int) -> None:
    values(run_ranks(run_overwrite, world_size, algorithm, world_size))


def run_overwrite(rank: int, algorithm: str, world_size: int) -> None:
    """One rank is late in every step, with messages too long for the system's buffers; the others overwrite theirs."""
    layout = rs.contiguous(256 * world_size, world_size)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 12, layout.num_positions, 64, generator=generator) for _ in range(3))
    mine = [layout.shard(x, rank, 2).clone() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(mine[0], k, v)

    def dawdle(_: object) -> None:
        time.sleep(0.05 if rank == 1 else 0.0)

    out = rs.attention(*mine, mask=rs.full(), layout=layout, record=dawdle, **options_of(algorithm, world_size))
    for x in mine:
        x.fill_(math.nan)
    torch.testing.assert_close(out, expected)


def test_inference_mode_on_and_off() -> None:
    values(run_ranks(run_inference_mode, 2))


def run_inference_mode(rank: int) -> None:
    """Buffers made in inference mode are used outside of it, and the reverse."""
    job = make_job("inference", CAUSAL, rs.zigzag(37, 2), HEADS)
    for is_on in (False, True, False, True):
        with torch.inference_mode(is_on):
            check(job, rank)


# Whole sequences


@each_world_size
def test_gather_and_its_gradient(world_size: int) -> None:
    values(run_ranks(run_gather, world_size, world_size))


def run_gather(rank: int, world_size: int) -> None:
    whole = torch.randn(2, 23, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for layout in (rs.zigzag(23, world_size), rs.contiguous(23, world_size, align=16)):
        part = rs.shard(whole, layout, dim=1).requires_grad_()
        gathered = rs.gather(part, layout, dim=1)
        assert torch.equal(gathered, whole)
        (gathered.square().sum() * (rank + 1)).backward()
        weight = sum(range(1, world_size + 1))
        torch.testing.assert_close(part.grad, 2 * weight * rs.shard(whole, layout, dim=1))


# Memory

MB = 2**20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_high_water_mark(dtype: torch.dtype) -> None:
    """The peak is at most out + lse + two KV buffers + 32 MB above the inputs, on each of 4 ranks."""
    for used, allowed in values(run_ranks(run_large, 4, dtype)):
        assert used <= allowed, f"{used / MB:.1f} MB, where {allowed / MB:.1f} MB are allowed"


def run_large(rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """As many numbers per rank as 8192 tokens of 8 heads, but in a batch of shorter sequences, to be fast."""
    layout = rs.zigzag(4 * 256, 4)
    generator = torch.Generator().manual_seed(rank)
    warm = torch.randn(1, 8, 16, 64).to(dtype)
    rs.attention(warm, warm, warm, mask=rs.causal(), layout=rs.zigzag(64, 4))
    q, k, v = (torch.randn(32, 8, 256, 64, generator=generator).to(dtype) for _ in range(3))
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = memory("VmRSS")
    out, lse = rs.attention(q, k, v, mask=rs.causal(), layout=layout, return_lse=True)
    return memory("VmHWM") - before, out.nbytes + lse.nbytes + 2 * (k.nbytes + v.nbytes) + 32 * MB


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

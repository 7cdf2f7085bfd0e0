"""`rs.attention` and `rs.gather` on 2, 3 and 4 MPI ranks: a part of the table, and ranks that disagree or fail.

One start of mpirun runs everything, because starting processes is what takes time: this file is also the program of its
ranks. The first 2, 3 and 4 of them form communicators in turn, a new one for every check.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ringspan as rs
from support.attention_cases import covering_third, job_of_case, make_job
from support.cases import select
from support.reproducible_cases import LAYOUTS, SHORT, WAYS, Call, alone, on_rank

HARD_TIMEOUT_S = 110
RANKS = 4
DEADLINE_S = 0.5
CAUSAL = ("causal",)
HEADS = rs.Heads(6, 6)

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: apt-get install openmpi-bin libopenmpi-dev; pip install '.[mpi]'",
)
pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(HARD_TIMEOUT_S + 10), needs_mpi]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By rank: the failures of each check, by check and world size."""
    directory = tmp_path_factory.mktemp("mpi")
    options = ["--timeout", HARD_TIMEOUT_S - 20, "--allow-run-as-root", "--oversubscribe", "-np", RANKS]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        ["mpirun", *map(str, options), sys.executable, "-m", "mpi4py", __file__, str(directory)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=HARD_TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr  # all ranks finish, also after groups that fail
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]


def check_table(comm: Any) -> None:
    cases = select(covering_third(0), world_size=comm.size)[::3]
    assert {case.algorithm for case in cases} >= {"pass_kv", "pass_q", "all_gather", "ulysses", "hybrid", "double_ring"}
    for number, case in enumerate(cases):
        job = job_of_case(case, (torch.float64, torch.float32, torch.bfloat16)[number % 3])
        job.check(comm.rank, job.attend(comm, comm.rank), case)


def check_calls_one_after_the_other(comm: Any) -> None:
    """Buffers are reused while the first results are kept; gathered, they are the whole."""
    jobs = [make_job(str(i), CAUSAL, rs.zigzag(30 + i % 2, comm.size), HEADS) for i in range(6)]
    results = [job.attend(comm, comm.rank) for job in jobs]
    for job, got in zip(jobs, results, strict=True):
        job.check(comm.rank, got)
        whole = rs.gather(got.out, job.layout, comm, dim=2)
        torch.testing.assert_close(whole, job.out, rtol=0, atol=1e-12)


def check_the_bits_of_one_device(comm: Any) -> None:
    call, layout = Call("causal", has_sinks=True, seq_len=SHORT), LAYOUTS["zigzag"](comm.size, SHORT)
    for way in ("pass_kv", "pass_q"):
        *of_tokens, dsinks = on_rank(call, layout, comm, comm.rank, **WAYS[way])
        *wanted, whole = alone(call)
        assert all(torch.equal(x, layout.shard(y, comm.rank, 2)) for x, y in zip(of_tokens, wanted, strict=True))
        assert torch.equal(dsinks, whole[0])


def check_disagreement(comm: Any) -> None:
    """All ranks raise the same error, and the next call works."""
    job = make_job("odd", CAUSAL, rs.zigzag(31, comm.size), HEADS)
    odd = {"scale": 2.0} if comm.rank == 1 else {}
    message = error_of(lambda: job.attend(comm, comm.rank, **odd))
    assert "scale: " in message
    assert "rank 1 has 2.0" in message
    refused = {"kernel": "none"} if comm.rank == 0 else {}
    message = error_of(lambda: job.attend(comm, comm.rank, **refused), rs.RingspanError)
    assert "kernel='none'" in message
    job.check(comm.rank, job.attend(comm, comm.rank))


def check_a_rank_that_raises_in_mid_call(comm: Any) -> None:
    job = make_job("boom", CAUSAL, rs.zigzag(31, comm.size), HEADS)

    def record(event: Any) -> None:
        if comm.rank == 1 and event.action == "send":
            raise ArithmeticError("out of luck")

    began = time.monotonic()
    expected = ArithmeticError if comm.rank == 1 else rs.TransportError
    assert "out of luck" in error_of(lambda: job.attend(comm, comm.rank, record=record), expected)
    assert "out of luck" in error_of(lambda: job.attend(comm, comm.rank))
    assert time.monotonic() - began < 20


def check_a_rank_that_never_calls(comm: Any) -> None:
    job = make_job("missing", CAUSAL, rs.zigzag(31, comm.size), HEADS)
    job.attend(comm, comm.rank)
    if comm.rank == 0:
        return
    began = time.monotonic()
    message = error_of(lambda: job.attend(comm, comm.rank, timeout_s=DEADLINE_S))
    assert message.startswith(f"rank {comm.rank}, call 2, before its first step: ")
    assert time.monotonic() - began < 20


def error_of(act: Callable[[], object], error: type[Exception] = rs.TransportError) -> str:
    with pytest.raises(error) as raised:
        act()
    return str(raised.value)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}


@pytest.mark.parametrize("world_size", range(2, RANKS + 1))
@pytest.mark.parametrize("name", CHECKS)
def test_on_ranks(outcomes: list[dict[str, str]], name: str, world_size: int) -> None:
    for rank in range(world_size):
        assert not outcomes[rank][f"{name} {world_size}"], f"rank {rank}: {outcomes[rank][f'{name} {world_size}']}"


def run_checks() -> dict[str, str]:
    """On one rank."""
    from mpi4py import MPI

    found = {}
    for world_size in range(2, MPI.COMM_WORLD.size + 1):
        for name, check in CHECKS.items():
            comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < world_size else MPI.UNDEFINED)
            if comm == MPI.COMM_NULL:
                continue
            try:
                check(comm)
                found[f"{name} {world_size}"] = ""
            except Exception:
                found[f"{name} {world_size}"] = traceback.format_exc()
    return found


if __name__ == "__main__":
    outcome = run_checks()
    from mpi4py import MPI

    Path(sys.argv[1], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(outcome))

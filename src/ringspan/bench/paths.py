"""Which paths does a self-check run, and in which processes?

Kernels and threads are checked in one process, gloo and NCCL in two processes, and MPI by running this command under
mpirun, which prints its rows as JSON.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

from ringspan.bench.launch import Progress, RanksFailed, count_gpus, run_job
from ringspan.bench.result import PathCheck
from ringspan.bench.settings import Carrier, Job

NUM_THREADS = 4
NUM_PROCESSES = 2
_FEW_GPUS = f"needs {NUM_PROCESSES} GPUs"


def check_paths(timeout_s: float, progress: Callable[[Progress], None]) -> list[PathCheck]:
    """The result of every path, or the reason why it cannot run here."""
    return list(_check_all(timeout_s, progress))


def _check_all(timeout_s: float, progress: Callable[[Progress], None]) -> Iterator[PathCheck]:
    def tell(done: int, what: str) -> None:
        progress(Progress(done, 4, what))

    tell(0, "kernels and threads")
    yield from _run(Job("check_alone", "threads", NUM_THREADS, timeout_s))
    tell(1, "gloo")
    yield from _run(Job("check_group", "gloo", NUM_PROCESSES, timeout_s))
    tell(2, "NCCL")
    if count_gpus() >= NUM_PROCESSES:
        yield from _run(Job("check_group", "nccl", NUM_PROCESSES, timeout_s))
    else:
        yield PathCheck(_path("nccl", NUM_PROCESSES), "not available", note="no GPU" if not count_gpus() else _FEW_GPUS)
    tell(3, "MPI")
    missing = _missing_for_mpi()
    if missing is None:
        yield from _run_mpi(timeout_s)
    else:
        yield PathCheck(_path("mpi", NUM_PROCESSES), "not available", note=missing)


def _path(carrier: Carrier, world_size: int) -> str:
    return f"{carrier}, {world_size} ranks"


def _run(job: Job) -> list[PathCheck]:
    try:
        paths: list[PathCheck] = run_job(job, lambda _: None)
    except RanksFailed as error:
        what = "kernels and threads" if job.name == "check_alone" else _path(job.carrier, job.world_size)
        return [PathCheck(what, "failed", note=str(error))]
    return paths


def _missing_for_mpi() -> str | None:
    if shutil.which("mpirun") is None:
        return "no mpirun"
    return None if importlib.util.find_spec("mpi4py") else "no mpi4py"


def _run_mpi(timeout_s: float) -> list[PathCheck]:
    arguments = ["bench", "selfcheck", "--json", "--timeout", str(timeout_s)]
    try:
        report = json.loads(_run_mpirun(arguments, NUM_PROCESSES, timeout_s))
        return [PathCheck(**path) for path in report["paths"]]
    except (RanksFailed, json.JSONDecodeError) as error:
        return [PathCheck(_path("mpi", NUM_PROCESSES), "failed", note=str(error))]


def _run_mpirun(arguments: list[str], world_size: int, timeout_s: float) -> str:
    """The output of `ringspan ARGUMENTS` under mpirun."""
    command = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    program = [sys.executable, "-P", "-c", "from ringspan.cli import main; main()", *arguments]
    process = subprocess.Popen(  # noqa: S603 - our own command
        [*command, "-np", str(world_size), *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RanksFailed(f"no result within {timeout_s:g} s") from None
    finally:
        process.terminate()  # and mpirun ends its ranks
        process.wait()
    if not output.strip():
        lines = [line.strip() for line in errors.splitlines() if line.strip(" -")]
        told = [line for line in lines if line.startswith("Error: ")] or lines or ["it said nothing"]
        raise RanksFailed(f"mpirun ended with exit code {process.returncode}: {told[0]}")
    return output

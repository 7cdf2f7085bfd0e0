"""Who starts the ranks, watches them, and ensures that no process and no folder is left behind?

The parent loads no torch: it starts processes, hands each a job on its standard input, and reads messages from its
standard output. On a result, an error, the time limit, Ctrl-C, SIGTERM and SIGHUP it kills the ranks and removes its
folder on the way out. If it is killed itself, the standard input of the ranks closes; they remove the folder and end.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from ringspan.bench.settings import Job
from ringspan.errors import RingspanError, ShapeError, UnsupportedError

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # By default glibc returns freed memory to the system; faulting it in again takes 2 to 6 % of a call.
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
}
_GRACE_S = 3.0  # after the first rank has failed, for the others to report why
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", as the system does when memory runs out",
    signal.SIGILL: (
        ", an instruction this CPU lacks; if a virtual machine reports instructions that it lacks, "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment helps with half types"
    ),
}
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class RanksFailed(Exception):  # noqa: N818
    """A rank could not do its job; the message is one line."""


class RanksRefused(RanksFailed):
    """The job asks for something that cannot be computed here; `refusal` is the error that the ranks raised."""

    def __init__(self, refusal: RingspanError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Progress(NamedTuple):
    """How much of a job is done."""

    done: int
    total: int
    what: str


class Done(NamedTuple):
    """A rank has finished."""

    value: Any


class Failed(NamedTuple):
    """A rank has failed. A transport error is often only the consequence of another rank's failure.

    `refusal` is the error itself if the reason is "refused".
    """

    reason: Literal["refused", "error", "transport"]
    text: str
    refusal: RingspanError | None = None


class Ended(NamedTuple):
    """A rank's process has closed its output."""


class Launched(NamedTuple):
    """This process is a rank that a launcher has started."""

    by: Literal["torchrun", "mpirun"]
    rank: int
    world_size: int


def find_launcher(env: Mapping[str, str]) -> Launched | None:
    """The launcher that has started this process, or None.

    torchrun sets RANK, WORLD_SIZE and MASTER_ADDR. Scripts set the first two for programs of their own, which start no
    ranks here; but what stands there must be a rank and a number of ranks.

    Raises:
        ShapeError: if its variables are not a rank and a number of ranks, or only one of them is there.
        UnsupportedError: under srun with several tasks, each of which would otherwise run a bench of its own.
    """
    rank, size = _read_count(env, "RANK", least=0), _read_count(env, "WORLD_SIZE", least=1)
    if "MASTER_ADDR" in env and (rank is not None or size is not None):
        return _launched("torchrun", "RANK", rank, "WORLD_SIZE", size)
    for rank_name, size_name in (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE")):
        if rank_name in env and size_name in env:
            rank, size = _read_count(env, rank_name, least=0), _read_count(env, size_name, least=1)
            return _launched("mpirun", rank_name, rank, size_name, size)
    _refuse_srun(env)
    return None


def _launched(
    by: Literal["torchrun", "mpirun"], rank_name: str, rank: int | None, size_name: str, size: int | None
) -> Launched:
    if rank is None or size is None:
        missing, given, value = (rank_name, size_name, size) if rank is None else (size_name, rank_name, rank)
        raise ShapeError(f"{by} sets {missing} too, and that is missing", argument=given, value=value, remedy=_UNSET)
    if rank >= size:
        rule = f"ranks count from 0 to {size_name} - 1 = {size - 1}"
        raise ShapeError(rule, argument=rank_name, value=str(rank), remedy=_UNSET)
    return Launched(by, rank, size)


_UNSET = "unset it, or start the ranks with torchrun or mpirun"


def _read_count(env: Mapping[str, str], name: str, least: int) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text[:9]) < least:
        raise ShapeError(
            f"this environment variable must be a whole number of at least {least}",
            argument=name,
            value=text,
            remedy=_UNSET,
        )
    return int(text[:9])


def _refuse_srun(env: Mapping[str, str]) -> None:
    """A batch script has SLURM_PROCID=0 and SLURM_NTASKS too, but only srun sets SLURM_STEP_NUM_TASKS."""
    is_other_task = env.get("SLURM_PROCID", "0") != "0"
    num_tasks = env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "several") if is_other_task else "1")
    if "SLURM_PROCID" in env and num_tasks != "1":
        raise UnsupportedError(
            f"srun has started {num_tasks} tasks, and each would run on its own",
            argument="SLURM_PROCID",
            value=env["SLURM_PROCID"],
            remedy="let srun start one torchrun per node, use mpirun, or run a single task with srun -n1",
        )


def count_gpus() -> int:
    """The number of GPUs that torch can use; torch is not loaded where there is no driver."""
    if not any(Path(path).exists() for path in _GPU_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def count_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_own_cores(pid: int, rank: int, num_ranks: int) -> None:
    """Pin a process that was just started to its share of the cores.

    Without pinning, a waiting rank is now and then rescheduled onto its peer's core and waits there for milliseconds.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(OSError):  # the process is dead, or pinning is not permitted
            os.sched_setaffinity(pid, own_cores(cores, rank, num_ranks))


def own_cores(cores: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """A rank's share of the cores. Ranks that outnumber the cores share one each, but not with their neighbours."""
    if num_ranks > len(cores):
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // num_ranks : -(-(rank + 1) * len(cores) // num_ranks)]


def run_job(job: Job, progress: Callable[[Progress], None]) -> Any:
    """Start the ranks of a job and return the value of rank 0. No rank and no file is left when this returns or raises.

    Raises:
        RanksRefused: if the ranks refuse the job.
        RanksFailed: if a rank dies or fails, or the time limit is reached.
    """
    inbox: queue.Queue[tuple[int, object]] = queue.Queue()
    with _exit_on_signals(), tempfile.TemporaryDirectory(prefix="ringspan-") as directory:
        ranks: list[_Rank] = []
        try:
            for rank in range(job.num_processes):
                ranks.append(_Rank(rank, job, Path(directory), inbox))  # noqa: PERF401 - the ranks started so far must be killed
            return _collect(ranks, inbox, time.monotonic() + job.timeout_s, job, progress)
        finally:
            for it in ranks:
                it.process.kill()
            for it in ranks:
                it.close()


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that `finally` and `with` clean up. Main thread only.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Rank:
    """A process that was started, and the thread that reads its messages."""

    def __init__(self, rank: int, job: Job, directory: Path, inbox: "queue.Queue[tuple[int, object]]") -> None:
        self.rank = rank
        self._log = directory / f"rank-{rank}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", "ringspan.bench.rank", str(rank), str(directory / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | RANK_ENVIRONMENT,
            )
        keep_to_own_cores(self.process.pid, rank, job.num_processes)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it is dead already; the reading thread reports that
            self.process.stdin.write(pickle.dumps(job))
            self.process.stdin.flush()
        threading.Thread(target=_listen, args=(rank, self.process.stdout, inbox), daemon=True).start()

    def close(self) -> None:
        """Wait for the end of the process."""
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def last_words(self) -> str:
        """How the process ended, and the last line it wrote."""
        code = self.process.wait()
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}{_HINTS.get(-code, '')}"
        lines = self._log.read_text(errors="replace").split("\n")
        return " ".join([f"rank {self.rank} {how}", *(f"({line.strip()})" for line in lines[::-1] if line.strip())][:2])


def _listen(rank: int, stream: BinaryIO, inbox: "queue.Queue[tuple[int, object]]") -> None:
    with stream, suppress(EOFError, pickle.UnpicklingError):
        while True:
            inbox.put((rank, pickle.load(stream)))  # noqa: S301 - from a process of our own
    inbox.put((rank, Ended()))


def _collect(
    ranks: "list[_Rank]",
    inbox: "queue.Queue[tuple[int, object]]",
    deadline: float,
    job: Job,
    progress: Callable[[Progress], None],
) -> Any:
    """Listen until all ranks have finished or one has failed."""
    done: dict[int, Any] = {}
    failures: dict[int, Failed] = {}
    ended: set[int] = set()
    at = "starting"
    while len(done) < len(ranks) and len(ended) < len(ranks):
        try:
            rank, message = inbox.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            if failures or ended - done.keys():
                break
            raise RanksFailed(
                f"no result within {job.timeout_s:g} s, while {at}; the ranks were ended; "
                "allow a longer timeout, or measure less"
            ) from None
        match message:
            case Progress():
                progress(message)
                at = message.what
            case Done(value):
                done[rank] = value
            case Failed():
                failures[rank] = message
            case Ended():
                ended.add(rank)
        if failures or ended - done.keys():
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    if len(done) == len(ranks):
        return done[0]
    raise _failure(ranks, failures, ended - done.keys() - failures.keys())


def _failure(ranks: "list[_Rank]", failures: dict[int, Failed], dead: set[int]) -> RanksFailed:
    """The cause: a rank that died, else a rank that failed by itself, else any that reported a failure."""
    if dead:
        return RanksFailed("; ".join(ranks[rank].last_words() for rank in sorted(dead)))
    order = ("error", "refused", "transport")
    rank, failure = min(failures.items(), key=lambda item: (order.index(item[1].reason), item[0]))
    if failure.refusal is not None:
        return RanksRefused(failure.refusal)  # all ranks raise the same
    return RanksFailed(f"rank {rank}: {failure.text}" if failure.reason == "error" else failure.text)

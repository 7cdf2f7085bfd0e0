"""Who starts the ranks, watches them, and sees to it that none is left behind?

The parent loads no torch: it starts processes, hands each a job on its standard input, and reads messages from its
standard output. Every way of ending ends the ranks: a result, an error, the time limit and Ctrl-C, because the parent
kills them on its way out; and its own sudden death, because then their standard input closes, and they look for that.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from ringspan.bench.settings import Job

RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Else glibc gives freed memory back and asks for it again, page by page, which takes 2 to 6 % of a call.
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
}
_GRACE_S = 3.0  # for other ranks to say what happened, after the first has failed
_HINTS: dict[int, str] = {
    signal.SIGKILL: ", as is done when memory runs out",
    signal.SIGILL: (
        ", an instruction this CPU lacks; if a virtual machine promises more than it has, "
        "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment helps with half types"
    ),
}
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


class RanksFailed(Exception):  # noqa: N818
    """A rank could not do its job; the message is one line."""


class RanksRefused(RanksFailed):
    """The job asks for something that cannot be computed here."""


class Progress(NamedTuple):
    """How far a job is."""

    done: int
    total: int
    what: str


class Done(NamedTuple):
    """A rank has finished."""

    value: Any


class Failed(NamedTuple):
    """A rank has not. Transport errors are often only the echo of another rank's failure."""

    reason: Literal["refused", "error", "transport"]
    text: str


class Ended(NamedTuple):
    """A rank's process will say no more."""


class Launched(NamedTuple):
    """This process is a rank that somebody else has started."""

    by: Literal["torchrun", "mpirun"]
    rank: int
    world_size: int


def find_launcher(env: Mapping[str, str]) -> Launched | None:
    """Whether torchrun or mpirun has started this process."""
    for by, rank, world_size in (
        ("torchrun", "RANK", "WORLD_SIZE"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ):
        if rank in env and world_size in env and (by == "mpirun" or "MASTER_ADDR" in env):
            return Launched("torchrun" if by == "torchrun" else "mpirun", int(env[rank]), int(env[world_size]))
    return None


def count_gpus() -> int:
    """GPUs that torch can use; it is not loaded where there is no driver."""
    if not any(Path(path).exists() for path in _GPU_DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def count_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_to_own_cores(pid: int, rank: int, num_ranks: int) -> None:
    """Let a process that was just started use its share of the cores only.

    Left to the scheduler, a rank that waited is now and then woken on the core where another computes, and stands there
    for milliseconds.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(OSError):  # it is dead already, or may not be told where to run: then it runs anywhere
            os.sched_setaffinity(pid, own_cores(cores, rank, num_ranks))


def own_cores(cores: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """A rank's share of the cores; where ranks outnumber them, one that it shares, but not with its neighbours."""
    if num_ranks > len(cores):
        return [cores[rank % len(cores)]]
    return cores[rank * len(cores) // num_ranks : -(-(rank + 1) * len(cores) // num_ranks)]


def run_job(job: Job, progress: Callable[[Progress], None]) -> Any:
    """Start the ranks of a job and return the value of rank 0; no rank is left when this returns or raises."""
    inbox: queue.Queue[tuple[int, object]] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="ringspan-") as directory:
        ranks: list[_Rank] = []
        try:
            for rank in range(job.num_processes):
                ranks.append(_Rank(rank, job, Path(directory), inbox))  # noqa: PERF401 - those begun must be ended
            return _collect(ranks, inbox, time.monotonic() + job.timeout_s, job, progress)
        finally:
            for it in ranks:
                it.process.kill()
            for it in ranks:
                it.process.wait()


class _Rank:
    """A process that was started, and the thread that listens to it."""

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
        with suppress(BrokenPipeError):  # it is dead already, and the listener will find out
            self.process.stdin.write(pickle.dumps(job))
            self.process.stdin.flush()
        threading.Thread(target=_listen, args=(rank, self.process.stdout, inbox), daemon=True).start()

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
                "allow more time with --timeout, or measure less"
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
    """The cause: a rank that died, else one that failed by itself, else whoever complained."""
    if dead:
        return RanksFailed("; ".join(ranks[rank].last_words() for rank in sorted(dead)))
    order = ("error", "refused", "transport")
    rank, failure = min(failures.items(), key=lambda item: (order.index(item[1].reason), item[0]))
    if failure.reason == "refused":
        return RanksRefused(failure.text)  # every rank says the same
    return RanksFailed(f"rank {rank}: {failure.text}" if failure.reason == "error" else failure.text)

"""What does one rank do: find its group, do its job, and never outlive the process that started it.

Run as a module it is a process of `launch.py`: `python -m ringspan.bench.rank RANK STORE`. The job comes on standard
input, which stays open as long as the parent lives; messages go to what was standard output, and whatever libraries
print goes to standard error.
"""

import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from ringspan.algorithms import register_entry_points
from ringspan.bench.launch import Done, Failed, Launched, Progress
from ringspan.bench.settings import Job
from ringspan.errors import RingspanError, TransportError

Report = Callable[[Progress], None]


def main() -> None:
    """The main function of a rank that `launch.py` started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    rank, store = int(sys.argv[1]), sys.argv[2]
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    job: Job = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent
    threading.Thread(target=_end_with_parent, args=(Path(store).parent,), daemon=True).start()

    def report(progress: Progress) -> None:
        if rank == 0:
            _tell(channel, progress)

    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        _tell(channel, Done(_run(job, rank, f"file://{store}", rank, report)))
    except BaseException as error:
        _tell(channel, _failed(error))
    # The interpreter's own exit would wait for an aborted group to be torn down.
    sys.stderr.flush()
    os._exit(0)


def run_here(job: Job, launched: Launched, report: Report) -> Any:
    """Run a job as a rank that torchrun or mpirun has started; returns rank 0's value, None on the others."""
    local_rank = int(os.environ.get("LOCAL_RANK", launched.rank))
    return _run(job, launched.rank, "env://", local_rank, report if launched.rank == 0 else lambda _: None)


def _run(job: Job, rank: int, rendezvous: str, local_rank: int, report: Report) -> Any:
    import torch

    torch.set_num_threads(1)
    register_entry_points()
    do = _find(job)
    if job.carrier == "threads":
        from ringspan.transports.in_process import run_in_process

        def quietly(group: Any) -> Any:
            return do(job, group, torch.device("cpu"), report if group.rank == 0 else lambda _: None)

        return run_in_process(quietly, job.world_size, timeout_s=job.timeout_s)[0]
    from ringspan.bench.group import open_group

    device = torch.device("cuda", local_rank) if job.carrier == "nccl" else torch.device("cpu")
    return do(job, open_group(job.carrier, rank, job.world_size, rendezvous, device, job.timeout_s), device, report)


def _find(job: Job) -> Callable[[Job, Any, Any, Report], Any]:
    if job.name == "measure":
        from ringspan.bench.measure import measure

        return measure
    if job.name == "calibrate":
        from ringspan.bench.calibrate import calibrate

        return calibrate
    if job.name == "inference":
        from ringspan.bench.inference import measure_inference

        return measure_inference
    if job.name == "transformer":
        from ringspan.bench.transformer import measure_transformer

        return measure_transformer
    if job.name == "video":
        from ringspan.bench.video import measure_video

        return measure_video
    from ringspan.bench import selfcheck

    return selfcheck.check_alone if job.name == "check_alone" else selfcheck.check_group


def _tell(channel: BinaryIO, message: object) -> None:
    pickle.dump(message, channel)
    channel.flush()


def _failed(error: BaseException) -> Failed:
    if isinstance(error, TransportError):
        return Failed("transport", str(error))
    if isinstance(error, RingspanError):
        return Failed("refused", str(error), _portable(error))
    return Failed("error", describe(error))


def _portable(error: RingspanError) -> RingspanError:
    """The error, or one with the same text if the value it carries cannot be pickled."""
    try:
        pickle.dumps(error)
    except Exception:
        return type(error)(str(error))
    return error


def describe(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _end_with_parent(folder: Path) -> None:
    """End when the parent is gone, and remove the folder that it can no longer remove.

    The parent sends nothing after the job, so reading returns only when its end of the pipe is closed.
    """
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main()

"""What does one rank of a team do? It gets ready, then runs what it is told.

Messages are lines of JSON: the names of contenders come in; seconds, CPU seconds of all threads, and failures go out.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import torch
import torch.distributed as dist

from comparison.case import Case, Contender, check
from comparison.points import MODULES, Point


def main() -> None:
    task = json.loads(sys.argv[1])
    point, rank = Point(**task["point"]), task["rank"]
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries are not messages
    if task["limit_bytes"] is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (task["limit_bytes"],) * 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=point.world_size)
    try:
        contenders, wrong = _make_ready(point, rank, task["contenders"])
        _tell(channel, wrong=wrong)
        for line in sys.stdin:
            seconds, cpu_seconds = _time(contenders[json.loads(line)].run)
            _tell(channel, seconds=seconds, cpu_seconds=cpu_seconds)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        _tell(channel, failed=f"{type(error).__name__}: {lines[0]}")
    sys.stderr.flush()
    os._exit(0)  # after a failure of another rank, tearing down a group can take long


def _make_ready(point: Point, rank: int, names: list[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders, and what is wrong with their results on a small case."""
    small, case = Case.of(point.small(), rank), Case.of(point, rank)
    contenders, wrong = {}, {}
    for name in names:
        module = next(module for module, theirs in MODULES.items() if name in theirs)
        make: Callable[[Case], Contender] = importlib.import_module(module).CONTENDERS[name]
        if (found := check(small, make(small))) is not None:
            wrong[name] = found
        contenders[name] = make(case)
    return contenders, wrong


def _time(run: Callable[[], object]) -> tuple[float, float]:
    """Wait for all ranks without using a core."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - cpu_start


def _tell(channel: TextIO, **message: Any) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()

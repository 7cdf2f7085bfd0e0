"""Two gloo processes on this machine with one thread each, and their measurements."""

import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

WORLD_SIZE = 2


class Cost(NamedTuple):
    """One run in seconds: wall time on rank 0, and CPU time of both ranks with all threads."""

    wall_s: float
    cpu_s: float


def on_pair(measure: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of measure(rank, *args) of each process."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ProcessPoolExecutor(WORLD_SIZE, mp_context=mp.get_context("spawn")) as pool,
    ):
        store = str(Path(directory, "store"))
        ranks = [pool.submit(_join_and_run, measure, rank, store, args) for rank in range(WORLD_SIZE)]
        return [rank.result() for rank in ranks]


def _join_and_run(measure: Callable[..., Any], rank: int, store: str, args: tuple[Any, ...]) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    try:
        return measure(rank, *args)
    finally:
        dist.barrier()
        dist.destroy_process_group()


def time_in_turn(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Cost]]:
    """Measure each run on one rank, round by round, after one warm-up round."""
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            costs[name].append(Cost(time.perf_counter() - wall, time.process_time() - cpu))
    return {name: of_rounds[1:] for name, of_rounds in costs.items()}


def of_both(first: list[Cost], second: list[Cost]) -> list[Cost]:
    """Return the wall time of the first rank and the CPU time of both."""
    return [Cost(a.wall_s, a.cpu_s + b.cpu_s) for a, b in zip(first, second, strict=True)]


def ratio(these: list[float], those: list[float]) -> float:
    """Return the median of ratios, each of two runs of the same round."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))

"""Gloo processes for benchmarks, one thread each."""

import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringspan.bench.launch import RANK_ENVIRONMENT, keep_to_own_cores


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Return the result of fn(rank, *args) on each of `world_size` processes of one default group."""
    context = mp.get_context("spawn")
    os.environ.update(RANK_ENVIRONMENT)  # the processes inherit it
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(target=_run, args=(fn, rank, world_size, str(Path(folder, "store")), pipe[1], args))
            for rank, pipe in enumerate(pipes)
        ]
        for rank, (process, (_, child)) in enumerate(zip(processes, pipes, strict=True)):
            process.start()
            keep_to_own_cores(process.pid, rank, world_size)
            child.close()
        try:
            answers = [pipe[0].recv() for pipe in pipes]
        except EOFError:
            raise SystemExit("a rank ended without an answer") from None
        finally:
            for process in processes:
                process.join(30)
                process.kill()
        for rank, (is_well, answer) in enumerate(answers):
            if not is_well:
                raise SystemExit(f"rank {rank}:\n{answer}")
        return [answer for _, answer in answers]


def _run(fn: Callable[..., Any], rank: int, world_size: int, store: str, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        pipe.send((True, fn(rank, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()

"""Real processes for tests: gloo ranks that are started quickly, watched, and never left behind.

A fork server imports torch once, so that starting a rank costs a fork. Each run has a hard deadline.
"""

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "ringspan.call", "ringspan.collectives"])


class Ended(NamedTuple):
    """How one rank ended: with a value, with an error, or without a word (killed, exit code)."""

    value: Any
    error: BaseException | None
    exit_code: int | None
    seconds: float

    @property
    def message(self) -> str:
        """The error with its notes."""
        return "" if self.error is None else "\n".join([str(self.error), *getattr(self.error, "__notes__", [])])


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, group_timeout_s: float = 30.0
) -> list[Ended]:
    """Run fn(rank, *args) on `world_size` gloo processes; every one of them is gone when this returns."""
    port = _free_port()
    pipes, processes = [], []
    began = time.monotonic()
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(sender, fn, rank, world_size, port, group_timeout_s, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return [_collect(pipe, process, began, timeout_s) for pipe, process in zip(pipes, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def values(ended: list[Ended]) -> list[Any]:
    """The values of ranks that must all have ended well."""
    for rank, end in enumerate(ended):
        assert end.error is None, f"rank {rank}: {end.error!r}\n{end.message}"
        assert end.exit_code in (0, None), f"rank {rank} exited with {end.exit_code}"
    return [end.value for end in ended]


def _collect(pipe: Any, process: Any, began: float, timeout_s: float) -> Ended:
    left = max(0.0, timeout_s - (time.monotonic() - began))
    try:
        if pipe.poll(left):
            value, error = pipe.recv()
            return Ended(value, error, None, time.monotonic() - began)
    except EOFError:
        process.join(5)
        return Ended(None, None, process.exitcode, time.monotonic() - began)
    raise TimeoutError(f"a rank did not end within {timeout_s} s")


def _rank(
    pipe: Any, fn: Callable[..., Any], rank: int, world_size: int, port: int, group_timeout_s: float, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout_s)
    )
    try:
        result = (fn(rank, *args), None)
    except BaseException as error:
        error.add_note("".join(traceback.format_tb(error.__traceback__)[-3:]))
        result = (None, error)
    pipe.send(result)
    pipe.close()
    # A rank that is through stays until the others are, as a process in a real job does; it is killed then.
    time.sleep(3600)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

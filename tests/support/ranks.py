"""Real processes for tests: gloo ranks that start fast, are watched, and are never left behind.

`run_ranks` forks ranks from a server that has imported torch once, so that a run costs tenths of a second. A rank that
is done waits for all others, as in a real job, and must then exit. `run_interpreters` starts whole interpreters that
end like a script as soon as they are done; it is slower, and tests the shutdown of an interpreter. Both have a hard
deadline, after which every rank is killed.

The first rank serves the group's store on a port from the system, so that simultaneous runs never collide.
"""

import functools
import importlib
import multiprocessing as mp
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

_CONTEXT = mp.get_context("forkserver")
# Everything that ranks would import separately; assert_close imports torch.distributed.tensor.
_CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "ringspan.training._collectives",
        "ringspan.training._batches",
        "ringspan.adapters.transformers",
        "support.attention_cases",
        "support.families",
        "pytest",
    ]
)

_TESTS = Path(__file__).parents[1]
_PYTHONPATH = os.pathsep.join([str(_TESTS), str(_TESTS / "distributed"), *filter(None, [os.environ.get("PYTHONPATH")])])
_EXIT_S = 20.0  # for a rank to exit after all are done


class Ended(NamedTuple):
    """How one rank ended: with a value, an error, or neither. `seconds` is the rank's own measure of fn."""

    value: Any
    error: BaseException | None
    exit_code: int | None
    seconds: float

    @property
    def message(self) -> str:
        """The error with its notes."""
        return "" if self.error is None else "\n".join([str(self.error), *getattr(self.error, "__notes__", [])])


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 100.0,
    group_timeout_s: float = 30.0,
    frozen: int | None = None,
) -> list[Ended]:
    """Run fn(rank, *args) on `world_size` gloo processes; every one of them is gone when this returns.

    `frozen` is a rank that will not end by itself: it is killed when the others are through.
    """
    _start_server()
    deadline = time.monotonic() + timeout_s
    ranks = [_Rank(fn, rank, world_size, group_timeout_s, args) for rank in range(world_size)]
    try:
        port = ranks[0].receive(deadline)
        for rank in ranks[1:]:
            rank.pipe.send_bytes(port)
        reports = [None if rank.rank == frozen else rank.receive(deadline) for rank in ranks]
        if frozen is not None:
            ranks[frozen].process.kill()
        return [rank.leave(report) for rank, report in zip(ranks, reports, strict=True)]
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def values(ended: list[Ended]) -> list[Any]:
    """Return the values of ranks that must all have ended well."""
    for rank, end in enumerate(ended):
        assert end.error is None, f"rank {rank}: {end.error!r}\n{end.message}"
        assert end.exit_code == 0, f"rank {rank} exited with {end.exit_code}"
    return [end.value for end in ended]


@functools.cache
def _start_server() -> None:
    """Start the server with a path to our modules, which Python 3.11 takes only from the environment."""
    with mock.patch.dict(os.environ, PYTHONPATH=_PYTHONPATH):
        forkserver.ensure_running()


class _Rank:
    """The parent's view of one rank."""

    def __init__(
        self, fn: Callable[..., Any], rank: int, world_size: int, group_timeout_s: float, args: tuple[Any, ...]
    ) -> None:
        self.rank = rank
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(
            target=_serve, args=(theirs, fn, rank, world_size, group_timeout_s, args), daemon=True
        )
        self.process.start()
        theirs.close()

    def receive(self, deadline: float) -> bytes | None:
        """Return the rank's report; None if it died without one."""
        if not self.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {self.rank} did not end in time")
        try:
            return self.pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return None

    def leave(self, report: bytes | None) -> Ended:
        """Let the rank exit, which it must."""
        self.pipe.close()
        self.process.join(_EXIT_S)
        if self.process.exitcode is None:
            raise TimeoutError(f"rank {self.rank} was through, but did not exit within {_EXIT_S:g} s")
        if report is None:
            return Ended(None, None, self.process.exitcode, 0.0)
        value, error, seconds = pickle.loads(report)
        return Ended(value, error, self.process.exitcode, seconds)


def _serve(
    pipe: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    group_timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    """Run one rank of `run_ranks`, in its process."""
    import torch.distributed as dist

    _join_group(
        rank,
        world_size,
        group_timeout_s,
        tell_port=lambda port: pipe.send_bytes(str(port).encode()),
        ask_port=lambda: int(pipe.recv_bytes()),
    )
    value, raised = None, None
    began = time.monotonic()
    try:
        value = fn(rank, *args)
    except BaseException as error:
        raised = error
        error.add_note("".join(traceback.format_tb(error.__traceback__)[-3:]))
    pipe.send_bytes(pickle.dumps((value, raised, time.monotonic() - began)))
    pipe.poll(None)  # until the parent closes its end
    if dist.is_initialized():
        dist.destroy_process_group()


def _join_group(
    rank: int,
    world_size: int,
    timeout_s: float,
    tell_port: Callable[[int], None],
    ask_port: Callable[[], int],
) -> None:
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False)
        tell_port(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", ask_port(), world_size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


class Exited(NamedTuple):
    """How an interpreter ended; `seconds` from the first start to the last exit."""

    exit_code: int
    output: str
    errors: str
    seconds: float


def run_interpreters(
    fn: Callable[[int, int], Any], world_size: int, *, timeout_s: float = 100.0, group_timeout_s: float = 30.0
) -> list[Exited]:
    """Run fn(rank, world_size) as a whole script, one interpreter per rank."""
    began = time.monotonic()
    command = [sys.executable, "-c", "from support import ranks; ranks._script()", fn.__module__, fn.__qualname__]
    processes: list[Any] = []
    try:
        for rank in range(world_size):
            pipe = subprocess.PIPE
            numbers = [str(rank), str(world_size), str(group_timeout_s)]
            processes.append(
                subprocess.Popen(
                    [*command, *numbers],
                    stdin=pipe,
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                    env=os.environ | {"PYTHONPATH": _PYTHONPATH},
                )
            )
        port = processes[0].stdout.readline()
        for process in processes[1:]:
            process.stdin.write(port)
            process.stdin.flush()
        exited = []
        for process in processes:
            output, errors = process.communicate(timeout=max(0.0, began + timeout_s - time.monotonic()))
            exited.append(Exited(process.returncode, output, errors, time.monotonic() - began))
        return exited
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _print_port(port: int) -> None:
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


def _script() -> None:
    """Run one rank of `run_interpreters`; its port comes from the first rank through the parent."""
    module, name, rank, world_size, timeout_s = sys.argv[1:]
    fn = getattr(importlib.import_module(module), name)
    _join_group(
        int(rank),
        int(world_size),
        float(timeout_s),
        tell_port=_print_port,
        ask_port=lambda: int(sys.stdin.readline()),
    )
    fn(int(rank), int(world_size))

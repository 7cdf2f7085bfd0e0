"""Who starts the ranks, notices that one is lost, and restarts them?

The front holds a pipe to every rank that it has started. A rank is lost if its process ends, if it reports an error,
or if it is silent for too long: stopped, or caught in a command. Then all ranks end, since a group that has lost one is
of no more use, and all are started again. The server ends, with the reason, at the fourth loss within a minute or after
four starts in a row that failed. Under torchrun it ends at the first loss, because torchrun starts the ranks.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ringspan.serve.frames import Frame, pack, read_async
from ringspan.serve.settings import ServeSettings

MAX_RESTARTS = 3
WITHIN_S = 60.0
_CAUSE_S = 0.5
"""For other ranks to report, after the first did: the first is often only the echo of the cause."""
_END_S = 5.0
_SAVE_S = 60.0
"""For all conversations to be written, if they are saved."""
_LOOK_S = 0.2
_ECHO = 3
"""The exit code of a rank that has reported its error."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
}
_SECRETS = ("RINGSPAN_API_KEY",)

log = logging.getLogger("ringspan.serve")


class RankLoss(NamedTuple):
    """The reason why a rank is lost. Among several, the one with the lowest order is the cause."""

    order: int
    text: str
    is_refusal: bool = False


class Supervisor:
    """The ranks of a server.

    Args:
        settings: What the ranks serve.
        heard: Called with each message of rank 0 about a request.
        lost: Called with the reason when ranks are lost, before they are started again.

    Attributes:
        state: "starting", "ready", "restarting", "stopping" or "failed".
        failure: Why the server gave up; None as long as it did not.
        num_restarts: How often the ranks were started again.
        pids: The process of each rank.
        max_tokens: The longest conversation that fits the cache; known once the ranks are ready.
    """

    def __init__(self, settings: ServeSettings, heard: Callable[[Frame], None], lost: Callable[[str], None]) -> None:
        self._settings = settings
        self._num_started = 1 if settings.is_under_torchrun else settings.num_ranks
        self._heard_message = heard
        self._lost = lost
        self._processes: list[Process] = []
        self._last_heard: list[float] = []
        self._losses: asyncio.Queue[RankLoss] = asyncio.Queue()
        self._became_ready = self._has_been_ready = False
        self.state = "starting"
        self.failure: str | None = None
        self.num_restarts = 0
        self.max_tokens = 0
        self.ready = asyncio.Event()

    @property
    def pids(self) -> list[int]:
        """The process of each rank."""
        return [process.pid for process in self._processes]

    def send(self, frame: Frame) -> None:
        """Send rank 0 a frame; if rank 0 is lost, `lost` is called soon."""
        stdin = self._processes[0].stdin
        assert stdin is not None
        with suppress(ConnectionError, RuntimeError):
            stdin.write(pack(frame))

    async def run(self) -> None:
        """Keep ranks running until they fail too often, or this task is cancelled."""
        losses: list[float] = []
        failed_starts = 0
        while True:
            loss = await self._run_once()
            now = time.monotonic()
            losses = [then for then in losses if now - then < WITHIN_S] + [now]
            failed_starts = 0 if self._became_ready else failed_starts + 1
            log.error("ranks lost: %s", loss.text)
            if self._settings.is_under_torchrun or (loss.is_refusal and not self._has_been_ready):
                self.failure = loss.text
            elif len(losses) > MAX_RESTARTS:
                self.failure = f"ranks were lost {len(losses)} times within {WITHIN_S:g} s, the last time: {loss.text}"
            elif failed_starts > MAX_RESTARTS:  # those of a large model may take minutes each
                self.failure = f"ranks were lost in {failed_starts} starts in a row, the last time: {loss.text}"
            if self.failure is not None:
                self.state = "failed"
                self._lost(loss.text)
                return
            self.num_restarts += 1

    async def _run_once(self) -> RankLoss:
        """Start the ranks and return when one is lost, after ending all others."""
        self._processes, self._losses, self._became_ready = [], asyncio.Queue(), False
        tasks: list[asyncio.Task[None]] = []
        with tempfile.TemporaryDirectory(prefix="ringspan-serve-") as folder:
            try:
                for rank in range(self._num_started):
                    self._processes.append(await self._start(rank, Path(folder) / "store"))
                self._last_heard = [time.monotonic()] * len(self._processes)
                tasks = [asyncio.create_task(self._listen(rank)) for rank in range(len(self._processes))]
                tasks.append(asyncio.create_task(self._watch()))
                loss = await self._losses.get()
                self._leave_ready("restarting")
                await asyncio.sleep(_CAUSE_S)
                while not self._losses.empty():
                    loss = min(loss, self._losses.get_nowait())
                if self.state != "stopping":
                    self._lost(loss.text)
                return loss
            except asyncio.CancelledError:
                self._leave_ready("stopping")
                await self._end()
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await self._kill()

    def _leave_ready(self, state: str) -> None:
        self.ready.clear()
        self.state = state

    async def _start(self, rank: int, store: Path) -> Process:
        settings = self._settings
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "ringspan.serve.rank",
            str(rank),
            str(store),
            stdin=PIPE,
            stdout=PIPE,
            env={name: value for name, value in os.environ.items() if name not in _SECRETS} | _ENVIRONMENT,
            start_new_session=True,  # Ctrl-C in a terminal is for the front
        )
        if not settings.is_under_torchrun:
            _keep_to_own_cores(process.pid, rank, settings.num_ranks)
        task = settings.task(verify=settings.verify and not self._has_been_ready)
        assert process.stdin is not None
        process.stdin.write(pack(task))
        return process

    async def _listen(self, rank: int) -> None:
        """Read a rank's frames until its process ends."""
        process = self._processes[rank]
        assert process.stdout is not None
        while (frame := await read_async(process.stdout)) is not None:
            self._last_heard[rank] = time.monotonic()
            self._take(rank, frame)
        code = await process.wait()
        if code == _ECHO:
            return
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        self._losses.put_nowait(RankLoss(0, f"rank {rank} {how}"))

    def _take(self, rank: int, frame: Frame) -> None:
        match frame["kind"]:
            case "beat":
                pass
            case "ready":
                self.max_tokens = frame["max_tokens"]
                self._became_ready = self._has_been_ready = True
                self.state = "ready"
                self.ready.set()
                log.info(
                    "ready: %d ranks, room for conversations of %d tokens, %d saved conversations",
                    self._settings.num_ranks,
                    self.max_tokens,
                    frame["saved"],
                )
            case "failed":
                order = {"refused": 1, "error": 2, "transport": 4}[frame["reason"]]
                self._losses.put_nowait(RankLoss(order, f"rank {rank}: {frame['text']}", frame["reason"] == "refused"))
            case _:
                self._heard_message(frame)

    async def _watch(self) -> None:
        """Watch for ranks that send no heartbeat."""
        limit_s = self._settings.rank_timeout_s
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            silent = [rank for rank, heard in enumerate(self._last_heard) if now - heard > limit_s]
            if silent:
                self._losses.put_nowait(RankLoss(3, f"rank {silent[0]} did not answer for {limit_s:g} s"))
                return

    async def _end(self) -> None:
        """Ask the ranks to end and wait for them."""
        if not self._processes:
            return
        self.send({"kind": "end"})
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        _, late = await asyncio.wait(waits, timeout=_END_S if self._settings.save_dir is None else _SAVE_S)
        for wait in late:
            wait.cancel()

    async def _kill(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            await process.wait()


def _keep_to_own_cores(pid: int, rank: int, num_ranks: int) -> None:
    """Pin each rank to its own cores; otherwise waiting ranks are woken on a core where another rank computes."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with suppress(OSError):  # it is dead already, or may run anywhere
            os.sched_setaffinity(pid, cores[rank % len(cores) :: num_ranks])

"""How does a rank wait for gloo with a deadline?

A wait in gloo can be neither polled nor cancelled, and it never ends if the peer dies in the middle of a message. So a
thread waits in gloo and the caller waits for the thread; meanwhile the caller can look for failures, and it can give up
without the thread. A long message is sent in parts, so that the number of parts that arrived shows progress.

An abandoned wait keeps its thread and its buffers until gloo returns; until then these buffers must not be reused.

`WaitClock` says whether a wait has gone on for too long. Only time without progress counts; while the awaited rank is
known to be alive and busy with other work (loading data, compiling), a separate, longer limit applies.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

PART_BYTES = 2**20
_NEVER = timedelta(seconds=1e9)  # gloo adds it to the current time, so it must not overflow


def cut(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a contiguous tensor into the parts in which both ends send and receive it."""
    if tensor.nbytes <= PART_BYTES:
        return (tensor,)
    return torch.split(tensor.view(-1).view(torch.uint8), PART_BYTES)


class GlooMessage:
    """The parts of one message that gloo has started to send or receive."""

    def __init__(self, works: Sequence[Any], nbytes: int) -> None:
        self.nbytes = nbytes
        self._works = works
        self._num_done = 0
        self._error: RuntimeError | None = None
        self._is_over = threading.Event()

    @property
    def bytes_done(self) -> int:
        """The number of bytes that have certainly been sent or received."""
        return min(self._num_done * PART_BYTES, self.nbytes)

    def advance(self, timeout_s: float) -> bool:
        """Wait for a limited time and return whether the message is complete; RuntimeError if it never will be."""
        if not self._is_over.wait(timeout_s):
            return False
        if self._error is not None:
            raise self._error
        return True

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait(_NEVER)
                self._num_done += 1
        except RuntimeError as error:
            self._error = error
        self._is_over.set()


class Waiter:
    """A thread that waits in gloo. A thread whose wait never returns is replaced."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[GlooMessage | None] | None = None

    def start(self, message: GlooMessage) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_run, args=(self._jobs,), name="ringspan gloo", daemon=True).start()
        self._jobs.put(message)

    def abandon(self) -> None:
        """Detach from the thread; it ends when its current wait ends."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def _run(jobs: "queue.SimpleQueue[GlooMessage | None]") -> None:
    while (message := jobs.get()) is not None:
        message.run()
        del message


class WaitClock:
    """The deadline of one wait: `stall_s` without progress end it, or `limit_s` if the awaited rank is busy."""

    def __init__(self, stall_s: float, limit_s: float) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._counts_since = self._last_at = time.monotonic()
        self._bytes_done = 0
        self._is_noted = False

    @property
    def left_s(self) -> float:
        """Seconds that the wait may take before the next `look`."""
        ends_at = min(self._counts_since + self._stall_s, self._last_at + self._limit_s)
        return max(ends_at - time.monotonic(), 0.0)

    def look(self, bytes_done: int, is_busy: Callable[[], bool]) -> float | None:
        """The limit that has passed, in seconds; None if the wait may go on."""
        now = time.monotonic()
        if bytes_done > self._bytes_done:
            self._bytes_done, self._counts_since, self._last_at = bytes_done, now, now
        elif self._limit_s > self._stall_s and is_busy():
            self._counts_since = now
        if now - self._last_at >= self._limit_s:
            return self._limit_s
        return self._stall_s if now - self._counts_since >= self._stall_s else None

    def is_worth_a_note(self) -> bool:
        """Whether the wait would have ended by now if the awaited rank were not busy; True only once."""
        if self._is_noted or time.monotonic() - self._last_at < self._stall_s:
            return False
        self._is_noted = True
        return True

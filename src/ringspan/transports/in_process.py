"""Ranks as threads of one process: the same programs in a notebook or a test, without a launcher.

A message is copied once, from the sender's tensor into the receiver's buffer, by the side that posts second. So a wait
needs only that the other rank has posted its end, and the order of waits does not matter; there are no threads besides
the ranks. Unlike a network, this transport knows both sizes, and it refuses a message that does not fit its buffer.

A group that has failed stays failed, because its pending messages could be mistaken for those of a later call.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from ringspan.arguments import CALLABLE, NUMBER, WHOLE, check_arguments
from ringspan.errors import ShapeError, TransportError
from ringspan.transports.base import Posted, Receive, Send

T = TypeVar("T")

_MOST_THREADS = 1024
_GRACE_S = 1.0  # after a run's time limit, for ranks to notice that their waits have ended


class _End:
    """One rank's end of a message, and the handle it waits on."""

    __slots__ = ("_done", "_is_through", "_room", "peer", "rank", "side", "tensor")

    def __init__(
        self, room: "_Room", side: Literal["send", "receive"], rank: int, peer: int, tensor: torch.Tensor
    ) -> None:
        assert tensor.is_contiguous()
        self.side = side
        self.rank = rank
        self.peer = peer
        self.tensor = tensor
        self._room = room
        self._is_through = False
        self._done = threading.Event()

    def finish(self, is_through: bool) -> None:
        self._is_through = is_through
        self._done.set()

    def wait(self, timeout_s: float | None) -> None:
        timeout_s = self._room.timeout_s if timeout_s is None else timeout_s
        if not self._done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            self._room.fail(self.rank, f"{self} timed out after {timeout_s:g} s: rank {self.peer} did not post its end")
        if not self._is_through:
            raise TransportError(str(self._room.failure))

    def __str__(self) -> str:
        way = "to" if self.side == "send" else "from"
        return f"rank {self.rank}: the {self.side} of {self.tensor.nbytes} bytes {way} rank {self.peer}"


class _Round:
    """One all-gather of bytes; done when all ranks have contributed or the group has failed."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}
        self.done = threading.Event()


class _Room:
    """The state that the ranks of one run share."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self.failed_rank: int | None = None
        self._lock = threading.RLock()
        self._returned: set[int] = set()
        # Per (src, dst), in order. Only ends of one side are queued, because an end is matched when both exist.
        self._unmatched: defaultdict[tuple[int, int], deque[_End]] = defaultdict(deque)
        self._num_gathers = [0] * world_size  # by rank
        self._rounds: defaultdict[int, _Round] = defaultdict(_Round)  # the pending gathers, by number

    def post(self, end: _End) -> None:
        """Match an end with the first one that waits for it, or queue it for the peer."""
        assert 0 <= end.peer < self.world_size
        channel = (end.rank, end.peer) if end.side == "send" else (end.peer, end.rank)
        with self._lock:
            if self.failure is not None:
                return end.finish(False)
            waiting = self._unmatched[channel]
            if not waiting or waiting[0].side == end.side:
                waiting.append(end)
                return self._fail_if_returned(end)
            other = waiting.popleft()
        # The copy runs outside the lock, so that other pairs of ranks can proceed.
        return self._deliver(end, other)

    def gather(self, rank: int, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Gather every rank's payload; the n-th call of one rank matches the n-th call of every other rank."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            if self.failure is not None:
                raise TransportError(str(self.failure))
            self._num_gathers[rank] = number = self._num_gathers[rank] + 1
            this = self._rounds[number]
            this.payloads[rank] = payload
            if len(this.payloads) == self.world_size:
                self._rounds.pop(number).done.set()
            elif missing := self._returned - this.payloads.keys():
                self.fail(rank, _left(f"rank {rank}: the gathering of bytes", min(missing)))
        if not this.done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            silent = [peer for peer in range(self.world_size) if peer not in this.payloads]
            self.fail(
                rank, f"rank {rank}: the gathering of bytes timed out after {timeout_s:g} s: no word of ranks {silent}"
            )
        if len(this.payloads) < self.world_size:
            raise TransportError(str(self.failure))
        return list(map(this.payloads.__getitem__, range(self.world_size)))

    def fail(self, rank: int | None, reason: str) -> None:
        """End all waits with this reason; the first reason is kept."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self.failed_rank = reason, rank
            for waiting in self._unmatched.values():
                while waiting:
                    waiting.popleft().finish(False)
            for this in self._rounds.values():
                this.done.set()

    def leave(self, rank: int) -> None:
        """Fail every wait for a rank that has returned."""
        with self._lock:
            self._returned.add(rank)
            for waiting in self._unmatched.values():
                if waiting:
                    self._fail_if_returned(waiting[0])
            for this in self._rounds.values():
                if rank not in this.payloads:
                    self.fail(min(this.payloads), _left(f"rank {min(this.payloads)}: the gathering of bytes", rank))

    def _fail_if_returned(self, end: _End) -> None:
        if end.peer in self._returned:
            self.fail(end.rank, _left(str(end), end.peer))

    def _deliver(self, end: _End, other: _End) -> None:
        """Copy the message between two matched ends; if the copy fails, both ends get the error."""
        send, receive = (end, other) if end.side == "send" else (other, end)
        is_through = send.tensor.nbytes == receive.tensor.nbytes
        try:
            if is_through:
                _bytes_of(receive.tensor).copy_(_bytes_of(send.tensor))
            else:
                sizes = f"{send.tensor.nbytes} bytes to rank {receive.rank}, which expects {receive.tensor.nbytes}"
                self.fail(receive.rank, f"rank {send.rank} sends {sizes}; sizes must be the same on both ranks")
        except BaseException as error:
            is_through = False
            self.fail(end.rank, f"{end} failed with {type(error).__name__}: {error}")
            raise
        finally:
            send.finish(is_through)
            receive.finish(is_through)


def _left(waiting: str, peer: int) -> str:
    return f"{waiting} waits in vain: rank {peer} has returned already; all ranks must make the same calls"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class InProcessRank:
    """One rank of `run_in_process`: a transport, and what `group=` takes."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room = room
        self.rank = rank
        self.world_size = room.world_size
        self.timeout_s = room.timeout_s

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Post all ends. A message whose other end is already posted is copied here."""
        if self._room.failure is not None:
            raise TransportError(str(self._room.failure))
        incoming: list[_End] = []
        outgoing: list[_End] = []
        for src, buffer in receives:
            incoming.append(_End(self._room, "receive", self.rank, src, buffer))
            self._room.post(incoming[-1])
        for dst, tensor in sends:
            outgoing.append(_End(self._room, "send", self.rank, dst, tensor))
            self._room.post(outgoing[-1])
        return Posted(outgoing, incoming)

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Return every rank's payload in rank order, by reference."""
        return self._room.gather(self.rank, payload, timeout_s)

    def abort(self, reason: str) -> None:
        """End all waits of all ranks with this reason; the group stays failed."""
        self._room.fail(self.rank, reason)

    def close(self) -> None:
        """Do nothing: threads and buffers end with the run."""


def run_in_process(fn: Callable[[InProcessRank], T], world_size: int, *, timeout_s: float = 60.0) -> list[T]:
    """Call `fn(group)` on every rank, each in its own thread, and return the results in rank order.

    The exception of the first rank that fails is raised here, with a note that names the rank; the other ranks' waits
    end at once. The whole run may take `timeout_s`; a rank that computes on past that cannot be stopped, and its thread
    is left behind. Ranks run in the caller's gradient mode, autocast and default device. They share torch's random
    generator: draw inputs outside, or from a generator of each rank's own.
    """
    check_arguments(fn=(CALLABLE, fn), world_size=(WHOLE, world_size), timeout_s=(NUMBER, timeout_s))
    if not 1 <= world_size <= _MOST_THREADS:
        raise ShapeError(
            f"a group has at least one rank, and at most {_MOST_THREADS} threads",
            argument="world_size",
            value=world_size,
        )
    room = _Room(world_size, timeout_s)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}  # in the order in which ranks failed
    modes = _modes_here()

    def run(rank: int) -> None:
        try:
            with ExitStack() as entered:
                for mode in modes:
                    entered.enter_context(mode())
                results[rank] = fn(InProcessRank(room, rank))
        except BaseException as error:
            error.add_note(f"on rank {rank} of {world_size} in run_in_process")
            errors[rank] = error
            room.fail(rank, f"rank {rank} failed with {type(error).__name__}: {error}")
        room.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"ringspan rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        for thread in threads:
            thread.start()
        _join(threads, timeout_s)
    except BaseException as error:  # such as KeyboardInterrupt in a notebook
        room.fail(None, f"the run was given up: {type(error).__name__}")
        raise
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        what = f"run_in_process(timeout_s={timeout_s:g}): ranks {late} had not finished in time"
        room.fail(None, what)
        _join(threads, _GRACE_S)
        raise TransportError(f"{what}; allow more time, or see where they wait") from _first(errors, room.failed_rank)
    if (first := _first(errors, room.failed_rank)) is not None:
        raise first
    return [results[rank] for rank in range(world_size)]


def _first(errors: dict[int, BaseException], failed_rank: int | None) -> BaseException | None:
    """The error of the rank that failed first, if it raised one; else the error that was raised first."""
    return errors[failed_rank] if failed_rank in errors else next(iter(errors.values()), None)


def _modes_here() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Contexts that give other threads this thread's thread-local torch settings."""
    modes: list[Callable[[], AbstractContextManager[Any]]] = [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, is_cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            modes.append(partial(torch.autocast, kind, dtype=dtype, cache_enabled=is_cached))
    device = torch.get_default_device()
    if device.type != "cpu":
        modes.append(partial(torch.device, device))
    return modes


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))

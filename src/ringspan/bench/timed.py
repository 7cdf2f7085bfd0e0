"""What exactly does a rank do, and when? The runtime's own kernel, arithmetic and wire, with a watch on each.

Nothing is added to the runtime for this: it runs any arithmetic on any wire. On a GPU each look at the watch waits for
the stream that computes, so kernels and messages are timed, not their launches; a run under the watch is slower then.
`time_call` times a whole call without a watch, after a barrier of all ranks.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from ringspan.bench.breakdown import Interval
from ringspan.bench.conclude import Dissected
from ringspan.bench.group import meet
from ringspan.bench.result import Activity
from ringspan.kernels.base import Kernel, KernelGradients, KernelRequest, Merged
from ringspan.kernels.softmax import Partial
from ringspan.program.bind import Message
from ringspan.program.execute import Event, Value
from ringspan.program.pieces import Piece
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.reproducible_arithmetic import SteadyArithmetic
from ringspan.runtime.scratch import Scratch
from ringspan.runtime.session import lend_session, session_of
from ringspan.runtime.wire import TransportWire
from ringspan.schedule import Block, Transfer
from ringspan.transports.base import MessageHandle, Posted, Receive, Send, Transport, WrappedTransport


class Watch:
    """Records one rank's activities in one call."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.activities: list[Activity] = []
        self.message_s = 0.0  # spent in messages, where a transport is under the watch
        self.tile = ""
        self.first_step = (
            0  # of the pass under way, so that the steps of a backward pass are told from the forward ones
        )
        self._rank = rank
        self._device = device
        self._step = 0
        self._begun = 0.0, 0.0

    def now(self) -> float:
        """Seconds, on a clock that the processes of a machine share."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return time.perf_counter()

    def note(self, event: Event) -> None:
        """Note the tile that the executor computes next."""
        if event.action == "attend":
            self._step = self.first_step + event.step
            self.tile = "×".join(map(str, event.blocks))

    def computed(self, kind: Literal["attend", "merge"], name: str, start_s: float) -> None:
        """Record a computation that began at `start_s` and has just ended."""
        self.activities.append(Activity(self._rank, self._step, kind, name, start_s, self.now()))

    def begin_attention(self) -> None:
        """Begin a call of attention of which only the messages are recorded separately."""
        self._begun = self.now(), self.message_s

    def end_attention(self, name: str) -> None:
        """End attention: its time without messages is recorded."""
        start_s, message_s = self._begun
        end_s = self.now() - (self.message_s - message_s)
        self.activities.append(Activity(self._rank, self._step, "attend", name, start_s, end_s))

    def moved(
        self,
        kind: Literal["send", "receive", "sent"],
        step: int,
        transfer: Transfer,
        start_s: float,
        end_s: float,
        nbytes: int = 0,
    ) -> None:
        """Record a message that was started or waited for."""
        block, src, dst = transfer
        step += self.first_step
        self.activities.append(Activity(self._rank, step, kind, str(block), start_s, end_s, src, dst, nbytes))


class TimedKernel:
    """A kernel that records its calls."""

    def __init__(self, kernel: Kernel, watch: Watch) -> None:
        self.kernel = kernel
        self.watch = watch
        self.name = kernel.name

    def refuses(self, request: KernelRequest) -> str | None:
        return self.kernel.refuses(request)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        start_s = self.watch.now()
        part = self.kernel.forward(q, k, v, piece, scale)
        self.watch.computed("attend", self.watch.tile, start_s)
        return part

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        start_s = self.watch.now()
        part = self.kernel.backward(q, k, v, merged, piece, scale)
        self.watch.computed("attend", self.watch.tile, start_s)
        return part


class TimedArithmetic(TorchArithmetic):
    """The runtime's arithmetic with a recording kernel."""

    def __init__(self, kernel: TimedKernel, scale: float, like: torch.Tensor, scratch: Scratch | None = None) -> None:
        super().__init__(kernel, scale, like, scratch)
        self.watch = kernel.watch

    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place."""
        start_s = self.watch.now()
        super().merge(block, into, part)
        self.watch.computed("merge", str(block), start_s)

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Attend and merge: the time after the kernel is recorded as merging."""
        super().attend(piece, q, kv, out, is_first)
        self.watch.computed("merge", self.watch.tile, self.watch.activities[-1].end_s)

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Attend and add: the time after the kernel is recorded as merging."""
        sums = super().attend_grad(piece, q_grad, kv, dq, dkv)
        self.watch.computed("merge", self.watch.tile, self.watch.activities[-1].end_s)
        return sums


class TimedSteadyArithmetic(TimedArithmetic, SteadyArithmetic):
    """The arithmetic of the reproducible mode with a recording kernel."""


class TimedWire(TransportWire):
    """The runtime's wire, recording its messages; `watch` must be set before use."""

    watch: Watch

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step; they share the time that this takes."""
        start_s = self.watch.now()
        super().post(step, sends, receives)
        each_s = (self.watch.now() - start_s) / max(1, len(sends))
        for i, (message, _) in enumerate(sends):
            begun_s = start_s + i * each_s
            self.watch.moved("send", step, message.transfer, begun_s, begun_s + each_s, message.nbytes)

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for all tensors of a block."""
        start_s = self.watch.now()
        value = super().receive(step, transfer)
        self.watch.moved("receive", step, transfer, start_s, self.watch.now())
        return value

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Wait until all tensors of a block have left."""
        start_s = self.watch.now()
        super().sent(step, transfer)
        self.watch.moved("sent", step, transfer, start_s, self.watch.now())


_EVERYONE = -1


@contextmanager
def watched(group: Any, watch: Watch) -> Iterator[Transport]:
    """Replace the group's transport by a recording one inside the `with`."""
    session = session_of(group)
    transport = TimedTransport(session.transport, watch)
    contract = replace(session.contract, transport=transport)
    with lend_session(group, session._replace(transport=transport, contract=contract)):
        yield transport


class TimedTransport(WrappedTransport):
    """`inner`, recording every message that this rank starts or waits for.

    Messages between two ranks arrive in order, so a number and the two ranks are enough to tell which is which.
    """

    def __init__(self, inner: Transport, watch: Watch) -> None:
        super().__init__(inner)
        self.watch = watch
        self._numbers: Counter[tuple[int, int]] = Counter()

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Start all messages; they share the time that this takes."""
        start_s = self.watch.now()
        posted = self.inner.exchange(sends, receives)
        each_s = (self.watch.now() - start_s) / max(1, len(sends))
        outgoing, incoming = [], []
        for i, (send, handle) in enumerate(zip(sends, posted.sends, strict=True)):
            number = self._count(self.rank, send.dst)
            self.note("send", number, self.rank, send.dst, start_s + i * each_s, start_s + (i + 1) * each_s)
            outgoing.append(_TimedHandle(self, handle, "sent", number, self.rank, send.dst))
        for receive, handle in zip(receives, posted.receives, strict=True):
            number = self._count(receive.src, self.rank)
            incoming.append(_TimedHandle(self, handle, "receive", number, receive.src, self.rank))
        return Posted(outgoing, incoming)

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Gather, recorded as one message from all ranks to all ranks that arrives when the last rank has sent."""
        start_s = self.watch.now()
        everyone = self.inner.all_gather_bytes(payload, timeout_s)
        number = self._count(_EVERYONE, _EVERYONE)
        self.note("send", number, _EVERYONE, _EVERYONE, start_s, start_s)
        self.note("receive", number, _EVERYONE, _EVERYONE, start_s, self.watch.now())
        return everyone

    def note(
        self, kind: Literal["send", "receive", "sent"], number: int, src: int, dst: int, start_s: float, end_s: float
    ) -> None:
        """Record an activity."""
        self.watch.message_s += end_s - start_s
        self.watch.activities.append(Activity(self.rank, number, kind, "message", start_s, end_s, src, dst))

    def _count(self, src: int, dst: int) -> int:
        self._numbers[src, dst] += 1
        return self._numbers[src, dst]


class _TimedHandle:
    def __init__(
        self,
        transport: TimedTransport,
        inner: MessageHandle,
        kind: Literal["receive", "sent"],
        number: int,
        src: int,
        dst: int,
    ) -> None:
        self.transport = transport
        self.inner = inner
        self.kind: Literal["receive", "sent"] = kind
        self.message = number, src, dst

    def wait(self, timeout_s: float | None) -> None:
        """Wait, and record how long."""
        start_s = self.transport.watch.now()
        self.inner.wait(timeout_s)
        self.transport.note(self.kind, *self.message, start_s, self.transport.watch.now())


T = TypeVar("T")


class Timed(NamedTuple, Generic[T]):
    """The result of a call, with its wall time and processor time in seconds."""

    value: T
    taken_s: float
    cpu_s: float


def time_call(transport: Transport, device: torch.device, timeout_s: float, call: Callable[[], T]) -> Timed[T]:
    """Time a call that begins after a barrier."""
    meet(transport, timeout_s)
    _finish(device)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    value = call()
    _finish(device)
    return Timed(value, time.perf_counter() - start_s, time.process_time() - start_cpu_s)


def record_calls(
    group: Any, device: torch.device, timeout_s: float, calls: Sequence[Callable[[Watch], object]]
) -> list[Dissected]:
    """Record calls one after the other, each after a barrier."""
    watch = Watch(session_of(group).transport.rank, device)
    found = []
    with watched(group, watch) as transport:
        for call in calls:
            meet(transport, timeout_s)
            watch.activities.clear()
            start_s = watch.now()
            call(watch)
            taken = Interval(start_s, watch.now())
            found.append(Dissected(socket.gethostname(), taken, tuple(watch.activities), 0))
    return found


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

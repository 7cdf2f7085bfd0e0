"""How long does a rank spend in messages? A recording transport for a group whose calls are unchanged.

`watched` lends a group a session with such a transport, so that everything that is public runs as for a user: its
messages, and what ranks say to agree on a call.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from ringspan.bench.result import Activity
from ringspan.bench.timed import Watch
from ringspan.runtime.session import lend_session, session_of
from ringspan.transports.base import MessageHandle, Posted, Receive, Send, Transport
from ringspan.transports.wrapped import WrappedTransport

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
        """Recorded as one message from all to all, which arrives when the last rank has sent."""
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

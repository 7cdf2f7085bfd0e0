"""A transport that passes every call to another transport; subclasses observe or count on the way.

`CountingTransport` counts the messages of `exchange`, which are those that a schedule predicts.
"""

from collections.abc import Sequence

from ringspan.transports.base import Posted, Receive, Send, Transport


class WrappedTransport:
    """`inner` by another name."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """The inner transport's."""
        return self.inner.rank

    @property
    def world_size(self) -> int:
        """The inner transport's."""
        return self.inner.world_size

    @property
    def timeout_s(self) -> float:
        """The inner transport's."""
        return self.inner.timeout_s

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Passed on."""
        return self.inner.exchange(sends, receives)

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Passed on."""
        return self.inner.all_gather_bytes(payload, timeout_s)

    def abort(self, reason: str) -> None:
        """Passed on."""
        self.inner.abort(reason)

    def close(self) -> None:
        """Passed on."""
        self.inner.close()


class CountingTransport(WrappedTransport):
    """`inner`, with the messages and bytes this rank has sent so far to each rank."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.messages_sent = [0] * inner.world_size
        self.bytes_sent = [0] * inner.world_size

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Count what is sent, then start it."""
        for dst, tensor in sends:
            self.messages_sent[dst] += 1
            self.bytes_sent[dst] += tensor.nbytes
        return super().exchange(sends, receives)

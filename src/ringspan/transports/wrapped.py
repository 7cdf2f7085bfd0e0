"""A transport around another one, for what watches or counts: everything is passed on unless a subclass says more."""

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

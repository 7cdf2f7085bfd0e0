"""How much did a rank send? A transport that counts and passes everything on.

Only messages of `exchange` count: those are what a schedule predicts. What ranks say to agree on a call is not in it.
"""

from collections.abc import Sequence

from ringspan.transports.base import Posted, Receive, Send, Transport
from ringspan.transports.wrapped import WrappedTransport


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

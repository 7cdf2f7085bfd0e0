"""What a transport is: messages between the ranks of one group.

Sizes are agreed before anything is received (see `contract.py`), so a transport moves tensors into buffers of the right
size and nothing else. It sees all messages of a step at once and may pick the cheapest call for them. Messages between
two ranks arrive in the order in which they were sent.

`Single` is the transport of one rank. `WrappedTransport` passes calls on to another transport and `CountingTransport`
counts the messages of `exchange`, which are those that a schedule predicts.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ringspan.errors import TransportError


class Send(NamedTuple):
    """A contiguous tensor; it must not be written to until the send is done."""

    dst: int
    tensor: torch.Tensor


class Receive(NamedTuple):
    """A contiguous buffer of exactly the size that will arrive."""

    src: int
    buffer: torch.Tensor


class MessageHandle(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when the message has been sent or received; TransportError if the peer is gone, has failed or is late.

        None is the transport's own deadline, which may allow for a peer that is known to be busy.
        """


class Posted(NamedTuple):
    """Handles for the messages of one exchange, in the order they were given."""

    sends: Sequence[MessageHandle]
    receives: Sequence[MessageHandle]


class Transport(Protocol):
    """One rank's end of a group."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def timeout_s(self) -> float:
        """The deadline of a wait without progress, where the caller gives none."""

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Start all messages of a step; returns at once."""

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Every rank's payload, in rank order. All ranks must call it, with payloads of one length."""

    def abort(self, reason: str) -> None:
        """Tell every rank of the group why this one gives up, so that their waits end with that reason."""

    def close(self) -> None:
        """Release threads and buffers; the group itself belongs to the caller."""


def all_to_all(
    transport: Transport, sends: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], deadline_s: float | None
) -> list[torch.Tensor]:
    """Send the r-th tensor to rank r and receive one of the r-th shape from it."""
    received = [part if peer == transport.rank else part.new_empty(shapes[peer]) for peer, part in enumerate(sends)]
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    outgoing = [Send(peer, sends[peer]) for peer in peers if sends[peer].numel()]
    incoming = [Receive(peer, received[peer]) for peer in peers if received[peer].numel()]
    posted = transport.exchange(outgoing, incoming)
    for (peer, _), handle in zip(incoming, posted.receives, strict=True):
        _wait(transport, f"waiting for rank {peer}", handle, deadline_s)
    for (peer, _), handle in zip(outgoing, posted.sends, strict=True):
        _wait(transport, f"sending to rank {peer}", handle, deadline_s)
    return received


def _wait(transport: Transport, what: str, handle: MessageHandle, deadline_s: float | None) -> None:
    try:
        handle.wait(deadline_s)
    except TransportError as error:
        raise TransportError(f"rank {transport.rank}, {what}: {error}") from None


_SIZED = struct.Struct("<Q56s")  # the length of a payload and its start


def gather_payloads(transport: Transport, payload: bytes, deadline_s: float | None) -> list[bytes]:
    """Every rank's payload, in rank order; lengths may differ. One message if all payloads are short, else two."""
    sized = _SIZED.pack(len(payload), payload[: _SIZED.size - 8])
    lengths, starts = zip(*map(_SIZED.unpack, transport.all_gather_bytes(sized, deadline_s)), strict=True)
    if max(lengths) > _SIZED.size - 8:
        starts = tuple(transport.all_gather_bytes(payload.ljust(max(lengths), b"\0"), deadline_s))
    return [start[:length] for start, length in zip(starts, lengths, strict=True)]


class Alone:
    """The group of a process that has no process group."""


ALONE = Alone()


class Single:
    """The transport of a group of one."""

    rank = 0
    world_size = 1
    timeout_s = math.inf

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Do nothing: a program for one rank has no messages."""
        assert not sends
        assert not receives
        return Posted([], [])

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:  # noqa: ARG002
        return [payload]

    def abort(self, reason: str) -> None:
        """Do nothing: there are no other ranks."""

    def close(self) -> None:
        """Do nothing: a single rank holds no resources."""


class WrappedTransport:
    """Passes every call on to `inner`; a subclass changes some of them."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def world_size(self) -> int:
        return self.inner.world_size

    @property
    def timeout_s(self) -> float:
        return self.inner.timeout_s

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        return self.inner.exchange(sends, receives)

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        return self.inner.all_gather_bytes(payload, timeout_s)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
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

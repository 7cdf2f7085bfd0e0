"""Messages between processes of one host: one copy, from the sender's memory into the receiver's buffer.

A Unix socket joins each pair of ranks. Short messages travel in it. For a long message the sender sends only its
address: the receiver lets the kernel copy from the sender's memory (process_vm_readv, known from MPI libraries as
cross-memory attach) and then confirms. So there is no shared segment to size or to leave behind and no extra thread,
and a wait sleeps until a socket has data or its other end is closed.

A sender that aborts closes its sockets before its memory may be reused. A receiver that read the memory after that
cannot send its confirmation, and therefore discards the data.

A wait reads from all sockets, so that two ranks with full sockets do not deadlock.
"""

import ctypes
import os
import select
import socket
import struct
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch

from ringspan.errors import TransportError

_INLINE, _OFFER, _TAKEN = range(3)
_HEADER = struct.Struct("<BIQQ")  # kind, tag, bytes, address
_MOST_INLINE_BYTES = 16 * 2**10
_LONGEST_POLL_S = 86400.0  # the system counts milliseconds, up to 2^31


class _Span(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class PeerMemory:
    """The memory of another process of this user."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._read = ctypes.CDLL(None, use_errno=True).process_vm_readv
        self._read.restype = ctypes.c_ssize_t
        self._read.argtypes = (ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong)

    def read(self, address: int, into: int, nbytes: int) -> None:
        """Copy memory of the other process to an address of this process; OSError if that fails."""
        while nbytes:
            theirs, ours = _Span(address, nbytes), _Span(into, nbytes)
            copied = self._read(self._pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
            if copied <= 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            address, into, nbytes = address + copied, into + copied, nbytes - copied


class Peer(NamedTuple):
    """Another rank: its number, a packet socket to it, and its memory."""

    rank: int
    socket: socket.socket
    memory: PeerMemory


class SameHost:
    """This rank's links to peers on the host. `send` and `recv` have the signatures of a process group."""

    def __init__(self, peers: Iterable[Peer]) -> None:
        self._poll = select.poll()
        self._links = {peer.rank: _Link(peer, self._poll) for peer in peers}
        self._by_descriptor = {link.descriptor: link for link in self._links.values()}
        weakref.finalize(self, _close, [link.socket for link in self._links.values()])

    def __contains__(self, rank: int) -> bool:
        return rank in self._links

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int) -> "SameHostMessage":
        """Start to send one tensor, which must not be written to until it has been sent."""
        message = SameHostMessage(self, dst, tag, *tensors)
        self._links[dst].send(message)
        return message

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int) -> "SameHostMessage":
        """Start to receive into one tensor."""
        message = SameHostMessage(self, src, tag, *tensors)
        self._links[src].receive(message)
        return message

    def advance(self) -> None:
        """Process packets that have arrived, without waiting, so that their senders can go on."""
        self._serve(0)

    def wait(self, message: "SameHostMessage", timeout_s: float) -> bool:
        """Wait for a limited time and return whether a message is complete; TransportError if its peer is gone."""
        link = self._links[message.peer]
        deadline = time.monotonic() + timeout_s
        if not message.is_through:
            link.advance()
        while not message.is_through:
            if not link.is_open:
                raise TransportError("connection closed by peer")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._serve(left_s)
        return True

    def _serve(self, timeout_s: float) -> None:
        """Wait until a link is ready, for a day at most, and serve it."""
        for descriptor, _ in self._poll.poll(min(timeout_s, _LONGEST_POLL_S) * 1000):
            self._by_descriptor[descriptor].advance()

    def close(self) -> None:
        """Close the links; a wait in another thread ends. Thread-safe."""
        for link in self._links.values():
            with suppress(OSError):
                link.socket.shutdown(socket.SHUT_RDWR)


class SameHostMessage:
    """One end of a pending message. Messages with the same tag match in order."""

    __slots__ = ("_links", "is_through", "peer", "tag", "tensor")

    def __init__(self, links: SameHost, peer: int, tag: int, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self._links = links
        self.peer = peer
        self.tag = tag
        self.tensor = tensor
        self.is_through = False

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return self.tensor.nbytes

    @property
    def bytes_done(self) -> int:
        """All bytes or none: a message is copied in one piece."""
        return self.nbytes if self.is_through else 0

    def advance(self, timeout_s: float) -> bool:
        """Wait for a limited time and return whether the message is complete."""
        return self._links.wait(self, timeout_s)

    def wait(self, timeout: timedelta) -> None:
        """Return when the message is complete; TransportError if its peer is gone or late."""
        if not self.advance(timeout.total_seconds()):
            raise TransportError(f"timed out after {timeout.total_seconds():g} s")


class _Arrived(NamedTuple):
    """A message that a peer sent or offers before this rank posted the receive."""

    nbytes: int
    source: bytes | int  # the message itself, or its address


class _Link:
    """This rank's end of the socket to one peer, and its pending messages."""

    def __init__(self, peer: Peer, poll: "select.poll") -> None:
        self.peer, self.socket, self._memory = peer
        self.descriptor = self.socket.fileno()
        self.is_open = True
        self.socket.setblocking(False)
        self._poll = poll
        self._poll.register(self.descriptor, select.POLLIN)
        self._packet = bytearray(_HEADER.size + _MOST_INLINE_BYTES)
        # Packets for a full socket, each with the message that is complete when the packet has left.
        self._unsent: deque[tuple[bytes, SameHostMessage | None]] = deque()
        self._offered: defaultdict[int, deque[SameHostMessage]] = defaultdict(deque)  # by tag
        self._expected: defaultdict[int, deque[SameHostMessage]] = defaultdict(deque)  # by tag
        self._arrived: defaultdict[int, deque[_Arrived]] = defaultdict(deque)  # by tag; only without a posted receive

    def send(self, message: SameHostMessage) -> None:
        address, nbytes = message.tensor.data_ptr(), message.tensor.nbytes
        if nbytes <= _MOST_INLINE_BYTES:
            contents = ctypes.string_at(address, nbytes)
            self._write(_HEADER.pack(_INLINE, message.tag, nbytes, 0) + contents, message)
        else:
            self._offered[message.tag].append(message)
            self._write(_HEADER.pack(_OFFER, message.tag, nbytes, address), None)

    def receive(self, message: SameHostMessage) -> None:
        arrived = self._arrived[message.tag]
        if arrived:
            self._take(message, arrived.popleft())
        else:
            self._expected[message.tag].append(message)

    def advance(self) -> None:
        """Write unsent packets and read all that have arrived."""
        if self._unsent and self.is_open:
            unsent, self._unsent = self._unsent, deque()
            self._poll.modify(self.descriptor, select.POLLIN)
            for packet, message in unsent:
                self._write(packet, message)
        while self.is_open:
            try:
                nbytes = self.socket.recv_into(self._packet)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the peer had unread packets; packets that it sent before are still readable
            if nbytes == 0:
                self._shut()
                return
            self._read(memoryview(self._packet)[:nbytes])

    def _read(self, packet: memoryview) -> None:
        kind, tag, nbytes, address = _HEADER.unpack_from(packet)
        if kind == _TAKEN:
            self._offered[tag].popleft().is_through = True
            return
        arrived = _Arrived(nbytes, bytes(packet[_HEADER.size :]) if kind == _INLINE else address)
        expected = self._expected[tag]
        if expected:
            self._take(expected.popleft(), arrived)
        else:
            self._arrived[tag].append(arrived)

    def _take(self, message: SameHostMessage, arrived: _Arrived) -> None:
        nbytes, source = arrived
        into = message.tensor.data_ptr()
        expected = message.tensor.nbytes
        if nbytes != expected:
            raise TransportError(
                f"{nbytes} bytes from rank {self.peer}, where {expected} are expected; sizes must be the same on both"
            )
        if isinstance(source, bytes):
            ctypes.memmove(into, source, nbytes)
            message.is_through = True
            return
        try:
            self._memory.read(source, into, nbytes)
        except OSError as error:
            raise TransportError(f"{nbytes} bytes from rank {self.peer} cannot be read ({error.strerror})") from error
        self._write(_HEADER.pack(_TAKEN, message.tag, 0, 0), message)

    def _write(self, packet: bytes, message: SameHostMessage | None) -> None:
        """Send a packet, now if the socket accepts it; then the message, if given, is complete."""
        if not self._unsent and self.is_open:
            try:
                self.socket.send(packet, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._poll.modify(self.descriptor, select.POLLIN | select.POLLOUT)
            except OSError:
                self._shut()
            else:
                if message is not None:
                    message.is_through = True
                return
        self._unsent.append((packet, message))

    def _shut(self) -> None:
        if self.is_open:
            self.is_open = False
            self._poll.unregister(self.descriptor)


def _close(sockets: list[socket.socket]) -> None:
    for it in sockets:
        it.close()

"""Are the other ranks alive, and if not, what happened to them?

Every rank sends a byte per second to every other rank. A waiting rank asks for a verdict a few times per second:

- gone: the connection was closed without a farewell, so the process has died;
- frozen: no heartbeat arrived within the limit, but the machine still acknowledges packets;
- cut off: the machine does not acknowledge packets either.

A rank that is alive may still be late. Every heartbeat names the rank for which its sender waits, so the straggler is
found at the end of the chain of waiting ranks.

A rank that aborts sends its reason over the same connections, so that all ranks raise the same error instead of waiting
for it. A rank that was frozen itself does not count the time of its sleep against others.
"""

import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

from ringspan.errors import UnsupportedError
from ringspan.transports._heartbeat_links import HeartbeatLink

SILENCE = "RINGSPAN_SILENCE_S"
"""An environment variable: after so many seconds without a sign of life a rank counts as lost; 5 by default."""

_DEFAULT_SILENCE_S = 5.0
_BEAT_EVERY_S = 1.0
_LATE_S = 2.0  # after this time a heartbeat is outdated, and a gap between polls means a suspended rank
_GRACE_S = 0.5  # messages that a dead rank had sent may still arrive
_BEAT, _FAREWELL, _REASON = b".", b"-", b"!"
_WAIT = struct.Struct("<bi")  # in every heartbeat: the kind of wait, and the awaited rank
_NOTHING, RECEIVING, SENDING = range(3)
_LENGTH = struct.Struct("<I")
_LONGEST_REASON = 8192
_TCP_INFO = struct.Struct("<8B24I")  # Linux; see tcp_info in its headers
_UNACKED, _LAST_ACK_RECEIVED = 8 + 4, 8 + 12


def silence_limit_s() -> float:
    text = os.environ.get(SILENCE, "")
    try:
        limit_s = float(text) if text else _DEFAULT_SILENCE_S
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise UnsupportedError("it is a number of seconds", argument=SILENCE, value=text, remedy="set 5, or more")
    return limit_s


class _Peer:
    """This rank's knowledge of another rank."""

    def __init__(self, link: HeartbeatLink, now: float) -> None:
        self.link = link
        self.heard_at = now
        self.ended_at: float | None = None
        self.has_left = False  # True after a farewell
        self.unread = b""
        self.waits_for: tuple[int, int] = (_NOTHING, -1)


class Heartbeat:
    """Sends this rank's heartbeats and records those of the other ranks."""

    def __init__(self, rank: int, host: str, links: Sequence[HeartbeatLink], limit_s: float) -> None:
        self._rank = rank
        self._host = host
        self.limit_s = limit_s
        now = time.monotonic()
        self._peers = {link.rank: _Peer(link, now) for link in links}
        self._awake_since = self._looked_at = now
        self._writing = threading.Lock()
        self._is_closed = threading.Event()
        self.reason: str | None = None  # why another rank aborted
        self._waits_for: tuple[int, int] = (_NOTHING, -1)
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            self._selector.register(peer.link.socket, selectors.EVENT_READ, peer)
        self._wake, wake = socket.socketpair()
        self._selector.register(wake, selectors.EVENT_READ)
        self._sockets = [self._wake, wake, *(link.socket for link in links)]
        threading.Thread(target=self._run, name="ringspan heartbeat", daemon=True).start()

    def watch_over(self, owner: object) -> None:
        """Send a farewell when the owner is collected or the interpreter exits."""
        weakref.finalize(owner, self.close)

    def name(self, rank: int) -> str:
        """A rank's name for messages, with its host and process if they are known."""
        if rank == self._rank:
            return f"rank {rank} on {self._host} (process {os.getpid()})"
        peer = self._peers.get(rank)
        return f"rank {rank}" if peer is None else str(peer.link)

    def verdict(self, awaited: int) -> str | None:
        """The reason why a wait for the rank `awaited` cannot succeed; None while it still can."""
        if self.reason is not None:
            return self.reason
        now = time.monotonic()
        peer = self._peers.get(awaited)
        if peer is not None and peer.ended_at is not None:
            if not peer.has_left and now - peer.ended_at > _GRACE_S:
                return f"{peer.link} is gone: its process has ended"
            if now - peer.ended_at > self.limit_s:
                return f"{peer.link} has left the group"
        return self._silence(now)

    def begin_wait(self, what: int, rank: int) -> None:
        """Record that this rank starts to wait: RECEIVING from another rank, or SENDING to it."""
        self._waits_for = (what, rank)

    def end_wait(self) -> None:
        """Record that this rank no longer waits."""
        self._waits_for = (_NOTHING, -1)

    def suspect(self, awaited: int) -> int:
        """The rank that the others wait for, according to the last heartbeats: a rank that is not waiting itself."""
        late, seen, now = self._rank, set[int](), time.monotonic()
        rank = awaited
        while rank not in seen and rank in self._peers:
            if self._wait_of(late) == (SENDING, rank) and self._wait_of(rank) == (RECEIVING, late):
                break  # both ranks of a message wait, so the message does not get through
            seen.add(late)
            late = rank
            what, rank = self._wait_of(late)
            if what == _NOTHING or self._silent_s(self._peers[late], now) > _LATE_S:
                break  # the rank is busy, or its heartbeat is outdated
        return late

    def is_busy(self, rank: int) -> bool:
        """Whether another rank recently reported that it is alive and not waiting for a peer."""
        peer = self._peers.get(rank)
        if peer is None or peer.ended_at is not None or self._silent_s(peer, time.monotonic()) > _LATE_S:
            return False
        return peer.waits_for[0] == _NOTHING

    def _wait_of(self, rank: int) -> tuple[int, int]:
        return self._waits_for if rank == self._rank else self._peers[rank].waits_for

    @property
    def num_links(self) -> int:
        """The number of ranks with a heartbeat connection."""
        return len(self._peers)

    @property
    def hears_all(self) -> bool:
        """Whether every other rank has a heartbeat connection."""
        return all(map(self.is_alive, self._peers))

    def is_alive(self, rank: int) -> bool:
        """Whether a rank sent a heartbeat within the limit; True for this rank."""
        peer = self._peers.get(rank)
        return rank == self._rank or (
            peer is not None and peer.ended_at is None and self._silent_s(peer, time.monotonic()) <= self.limit_s
        )

    def await_news(self, rank: int, patience_s: float) -> None:
        """After a connection has ended, wait a moment for the peer's reason to arrive."""
        peer = self._peers.get(rank)
        deadline = time.monotonic() + patience_s
        while peer is not None and self.reason is None and peer.ended_at is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank has ended without a farewell."""
        peer = self._peers.get(rank)
        return peer is not None and peer.ended_at is not None and not peer.has_left

    def tell(self, reason: str) -> None:
        """Tell all others why this rank gives up."""
        text = reason.encode()[:_LONGEST_REASON]
        self._send(_REASON + _LENGTH.pack(len(text)) + text)

    def close(self) -> None:
        """Send a farewell; thread-safe."""
        if self._is_closed.is_set():
            return
        self._send(_FAREWELL)
        self._is_closed.set()
        with suppress(OSError):
            self._wake.send(b"x")

    def _send(self, packet: bytes) -> None:
        with self._writing:
            for peer in self._peers.values():
                if peer.ended_at is None:
                    with suppress(
                        OSError
                    ):  # full, so the peer counts as silent; or closed, which the next read reports
                        peer.link.socket.send(packet)

    def _silent_s(self, peer: _Peer, now: float) -> float:
        return now - max(peer.heard_at, self._awake_since)

    def _silence(self, now: float) -> str | None:
        if now - self._looked_at > _LATE_S:
            return None  # this thread was suspended: read pending heartbeats before judging
        present = [peer for peer in self._peers.values() if peer.ended_at is None]
        silent = [peer for peer in present if self._silent_s(peer, now) > self.limit_s]
        if not silent:
            return None
        limit = f"for {self.limit_s:g} s"
        frozen = [peer for peer in silent if _answers(peer.link.socket, self.limit_s)]
        if frozen:
            names = ", ".join(str(peer.link) for peer in frozen)
            return f"{names} is frozen: its machine answers, but the process has given no sign of life {limit}"
        if len(silent) == len(present) > 1:
            others = ", ".join(str(peer.link.rank) for peer in silent)
            return f"rank {self._rank} on {self._host} is cut off: ranks {others} have not answered {limit}"
        names = ", ".join(str(peer.link) for peer in silent)
        return f"{names} is cut off: its machine has not answered {limit}"

    def _run(self) -> None:
        next_beat = time.monotonic()
        while not self._is_closed.is_set():
            ready = self._selector.select(max(0.0, next_beat - time.monotonic()))
            for key, _ in ready:
                if key.data is not None:
                    self._read(key.data)
            now = time.monotonic()
            if now - self._looked_at > _LATE_S:
                self._awake_since = now
            self._looked_at = now
            if now >= next_beat:
                self._send(_BEAT + _WAIT.pack(*self._waits_for))
                next_beat = now + _BEAT_EVERY_S
        self._selector.close()
        for it in self._sockets:
            it.close()

    def _read(self, peer: _Peer) -> None:
        try:
            received = peer.link.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        now = time.monotonic()
        if not received:
            peer.ended_at = now
            self._selector.unregister(peer.link.socket)
            return
        peer.heard_at = now
        peer.unread += received
        while peer.unread:
            kind, rest = peer.unread[:1], peer.unread[1:]
            if kind == _REASON:
                length = _LENGTH.unpack_from(rest)[0] if len(rest) >= _LENGTH.size else _LONGEST_REASON
                if len(rest) < _LENGTH.size + length:
                    return
                text, rest = rest[_LENGTH.size : _LENGTH.size + length], rest[_LENGTH.size + length :]
                self.reason = self.reason or text.decode(errors="replace")
            elif kind == _BEAT:
                if len(rest) < _WAIT.size:
                    return
                peer.waits_for, rest = _WAIT.unpack_from(rest), rest[_WAIT.size :]
            peer.has_left |= kind == _FAREWELL
            peer.unread = rest


def _answers(link: socket.socket, limit_s: float) -> bool:
    """Whether the machine at the other end acknowledges packets."""
    if not hasattr(socket, "TCP_INFO"):
        return True
    with suppress(OSError):
        info = _TCP_INFO.unpack(link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        return info[_UNACKED] == 0 or acknowledges(info[_LAST_ACK_RECEIVED] / 1000, limit_s)
    return False


def acknowledges(since_s: float, limit_s: float) -> bool:
    """Whether a machine with a silent process still answers, judged by the age of its last acknowledgement.

    One that answers acknowledges every beat. One that was cut off may have acknowledged a beat of this rank's after
    the last that it sent itself, so its last acknowledgement can be a beat younger than the limit.
    """
    return since_s < max(limit_s / 2, 1.5 * _BEAT_EVERY_S)

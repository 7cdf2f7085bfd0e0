"""Are the other ranks alive, and if not, what happened to them?

Every rank sends a byte per second to every other rank. A waiting rank asks for a verdict a few times per second:

- gone: the connection was closed without a farewell, so the process has died;
- frozen: no heartbeat arrived within the limit, but the machine acknowledges packets that are sent to it now;
- cut off: the machine does not acknowledge packets either.

To distinguish the last two, a silent rank is probed: shortly before the limit it receives heartbeats in quick
succession, and its machine must acknowledge one of them. Earlier acknowledgements prove nothing, because the machine
may have been cut off after the last heartbeat that came through. A rank is judged after everything that had arrived was
read.

A rank that is alive may still be late. Every heartbeat names the rank for which its sender waits, so the straggler is
found at the end of the chain of waiting ranks.

A rank that aborts sends its reason over the same connections, so that all ranks raise the same error instead of waiting
for it. Time for which a rank was frozen itself, or its machine stalled, does not count as silence of the others.
"""

import os
import selectors
import socket
import struct
import sys
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
_PROBE_EVERY_S = 0.1
_LONGEST_PROBE_S = 1.0  # a machine has this time to acknowledge a probe
_LATE_S = 2.0  # after this time a heartbeat is outdated
_LONGEST_GAP_S = 1.5  # a longer gap between two polls means that this rank was suspended
_GRACE_S = 0.5  # messages that a dead rank had sent may still arrive
_BEAT, _FAREWELL, _REASON = b".", b"-", b"!"
_WAIT = struct.Struct("<bi")  # in every heartbeat: the kind of wait, and the awaited rank
_NOTHING, RECEIVING, SENDING = range(3)
_LENGTH = struct.Struct("<I")
_LONGEST_REASON = 8192


def silence_limit_s() -> float:
    text = os.environ.get(SILENCE, "")
    try:
        limit_s = float(text) if text else _DEFAULT_SILENCE_S
    except ValueError:
        limit_s = 0.0
    if not limit_s > 0:
        raise UnsupportedError("it is a number of seconds", argument=SILENCE, value=text, remedy="set 5, or more")
    return limit_s


class _AwakeClock:
    """Counts the seconds in which a thread polls regularly; of a longer gap only `_LONGEST_GAP_S` counts."""

    def __init__(self) -> None:
        self._polled = (0.0, time.monotonic())  # one tuple, so that other threads read a consistent pair

    def now(self) -> float:
        counted_s, polled_at = self._polled
        return counted_s + min(time.monotonic() - polled_at, _LONGEST_GAP_S)

    def poll(self) -> float:
        self._polled = (self.now(), time.monotonic())
        return self._polled[0]


class _Peer:
    """This rank's knowledge of another rank; times are those of the `_AwakeClock`."""

    def __init__(self, link: HeartbeatLink, now: float) -> None:
        self.link = link
        self.heard_at = now
        self.ended_at: float | None = None
        self.has_left = False  # True after a farewell
        self.unread = b""
        self.num_sent = 0  # bytes
        self.probed: tuple[float, int] | None = None  # since when, and the bytes sent before
        self.waits_for: tuple[int, int] = (_NOTHING, -1)


class Heartbeat:
    """Sends this rank's heartbeats and records those of the other ranks."""

    def __init__(self, rank: int, host: str, links: Sequence[HeartbeatLink], limit_s: float) -> None:
        self._rank = rank
        self._host = host
        self.limit_s = limit_s
        self._probe_s = min(_LONGEST_PROBE_S, limit_s / 4)
        self._clock = _AwakeClock()
        self._peers = {link.rank: _Peer(link, 0.0) for link in links}
        self._lost: str | None = None  # the verdict on ranks that have been silent for the limit
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
        now = self._clock.now()
        peer = self._peers.get(awaited)
        if peer is not None and peer.ended_at is not None:
            if not peer.has_left and now - peer.ended_at > _GRACE_S:
                return f"{peer.link} is gone: its process has ended"
            if now - peer.ended_at > self.limit_s:
                return f"{peer.link} has left the group"
        return self._lost

    def begin_wait(self, what: int, rank: int) -> None:
        """Record that this rank starts to wait: RECEIVING from another rank, or SENDING to it."""
        self._waits_for = (what, rank)

    def end_wait(self) -> None:
        """Record that this rank no longer waits."""
        self._waits_for = (_NOTHING, -1)

    def suspect(self, awaited: int) -> int:
        """The rank that the others wait for, according to the last heartbeats: a rank that is not waiting itself."""
        late, seen, now = self._rank, set[int](), self._clock.now()
        rank = awaited
        while rank not in seen and rank in self._peers:
            if self._wait_of(late) == (SENDING, rank) and self._wait_of(rank) == (RECEIVING, late):
                # The message does not get through: the rank with the slow link keeps more ranks waiting.
                return max(late, rank, key=self._num_waiting_for)
            seen.add(late)
            late = rank
            what, rank = self._wait_of(late)
            if what == _NOTHING or now - self._peers[late].heard_at > _LATE_S:
                break  # the rank is busy, or its heartbeat is outdated
        return late

    def _num_waiting_for(self, rank: int) -> int:
        waits = (self._wait_of(peer) for peer in (self._rank, *self._peers))
        return sum(what != _NOTHING and awaited == rank for what, awaited in waits)

    def is_busy(self, rank: int) -> bool:
        """Whether another rank recently reported that it is alive and not waiting for a peer."""
        peer = self._peers.get(rank)
        if peer is None or peer.ended_at is not None or self._clock.now() - peer.heard_at > _LATE_S:
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
            peer is not None and peer.ended_at is None and self._clock.now() - peer.heard_at <= self.limit_s
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
                    with suppress(OSError):  # a full buffer means silence; a closed socket is found by the next read
                        peer.num_sent += peer.link.socket.send(packet)

    def _judge(self, now: float) -> str | None:
        """Name the ranks that have been silent for the limit; everything that had arrived by `now` has been read."""
        present = [peer for peer in self._peers.values() if peer.ended_at is None]
        for peer in present:
            if peer.probed is None and now - peer.heard_at > self.limit_s - self._probe_s:
                peer.probed = now, peer.num_sent
        silent = [
            peer
            for peer in present
            if peer.probed is not None and now - peer.probed[0] > self._probe_s and now - peer.heard_at > self.limit_s
        ]
        if not silent:
            return None
        limit = f"for {self.limit_s:g} s"
        frozen = [peer for peer in silent if _answers(peer)]
        if frozen:
            names = ", ".join(str(peer.link) for peer in frozen)
            return f"{names} is frozen: its machine answers, but the process has given no sign of life {limit}"
        quiet_s = max(self.limit_s / 2, 1.5 * _BEAT_EVERY_S)
        if len(present) > 1 and all(now - peer.heard_at > quiet_s for peer in present):
            others = ", ".join(str(peer.link.rank) for peer in present)
            return f"rank {self._rank} on {self._host} is cut off: ranks {others} have not answered {limit}"
        names = ", ".join(str(peer.link) for peer in silent)
        return f"{names} is cut off: its machine has not answered {limit}"

    def _run(self) -> None:
        next_beat = now = self._clock.poll()
        while not self._is_closed.is_set():
            self._selector.select(max(0.0, next_beat - now))
            now = self._clock.poll()
            for key, _ in self._selector.select(0):
                if key.data is not None:
                    self._read(key.data, now)
            self._lost = self._judge(now)
            if now >= next_beat:
                self._send(_BEAT + _WAIT.pack(*self._waits_for))
                heard_at = min((peer.heard_at for peer in self._peers.values() if peer.ended_at is None), default=now)
                next_beat = now + (_BEAT_EVERY_S if now - heard_at <= self.limit_s / 2 else _PROBE_EVERY_S)
        self._selector.close()
        for it in self._sockets:
            it.close()

    def _read(self, peer: _Peer, now: float) -> None:
        try:
            received = peer.link.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            peer.ended_at = now
            self._selector.unregister(peer.link.socket)
            return
        peer.heard_at, peer.probed = now, None
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


def _answers(peer: _Peer) -> bool:
    """Whether the machine of a silent rank has acknowledged any of the probes."""
    assert peer.probed is not None
    return peer.num_sent - _unacknowledged(peer.link.socket) > peer.probed[1]


def _unacknowledged(link: socket.socket) -> int:
    """How many of the sent bytes the other machine has not acknowledged; 0 on systems that do not tell."""
    with suppress(ImportError):
        import fcntl
        import termios

        return int.from_bytes(fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0

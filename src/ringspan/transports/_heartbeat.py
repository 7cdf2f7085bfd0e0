"""Are the other ranks alive, and if not, what happened to them?

Every rank sends a few bytes per second to every other rank. A waiting rank asks for a verdict a few times per second:

- gone: the connection was closed without a farewell, so the process has died;
- frozen: no heartbeat arrived within the limit, but the machine still acknowledges what is sent to it;
- cut off: the machine does not acknowledge anything either.

To distinguish the last two, this rank remembers when it sent each heartbeat. An acknowledgement proves that the other
machine was connected after that heartbeat was sent. A frozen process is silent for the whole limit while its machine
goes on answering; of a machine that is cut off, heartbeats and acknowledgements end at the same time, give or take the
delays of a busy machine or link. So the last answered heartbeat of a frozen process was sent late within the silence,
and a machine is cut off if a heartbeat has remained unanswered for long. A silent rank receives heartbeats in quick
succession until one of both is the case. A rank that no machine answers is cut off itself.

A rank that is alive may still be late. Every heartbeat names the rank for which its sender waits, so the straggler is
found at the end of the chain of waiting ranks.

A rank that aborts sends its reason over the same connections, so that all ranks raise the same error instead of waiting
for it. Time for which a rank was frozen itself, or its machine stalled, does not count as silence of the others.
"""

import errno
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from ringspan.errors import UnsupportedError
from ringspan.transports._heartbeat_links import HeartbeatLink

SILENCE = "RINGSPAN_SILENCE_S"
"""An environment variable: after so many seconds without a sign of life a rank counts as lost; 5 by default."""

_DEFAULT_SILENCE_S = 5.0
_BEATS_PER_LIMIT, _BEAT_EVERY_S = 5, 1.0  # at least so many beats within the limit, and one in so many seconds
_PROBE_EVERY_S = 0.1
_QUIET, _ANSWERED = 0.5, 0.8  # fractions of the limit; see `_judge`
_LONGEST_ANSWER, _LONGEST_GAP = 2.0, 1.5  # in beats; a longer gap between polls means that this rank was suspended
_MOST_QUESTIONS = 64  # that are remembered
_LATE_S = 2.0  # after this time a heartbeat is outdated
_GRACE_S = 0.5  # messages that a dead rank had sent may still arrive
_GONE, _CUT_OFF = "is gone: its process has ended", "is cut off: its machine has not answered"
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
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
    """Counts the seconds in which a thread polls regularly; of a longer gap only `longest_gap_s` counts."""

    def __init__(self, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._polled = (0.0, time.monotonic())  # one tuple, so that other threads read a consistent pair

    def now(self) -> float:
        counted_s, polled_at = self._polled
        return counted_s + min(time.monotonic() - polled_at, self._longest_gap_s)

    def poll(self) -> float:
        self._polled = (self.now(), time.monotonic())
        return self._polled[0]


class _Peer:
    """This rank's knowledge of another rank; times are those of the `_AwakeClock`."""

    def __init__(self, link: HeartbeatLink, now: float) -> None:
        self.link = link
        self.heard_at = now
        self.ended_at: float | None = None
        self.fate = _GONE  # why the connection has ended, unless there was a farewell
        self.has_left = False  # True after a farewell
        self.unread = b""
        self.num_sent = 0  # bytes
        self.questions: deque[tuple[float, int]] = deque(maxlen=_MOST_QUESTIONS)  # when sent, and `num_sent` then
        self.answered_at = now  # when the last acknowledged heartbeat was sent
        self.waits_for: tuple[int, int] = (_NOTHING, -1)

    def note_answers(self) -> None:
        """Find out which heartbeats the other machine has acknowledged."""
        num_acknowledged = self.num_sent - _unacknowledged(self.link.socket)
        while self.questions and self.questions[0][1] <= num_acknowledged:
            self.answered_at = self.questions.popleft()[0]


class Heartbeat:
    """Sends this rank's heartbeats and records those of the other ranks."""

    def __init__(self, rank: int, host: str, links: Sequence[HeartbeatLink], limit_s: float) -> None:
        self._rank = rank
        self._host = host
        self.limit_s = limit_s
        self._beat_s = min(_BEAT_EVERY_S, limit_s / _BEATS_PER_LIMIT)
        self._clock = _AwakeClock(_LONGEST_GAP * self._beat_s)
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
                return f"{peer.link} {peer.fate}"
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
        """After a connection has ended, wait for the peer's reason, or for the end of its process, to arrive.

        The packet that announces the end of a process may be lost; a heartbeat makes the machine send another one.
        """
        peer = self._peers.get(rank)
        began = asked_at = time.monotonic()
        while peer is not None and self.reason is None and peer.ended_at is None:
            now = time.monotonic()
            if now - began > patience_s:
                break
            if now - asked_at > _PROBE_EVERY_S:
                asked_at = now
                self._beat()
            time.sleep(0.005)

    def end_of(self, rank: int) -> str | None:
        """What became of a rank whose connection has ended without a farewell."""
        peer = self._peers.get(rank)
        if peer is None or peer.ended_at is None or peer.has_left:
            return None
        return f"{peer.link} {peer.fate}"

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
                        peer.questions.append((self._clock.now(), peer.num_sent))

    def _beat(self) -> None:
        self._send(_BEAT + _WAIT.pack(*self._waits_for))

    def _judge(self, now: float) -> str | None:
        """Name the ranks that have been silent for the limit; everything that had arrived by `now` has been read."""
        present = [peer for peer in self._peers.values() if peer.ended_at is None]
        silent = [peer for peer in present if now - peer.heard_at > self.limit_s]
        if not silent:
            return None
        with self._writing:
            for peer in present:
                peer.note_answers()
        limit = f"for {self.limit_s:g} s"
        frozen = [peer for peer in silent if peer.answered_at - peer.heard_at > _ANSWERED * self.limit_s]
        if frozen:
            names = ", ".join(str(peer.link) for peer in frozen)
            return f"{names} is frozen: its machine answers, but the process has given no sign of life {limit}"
        oldest = now - _LONGEST_ANSWER * self._beat_s
        cut_off = [peer for peer in silent if peer.questions and peer.questions[0][0] < oldest]
        if not cut_off:
            return None
        last_sign = max(max(peer.heard_at, peer.answered_at) for peer in present)
        if len(present) > 1 and now - last_sign > _QUIET * self.limit_s:
            others = ", ".join(str(peer.link.rank) for peer in present)
            return f"rank {self._rank} on {self._host} is cut off: ranks {others} have not answered {limit}"
        names = ", ".join(str(peer.link) for peer in cut_off)
        return f"{names} {_CUT_OFF} {limit}"

    def _run(self) -> None:
        next_beat = now = self._clock.poll()
        while not self._is_closed.is_set():
            self._selector.select(max(0.0, next_beat - now))
            now = self._clock.poll()
            for key, _ in self._selector.select(0):
                if key.data is not None:
                    self._read(key.data, now)
            if now >= next_beat:
                self._lost = self._judge(now)
                self._beat()
                heard_at = min((peer.heard_at for peer in self._peers.values() if peer.ended_at is None), default=now)
                next_beat = now + (self._beat_s if now - heard_at <= _QUIET * self.limit_s else _PROBE_EVERY_S)
        self._selector.close()
        for it in self._sockets:
            it.close()

    def _read(self, peer: _Peer, now: float) -> None:
        try:
            received = peer.link.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            received = b""
            if error.errno in _UNREACHABLE:
                peer.fate = _CUT_OFF
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


def _unacknowledged(link: socket.socket) -> int:
    """How many of the sent bytes the other machine has not acknowledged; 0 on systems that do not tell."""
    with suppress(ImportError, OSError):
        import fcntl
        import termios

        return int.from_bytes(fcntl.ioctl(link, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0

"""Messages over torch.distributed: gloo between CPUs, NCCL between GPUs, and shared memory reads within a host.

The first all-gather of bytes also finds the ranks that share a host (`_neighbours.py`). From then on, messages between
these ranks are copied from memory to memory (`_same_host.py`), for a fraction of gloo's CPU time.

Three properties of gloo shape this file. A receive can be neither cancelled nor polled, so a thread waits in gloo and
the caller waits for the thread (`_waiting.py`). A closed connection ends only the waits on that connection, and no
wait for a message of which a part has arrived; so the caller checks four times per second whether another rank has
aborted or sends no heartbeat (`_heartbeat.py`). A wait in gloo that times out closes every connection of the group; so
only a rank that aborts lets a wait time out.

A rank that aborts publishes its reason in the group's store, where the first reason is kept, so that all ranks raise
the same error; it sends the reason with its heartbeats and closes its connections. Before the first agreement, and with
NCCL, there are no heartbeats; then a thread polls the store during a wait. If the store died with the rank that served
it, each rank raises its own reason. An aborted group cannot be used again.

The messages of the agreement have their own tag. If one rank skips the agreement, no payload arrives in a buffer made
for a header, which would kill the process.

A group may use NCCL for GPUs and gloo for CPUs; the device of its tensor decides which one carries a message. NCCL
takes one batch per rank and step, and its first call must be made by all ranks: the agreement is that call. The NCCL
path has never been run.
"""

import contextlib
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringspan.errors import TransportError
from ringspan.transports._heartbeat import RECEIVING, SENDING, Heartbeat, silence_limit_s
from ringspan.transports._heartbeat_links import connect_heartbeats
from ringspan.transports._neighbours import find_peers
from ringspan.transports._same_host import SameHost, SameHostMessage
from ringspan.transports._waiting import GlooMessage, WaitClock, Waiter, cut
from ringspan.transports.base import Posted, Receive, Send

_LOG = logging.getLogger("ringspan")
_PAYLOAD_TAG, _AGREEMENT_TAG, _ABORT_TAG = 0x5253, 0x5254, 0x5255
_REASON = "ringspan/aborted"
_STORE_PATIENCE_S, _LOST_STORE_PATIENCE_S = 1.0, 0.3  # the latter if a silent rank may be the one that serves the store
_NEWS_PATIENCE_S = 1.5  # packets may have to be sent again; a frozen rank needs none of this
_LOOK_EVERY_S = 0.25
_LONGEST_DEADLINE_S = 60.0
_POLL_EVERY_S = 50e-6
_SHORTEST_S, _LONGEST_S = 1e-3, 1e9  # NCCL's waits count milliseconds and add them to the current time


class TorchDistributed:
    """One rank's end of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self._backends = _by_device(dist.get_backend_config(group))
        self._has_nccl = self._backends.get("cuda") == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._has_nccl else torch.device("cpu")
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._group_timeout_s: float = group._get_backend(self._device).options._timeout.total_seconds()
        self.timeout_s: float = min(self._group_timeout_s, _LONGEST_DEADLINE_S)
        self._have_all_come = False  # True after the first agreement; before it, a rank's state is unknown
        self._has_met = self._has_nccl or self.world_size == 1
        self._same_host: SameHost | None = None
        self._heartbeat: Heartbeat | None = None
        self._waiter = Waiter()
        weakref.finalize(self, self._waiter.abandon)
        self._reason: str | None = None  # why this group was aborted
        self._limit_s = silence_limit_s()
        self._waiting_since: float | None = None
        self._is_looking = threading.Lock()
        threading.Thread(target=_keep_looking, args=(weakref.ref(self),), name="ringspan look", daemon=True).start()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; it is the caller's, and this transport does not keep it alive."""
        group = self._group()
        if group is None:
            raise TransportError("the process group is gone; make a new one")
        return group

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Post receives before sends, so that a message arrives at a posted buffer."""
        if self._has_nccl and any(tensor.is_cuda for _, tensor in (*sends, *receives)):
            return self._exchange_batch(sends, receives)
        return self._post(sends, receives, _PAYLOAD_TAG)

    def _post(self, sends: Sequence[Send], receives: Sequence[Receive], tag: int) -> Posted:
        if self._reason is not None:
            raise TransportError(self._reason)
        incoming = [self._start("recv", src, buffer, tag) for src, buffer in receives]
        outgoing = [self._start("send", dst, tensor, tag) for dst, tensor in sends]
        if self._same_host is not None:
            try:
                self._same_host.advance()
            except TransportError as error:
                raise self._failure(f"rank {self.rank} looked for messages", error) from None
        return Posted(outgoing, incoming)

    def _start(self, way: Literal["send", "recv"], peer: int, tensor: torch.Tensor, tag: int) -> "_Handle":
        what = f"{tensor.nbytes} bytes {'to' if way == 'send' else 'from'} rank {peer}"
        if tag == _AGREEMENT_TAG:
            what += " to agree on the call"
        host = self._same_host
        try:
            if host is not None and peer in host and tensor.device.type == "cpu":
                return _Handle(self, getattr(host, way)([tensor], peer, tag), way, peer, what)
            works = [getattr(self.group, way)([part], peer, tag) for part in cut(tensor)]
            return _Handle(self, GlooMessage(works, tensor.nbytes), way, peer, what)
        except RuntimeError as error:
            why = f"{self._why_closed(error, peer)}; 0 of {tensor.nbytes} bytes were through"
            raise TransportError(self._give_up(f"rank {self.rank} posted {what}: {why}")) from None

    def _exchange_batch(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        operations = [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=src) for src, buffer in receives] + [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=dst) for dst, tensor in sends
        ]
        batch = _Batch(self, dist.batch_isend_irecv(operations))
        return Posted([batch] * len(sends), [batch] * len(receives))

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Gather every rank's payload. The first call also links the ranks of each host: all are present."""
        everyone = self._gather(payload, timeout_s)
        self._have_all_come = True
        if not self._has_met:
            self._meet(partial(self._gather, timeout_s=timeout_s))
        return everyone

    def _meet(self, gather: Callable[[bytes], list[bytes]]) -> None:
        host, links = connect_heartbeats(self.rank, gather, self._store)
        self._heartbeat = Heartbeat(self.rank, host, links, self._limit_s)
        self._heartbeat.watch_over(self)
        peers = find_peers(self.rank, gather)
        self._same_host, self._has_met = SameHost(peers) if peers else None, True
        _LOG.info("rank %d reads the memory of ranks %s", self.rank, sorted(peer.rank for peer in peers) or "none")
        if len(links) < self.world_size - 1:
            reached = sorted(link.rank for link in links) or "none"
            _LOG.warning("rank %d exchanges signs of life with ranks %s only", self.rank, reached)

    def _gather(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        everyone = mine.new_empty(self.world_size, len(payload))
        everyone[self.rank] = mine
        gather = self._gather_at_once if self._has_nccl else self._gather_one_by_one
        gather(mine, everyone, timeout_s)
        return [bytes(row) for row in everyone.cpu().numpy()]

    def _gather_one_by_one(self, mine: torch.Tensor, everyone: torch.Tensor, timeout_s: float | None) -> None:
        """Gather between CPUs with one message per pair of ranks, so that an error can name the peer."""
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        sends, receives = [Send(peer, mine) for peer in peers], [Receive(peer, everyone[peer]) for peer in peers]
        posted = self._post(sends, receives, _AGREEMENT_TAG)
        for handle in (*posted.receives, *posted.sends):
            handle.wait(timeout_s)

    def _gather_at_once(self, mine: torch.Tensor, everyone: torch.Tensor, timeout_s: float | None) -> None:
        """Gather between GPUs with one collective, which is complete when this returns."""
        work = self.group.allgather([list(everyone)], [mine])
        what = f"{mine.nbytes} bytes from each of {self.world_size} ranks to agree on the call"
        # Without heartbeats, a rank that is busy between its calls looks like a lost one.
        self._wait(_OnHost(work), self._group_timeout_s if timeout_s is None else timeout_s, what)

    def abort(self, reason: str) -> None:
        """Publish the reason, unless another rank has done so, and close this rank's connections."""
        self._give_up(reason)

    def close(self) -> None:
        """Close the links to ranks of this host; the process group belongs to the caller."""
        if self._same_host is not None:
            self._same_host.close()

    def _wait(self, work: Any, timeout_s: float, what: str) -> None:
        """Wait for NCCL's work."""
        self._waiting_since = time.monotonic()
        try:
            work.wait(timedelta(seconds=min(max(timeout_s, _SHORTEST_S), _LONGEST_S)))
        except RuntimeError as error:
            raise self._failure(f"rank {self.rank} waited for {what}", error) from None
        self._waiting_since = None

    def _wait_for(self, handle: "_Handle", timeout_s: float | None) -> None:
        """Wait until the message is complete, the peer is lost, any rank has aborted, or the deadline passes.

        Without a deadline of the caller's, time in which the rank that all wait for is known to be alive and busy with
        something else does not count, up to the group's timeout.
        """
        message, peer = handle.message, handle.peer
        if self._heartbeat is not None:
            self._heartbeat.begin_wait(SENDING if handle.way == "send" else RECEIVING, peer)
        if isinstance(message, GlooMessage):
            self._waiter.start(message)
        self._waiting_since = time.monotonic()
        progress, reason = self._clock(timeout_s), None
        try:
            while not message.advance(min(_LOOK_EVERY_S, progress.left_s)):
                reason = self._verdict(peer) or self._time_is_up(progress, handle)
                if reason is not None:
                    break
        except RuntimeError as error:
            reason = self._why_closed(error, peer)
        if reason is not None:
            so_far = f"{message.bytes_done} of {message.nbytes} bytes were through"
            raise TransportError(self._give_up(f"rank {self.rank} waited for {handle.what}: {reason}; {so_far}"))
        self._waiting_since = None
        if self._heartbeat is not None:
            self._heartbeat.end_wait()

    def _clock(self, timeout_s: float | None) -> WaitClock:
        if timeout_s is None:
            return WaitClock(self.timeout_s, self._group_timeout_s)
        return WaitClock(timeout_s, timeout_s)

    def _time_is_up(self, progress: WaitClock, handle: "_Handle") -> str | None:
        limit_s = progress.look(handle.message.bytes_done, partial(self._is_busy_elsewhere, handle))
        if limit_s is not None:
            return f"timed out after {limit_s:g} s without progress{self._who_is_late(handle)}"
        if progress.is_worth_a_note():
            _LOG.warning(
                "rank %d has waited %g s for %s%s; timeout_s= would end such waits, the group's timeout of %g s will",
                *(self.rank, self.timeout_s, handle.what, self._who_is_late(handle), self._group_timeout_s),
            )
        return None

    def _verdict(self, peer: int) -> str | None:
        """The reason why a wait for a peer cannot succeed, or None."""
        return self._reason or (self._heartbeat.verdict(peer) if self._heartbeat is not None else None)

    def _who_is_late(self, handle: "_Handle") -> str:
        heartbeat = self._heartbeat
        if heartbeat is None:
            return ""
        late = handle.peer if handle.is_coming else heartbeat.suspect(handle.peer)
        if not heartbeat.is_alive(late):
            return ""
        return f": {heartbeat.name(late)} is alive, but slow or busy with something else"

    def _is_busy_elsewhere(self, handle: "_Handle") -> bool:
        """Whether the awaited rank is alive and not waiting itself, according to its heartbeats."""
        if self._heartbeat is None:
            return not self._have_all_come
        return not handle.is_coming and self._heartbeat.is_busy(self._heartbeat.suspect(handle.peer))

    def _why_closed(self, error: RuntimeError, peer: int) -> str:
        """The reason for a closed connection: the peer died, or it aborted and published why."""
        heartbeat = self._heartbeat
        if heartbeat is not None:
            heartbeat.await_news(peer, _NEWS_PATIENCE_S)
            return heartbeat.end_of(peer) or _plain(error)
        return _plain(error)

    def _failure(self, what: str, error: RuntimeError) -> TransportError:
        """The error to raise: the reason published by the first rank that failed, possibly this one."""
        return TransportError(self._give_up(f"{what}: {_plain(error)}"))

    def _give_up(self, reason: str) -> str:
        """Close the connections, so that waits for this rank end; return the first published reason."""
        heartbeat = self._heartbeat
        is_lost = heartbeat is not None and not heartbeat.hears_all
        patience_s = _LOST_STORE_PATIENCE_S if is_lost else _STORE_PATIENCE_S
        # A thread that returns from torch during interpreter shutdown kills the process, so let it return now.
        self._waiting_since = None
        if self._is_looking.acquire(timeout=patience_s):
            self._is_looking.release()
        if heartbeat is None or heartbeat.reason is None:
            reason = self._publish(reason, patience_s)
            if heartbeat is not None:
                heartbeat.tell(reason)
        else:
            reason = heartbeat.reason
        self._reason = reason
        self._waiter.abandon()
        self._close_connections()
        return reason

    def _close_connections(self) -> None:
        if self._has_nccl:
            self.group._get_backend(self._device).abort()
        if "cpu" not in self._backends:
            return
        self.close()
        for peer in range(self.world_size):
            # Gloo closes its connections only when a wait expires; a wait for a dead peer does not expire.
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self.group.recv([torch.empty(1, device="cpu")], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def look(self) -> bool:
        """End a long wait of this rank if any rank has aborted; return whether to look again later."""
        if self._heartbeat is not None and self._heartbeat.num_links == self.world_size - 1:
            return False
        with self._is_looking:
            since = self._waiting_since
            if since is None or time.monotonic() - since < _LOOK_EVERY_S:
                return True
            try:
                if not self._store.check([_REASON]):
                    return True
                self._reason = self._store.get(_REASON).decode()
                if self._has_nccl:
                    self._close_connections()
            except RuntimeError:  # the store or the group no longer exists
                pass
            return False

    def _publish(self, reason: str, patience_s: float) -> str:
        """Publish the reason in the store; if the store cannot be reached, keep this rank's own reason."""
        answer = [reason]

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                answer.append(self._store.compare_set(_REASON, "", reason).decode())

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(patience_s)
        return answer[-1]


def _keep_looking(reference: "weakref.ref[TorchDistributed]") -> None:
    """Look for failures while the transport exists; the thread must not keep it alive."""
    while (transport := reference()) is not None and transport.look():
        del transport
        time.sleep(_LOOK_EVERY_S)


def _by_device(backends: str) -> dict[str, str]:
    """The backend of each device type, parsed from torch's description, such as "cpu:gloo,cuda:nccl"."""
    return dict(pair.split(":") for pair in backends.split(","))


def _plain(error: RuntimeError) -> str:
    """Gloo's message without source lines and advice."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split(". This is typically")[0]
    return text.splitlines()[0] if text else type(error).__name__


class _Handle:
    __slots__ = ("_transport", "message", "peer", "way", "what")

    def __init__(
        self, transport: TorchDistributed, message: "GlooMessage | SameHostMessage", way: str, peer: int, what: str
    ) -> None:
        self._transport = transport
        self.message = message
        self.way = way
        self.peer = peer
        self.what = what

    @property
    def is_coming(self) -> bool:
        """Whether part of the message has arrived; then its sender is not waiting, whatever its last heartbeat said."""
        return self.way == "recv" and self.message.bytes_done > 0

    def wait(self, timeout_s: float | None) -> None:
        self._transport._wait_for(self, timeout_s)


class _Batch:
    """All messages of one step; waiting for one waits for all."""

    def __init__(self, transport: TorchDistributed, works: list[Any]) -> None:
        self._transport = transport
        self._works = works

    def wait(self, timeout_s: float | None) -> None:
        for work in self._works:
            self._transport._wait(work, self._transport.timeout_s if timeout_s is None else timeout_s, "a batch")
        self._works = []


class _OnHost:
    """Work of a GPU for which this process waits; torch's own wait only delays the GPU's next work."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta) -> None:
        deadline = time.monotonic() + timeout.total_seconds()
        while not self._work.is_completed():
            if time.monotonic() > deadline:
                raise TransportError(f"timed out after {timeout.total_seconds():g} s")
            time.sleep(_POLL_EVERY_S)
        self._work.wait()

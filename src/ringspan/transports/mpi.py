"""Messages over MPI, point to point, through mpi4py.

MPI's own waits have no deadline and cannot be interrupted. So a wait here polls: is the message complete, has another
rank announced that it aborts, has the deadline passed? It spins at first, because most messages arrive soon, and then
sleeps between polls, because another rank may need the core.

Messages make progress while a rank is in a wait or an exchange; most MPI libraries make none while the rank computes.
MPI itself handles the death of a rank: by default mpirun ends the whole job. MPI_Abort is never called. A rank that
ends with an exception waits inside MPI for the others unless it was started with `python -m mpi4py`.

A group that has failed stays failed: its communicator may still carry messages without a receiver.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from ringspan.errors import TransportError, UnsupportedError
from ringspan.transports.base import Posted, Receive, Send

if TYPE_CHECKING:
    from mpi4py import MPI

_DATA_TAG, _NOTICE_TAG = 1, 2
_NOTICE_BYTES = 2000  # short enough for common MPI libraries to send at once ("eager"), without a posted receive
_SPIN_S = 100e-6
_SLEEP_S = 50e-6


@cache
def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is installed, an MPI library is not
        raise UnsupportedError(
            f"the MPI transport needs mpi4py and an MPI library ({error})",
            remedy="from a checkout, pip install '.[mpi]', and take Open MPI or MPICH from the system's packages",
        ) from error
    return MPI


def is_mpi_comm(group: object) -> bool:
    """Whether a group is an mpi4py communicator, without importing mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(group, mpi.Comm)


class MpiGroup:
    """A hashable communicator, compared by identity; mpi4py's own are unhashable. There is one per communicator."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self.comm = comm


def mpi_group(comm: "MPI.Comm") -> MpiGroup:
    """The group of a communicator; it is stored on the communicator and freed with it."""
    group = comm.Get_attr(_group_key())
    if not isinstance(group, MpiGroup):
        group = MpiGroup(comm)
        comm.Set_attr(_group_key(), group)
    return group


@cache
def _group_key() -> int:
    return int(_import_mpi().Comm.Create_keyval())


class MpiTransport:
    """One rank's end of a duplicate of the caller's communicator, so that our messages never match the caller's.

    All ranks of the communicator must make one, within `timeout_s`, which is also the deadline of waits where the
    caller gives none. Use it from one thread.

    Args:
        comm: an mpi4py communicator; None for MPI.COMM_WORLD.
        timeout_s: see above.
        chunk_bytes: longer messages travel in pieces of this size, because MPI counts bytes in int32.
    """

    def __init__(self, comm: "MPI.Comm | None" = None, *, timeout_s: float = 60.0, chunk_bytes: int = 2**30) -> None:
        self._mpi = _import_mpi()
        parent = self._mpi.COMM_WORLD if comm is None else comm
        self.rank: int = parent.Get_rank()
        self.world_size: int = parent.Get_size()
        self.timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._status: MPI.Status = self._mpi.Status()
        self._failure: str | None = None
        self._notices: list[MPI.Request] = []
        self._comm: MPI.Comm
        self._comm, request = parent.Idup()
        if not _poll(request, self._status, time.monotonic() + timeout_s, lambda: False):
            raise TransportError(
                f"rank {self.rank}: not all {self.world_size} ranks opened the communicator within {timeout_s:g} s"
            )
        # MPI may use a buffer while the communicator exists, so unfinished messages are kept for that long.
        self._under_way: list[_Message] = []
        self._comm.Set_attr(self._mpi.Comm.Create_keyval(), self._under_way)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Post receives before sends, so that a message arrives at a posted buffer."""
        self._prepare()
        incoming = [self._receive(src, buffer) for src, buffer in receives]
        outgoing = [self._send(dst, tensor) for dst, tensor in sends]
        return Posted(outgoing, incoming)

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Gather with one collective; every rank's payload has the same length."""
        self._prepare()
        size, byte = len(payload), self._mpi.BYTE
        everyone = bytearray(size * self.world_size)
        request = self._comm.Iallgather([payload, size, byte], [everyone, size, byte])
        what = f"rank {self.rank}: the gathering of {size} bytes from each of {self.world_size} ranks"
        self._keep(_Message(self, [request], (payload, everyone), what)).wait(timeout_s)
        return [bytes(everyone[rank * size : (rank + 1) * size]) for rank in range(self.world_size)]

    def abort(self, reason: str) -> None:
        """Send the reason to all other ranks, unless another rank failed first. Waits and exchanges poll for it."""
        if self._has_failed():
            return
        notice = reason.encode()[:_NOTICE_BYTES]
        self._failure = notice.decode(errors="ignore")
        self._notices = [
            self._comm.Isend([notice, self._mpi.BYTE], dest=peer, tag=_NOTICE_TAG)
            for peer in range(self.world_size)
            if peer != self.rank
        ]

    def close(self) -> None:
        """Free the duplicate; a collective call. After a failure it is not freed: it may be in use."""
        if self._comm == self._mpi.COMM_NULL:
            return
        if self._failure is None and all(message.is_through for message in self._under_way):
            self._comm.Free()

    def _prepare(self) -> None:
        """Before new messages start, check for a failure and collect completed sends."""
        if self._has_failed():
            raise TransportError(str(self._failure))
        self._under_way[:] = [message for message in self._under_way if not message.is_through]

    def _keep(self, message: "_Message") -> "_Message":
        self._under_way.append(message)
        return message

    def _send(self, dst: int, tensor: torch.Tensor) -> "_Message":
        requests = [self._comm.Isend(chunk, dst, _DATA_TAG) for chunk in self._chunks(tensor)]
        what = f"rank {self.rank}: the send of {tensor.nbytes} bytes to rank {dst}"
        return self._keep(_Message(self, requests, tensor, what))

    def _receive(self, src: int, tensor: torch.Tensor) -> "_Message":
        requests = [self._comm.Irecv(chunk, src, _DATA_TAG) for chunk in self._chunks(tensor)]
        what = f"rank {self.rank}: the receive of {tensor.nbytes} bytes from rank {src}"
        return self._keep(_Message(self, requests, tensor, what, tensor.nbytes))

    def _chunks(self, tensor: torch.Tensor) -> Iterator[tuple["MPI.buffer", "MPI.Datatype"]]:
        """A tensor's memory as an MPI buffer, by address: some dtypes of torch do not exist in NumPy."""
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"a tensor on {tensor.device}: the MPI transport carries CPU tensors", remedy="copy it there"
            )
        assert tensor.is_contiguous()
        start, left = tensor.data_ptr(), tensor.nbytes
        while True:  # an empty tensor is one empty message
            nbytes = min(left, self._chunk_bytes)
            yield self._mpi.buffer.fromaddress(start, nbytes), self._mpi.BYTE
            start, left = start + nbytes, left - nbytes
            if not left:
                return

    def _has_failed(self) -> bool:
        """Whether this rank has aborted, or another rank has announced that it did."""
        if self._failure is None and self._comm.Iprobe(self._mpi.ANY_SOURCE, _NOTICE_TAG, self._status):
            notice = bytearray(self._status.Get_count(self._mpi.BYTE))
            self._comm.Recv([notice, self._mpi.BYTE], self._status.Get_source(), _NOTICE_TAG)
            self._failure = notice.decode(errors="ignore")
        return self._failure is not None

    def _wait(self, message: "_Message", timeout_s: float | None) -> None:
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        while not message.is_through:
            try:
                is_done = _poll(message.requests[0], self._status, deadline, self._has_failed)
            except self._mpi.Exception as error:
                message.requests.pop(0)
                self.abort(f"{message.what} failed: {error}")
                raise TransportError(str(self._failure)) from error
            if not is_done:
                self.abort(f"{message.what} timed out after {timeout_s:g} s")
                raise TransportError(str(self._failure))
            message.requests.pop(0)
            message.arrived += self._status.Get_count(self._mpi.BYTE)
        if message.expected not in (None, message.arrived):
            self.abort(f"{message.what} found only {message.arrived} bytes; sizes must be the same on both ranks")
            raise TransportError(str(self._failure))


class _Message:
    """A pending message of one or more pieces, and the memory it uses. A receive knows its number of bytes."""

    __slots__ = ("_memory", "_transport", "arrived", "expected", "requests", "what")

    def __init__(
        self,
        transport: MpiTransport,
        requests: "list[MPI.Request]",
        memory: object,
        what: str,
        expected: int | None = None,
    ) -> None:
        self._transport = transport
        self._memory = memory
        self.requests = requests
        self.what = what
        self.expected = expected
        self.arrived = 0

    @property
    def is_through(self) -> bool:
        return not self.requests

    def wait(self, timeout_s: float | None) -> None:
        self._transport._wait(self, timeout_s)


def _poll(request: "MPI.Request", status: "MPI.Status", deadline: float, is_over: Callable[[], bool]) -> bool:
    """Whether the request completed before the deadline and before the group failed."""
    spin_until = time.monotonic() + _SPIN_S
    while not request.Test(status):
        now = time.monotonic()
        if now > deadline or is_over():
            return False
        if now > spin_until:
            time.sleep(_SLEEP_S)
    return True

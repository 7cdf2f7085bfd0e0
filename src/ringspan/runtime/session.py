"""What does a group keep between calls, and how do its ranks start a call together?

A session holds one rank's side of a group: transport, contract, buffers, prepared plans and measured figures. There is
one per group, made on first use and collected with the group, and one per mesh shape over the same ranks.

`session.call` is the only way in which ranks agree, refuse and abort:

    with session.call(timeout_s) as call:
        ...                      # check arguments: an error here is sent to the other ranks, which raise it too
        call.agree(signature)    # every rank makes the same call, or all raise the same TransportError
        ...                      # exchange messages: an error here aborts the group, since others wait for this rank
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringspan.algorithms import Mesh
from ringspan.errors import ShapeError, TransportError
from ringspan.runtime.checks import check_timeout
from ringspan.runtime.contract import Contract, Place, Signature
from ringspan.runtime.scratch import ScratchPool
from ringspan.runtime.wire import Buffers
from ringspan.transports import Transport, find_group, open_transport
from ringspan.transports.base import gather_payloads


class Session(NamedTuple):
    """One rank's side of a group in use; `mesh` is set if the group has two dimensions."""

    transport: Transport
    mesh: Mesh | None
    contract: Contract
    buffers: Buffers
    scratch: ScratchPool
    plans: dict[object, Any]
    measured: dict[object, Any]  # calibration results

    def call(self, timeout_s: object = None, *, contract: bool = True, is_agreed: bool = False) -> "RankCall":
        """Begin a call on this rank; `timeout_s` as the user gave it.

        Without `contract` no rank is asked and no refusal is sent. `is_agreed` continues a call that all ranks agreed
        on before.
        """
        return RankCall(self, timeout_s, contract, is_agreed)


_TOLD = "_ringspan_told"  # attribute of an error that the other ranks know: its number in the group


class RankCall:
    """One rank's part in a call of the group, from checking arguments to the last message."""

    __slots__ = ("_has_contract", "_session", "deadline_s", "is_agreed", "timeout_s")

    def __init__(self, session: Session, timeout_s: object, contract: bool, is_agreed: bool) -> None:
        self._session = session
        self._has_contract = contract
        self.timeout_s = timeout_s
        self.deadline_s: float | None = None
        self.is_agreed = is_agreed

    def __enter__(self) -> "RankCall":
        if self.timeout_s is not None:
            try:
                self.deadline_s = check_timeout(self.timeout_s)
            except ShapeError as error:
                self.refuse(error)
                raise
        return self

    def agree(self, signature: Signature, place: Place | None = None, *, once: bool = False) -> None:
        """Return once all ranks are known to make this call; raise the same TransportError on all if they do not.

        `place` tells identical calls apart. A signature that comes only `once` is not remembered as agreed.
        """
        if self._has_contract:
            if place is not None:
                signature = signature.at(place)
            self._session.contract.agree(signature, self.deadline_s, is_new=place is None and not once)
        self.is_agreed = True

    def gather(self, signature: Signature, payload: bytes) -> list[bytes]:
        """Agree on a call, then return every rank's payload, in rank order; lengths may differ."""
        self.agree(signature)
        return gather_payloads(self._session.transport, payload, self.deadline_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Send this rank's error to the other ranks: as a refusal before all agreed, by aborting the group after."""
        if isinstance(error, TransportError):  # the other ranks know of it
            return
        contract = self._session.contract
        contract.num_told += 1
        error.__dict__[_TOLD] = contract.num_told
        if self.is_agreed or not isinstance(error, Exception):
            # Ctrl-C too: other ranks read this rank's memory, so links are closed before the memory is reused.
            transport = self._session.transport
            transport.abort(f"rank {transport.rank} failed: {type(error).__name__}: {error}".removesuffix(": "))
        else:
            self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Send this rank's error as a refusal, if other ranks are at or before their agreement on a call."""
        if self._has_contract and self._session.transport.world_size > 1:
            # The error is this rank's: it does not wait for ranks that are busy elsewhere to raise it.
            timeout_s = self.deadline_s or self._session.transport.timeout_s
            self._session.contract.refuse(f"{type(error).__name__}: {error}", timeout_s)


def was_told(error: BaseException, since: int) -> bool:
    """Whether a call has announced an error since its group had `since` errors; each error is announced once."""
    return isinstance(error, TransportError) or error.__dict__.get(_TOLD, 0) > since


# Keyed by group, which a transport references weakly, so that sessions are collected with it; then by mesh shape.
_SESSIONS: "WeakKeyDictionary[Any, dict[tuple[int, int] | None, Session]]" = WeakKeyDictionary()


def session_of(group: Any) -> Session:
    """Return the session of anything that `find_group` accepts."""
    try:
        return _SESSIONS[group][None]
    except (KeyError, TypeError):  # first use, None, or a mesh
        return _find_session(group)


def _find_session(group: Any) -> Session:
    key, shape = find_group(group)
    try:
        sessions = _SESSIONS.get(key)
    except TypeError:  # not a group; open_transport refuses it
        sessions = None
    if sessions is None:
        transport = open_transport(key)
        session = Session(transport, None, Contract(transport), Buffers(), ScratchPool(), {}, {})
        sessions = _SESSIONS[key] = {None: session}
    if shape is not None and shape not in sessions:
        # The order of messages belongs to the group, whatever its mesh shape, so all shapes share the contract.
        sessions[shape] = sessions[None]._replace(mesh=Mesh(*shape), plans={}, measured={})
    return sessions[shape]


@contextmanager
def lend_session(group: Any, session: Session) -> Iterator[None]:
    """Let a group use another session for a while, such as one that measures; all ranks at the same time."""
    session_of(group)
    key, shape = find_group(group)
    own = _SESSIONS[key]
    _SESSIONS[key] = own | {shape: session}
    try:
        yield
    finally:
        _SESSIONS[key] = own

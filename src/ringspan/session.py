"""What a group keeps from call to call: its transport, the agreement between its ranks, memory, plans and figures.

There is one session per group, made when the group is first used and gone with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringspan.algorithms import Mesh
from ringspan.contract import Contract
from ringspan.scratch import ScratchPool
from ringspan.transports import Transport, find_group, open_transport
from ringspan.wire import Buffers


class Session(NamedTuple):
    """One rank's side of a group in use; `mesh` is set if the group has two dimensions."""

    transport: Transport
    mesh: Mesh | None
    contract: Contract
    buffers: Buffers
    scratch: ScratchPool
    plans: dict[object, Any]  # of calls that were made before
    measured: dict[object, Any]  # what calibration found out


# Keyed by the group, which a transport refers to only weakly, so that a session goes when its group does.
_SESSIONS: "WeakKeyDictionary[Any, Session]" = WeakKeyDictionary()


def session_of(group: Any) -> Session:
    """The session of a group, which may be anything `open_transport` takes."""
    key = find_group(group)
    try:
        session = _SESSIONS.get(key)
    except TypeError:  # nothing that could be a group
        session = None
    if session is None:
        transport, shape = open_transport(key)
        mesh = None if shape is None else Mesh(*shape)
        session = Session(transport, mesh, Contract(transport), Buffers(), ScratchPool(), {}, {})
        _SESSIONS[key] = session
    return session


@contextmanager
def lend_session(group: Any, session: Session) -> Iterator[None]:
    """Let a group use another session for a while, such as one that measures; all ranks at the same time."""
    key, own = find_group(group), session_of(group)
    _SESSIONS[key] = session
    try:
        yield
    finally:
        _SESSIONS[key] = own

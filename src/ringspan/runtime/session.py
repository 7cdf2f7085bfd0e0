"""What a group keeps from call to call: its transport, the agreement between its ranks, memory, plans and figures.

There is one session per group, made when the group is first used and gone with it; and one for each shape of a mesh
that is made of the same ranks, which has plans and figures of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ringspan.algorithms import Mesh
from ringspan.runtime.contract import Contract
from ringspan.runtime.scratch import ScratchPool
from ringspan.runtime.wire import Buffers
from ringspan.transports import Transport, find_group, open_transport


class Session(NamedTuple):
    """One rank's side of a group in use; `mesh` is set if the group has two dimensions."""

    transport: Transport
    mesh: Mesh | None
    contract: Contract
    buffers: Buffers
    scratch: ScratchPool
    plans: dict[object, Any]  # of calls that were made before
    measured: dict[object, Any]  # what calibration found out


# By the group, which a transport refers to only weakly, so that its sessions go when it does; then by the mesh's shape.
_SESSIONS: "WeakKeyDictionary[Any, dict[tuple[int, int] | None, Session]]" = WeakKeyDictionary()


def session_of(group: Any) -> Session:
    """The session of a group, which may be anything `find_group` takes."""
    key, shape = find_group(group)
    try:
        sessions = _SESSIONS.get(key)
    except TypeError:  # nothing that could be a group
        sessions = None
    if sessions is None:
        transport = open_transport(key)
        session = Session(transport, None, Contract(transport), Buffers(), ScratchPool(), {}, {})
        sessions = _SESSIONS[key] = {None: session}
    if shape is not None and shape not in sessions:
        # Messages of one group come in one order, whatever shape its ranks are thought to have.
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

"""Messages between ranks, whatever carries them. `open_transport` finds out from the group what that is."""

import weakref
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import UnsupportedError
from ringspan.transports.base import Transport
from ringspan.transports.in_process import InProcessRank
from ringspan.transports.mpi import MpiGroup, MpiTransport, is_mpi_comm, mpi_group
from ringspan.transports.single import ALONE, Alone, Single
from ringspan.transports.torch_distributed import TorchDistributed

__all__ = ["Opened", "Transport", "find_group", "open_transport"]


class Opened(NamedTuple):
    """A transport, and the shape of the mesh if the group had two dimensions."""

    transport: Transport
    mesh_shape: tuple[int, int] | None = None


def find_group(group: Any) -> Any:
    """The group itself; for None the default process group, or a single rank if there is none."""
    if group is not None:
        return mpi_group(group) if is_mpi_comm(group) else group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else ALONE


def open_transport(group: Any) -> Opened:
    """The transport of a ProcessGroup, a DeviceMesh, a rank of `run_in_process` or an MPI communicator."""
    if isinstance(group, Alone):
        return Opened(Single())
    if isinstance(group, InProcessRank):
        return Opened(weakref.proxy(group))
    if isinstance(group, dist.ProcessGroup):
        return Opened(TorchDistributed(group))
    if isinstance(group, DeviceMesh):
        return _open_mesh(group)
    if isinstance(group, MpiGroup):
        return Opened(MpiTransport(group.comm))
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError("group: this rank is not a member of it; call only on ranks that are")
    raise UnsupportedError(
        f"group={group!r}: a group is a ProcessGroup, a DeviceMesh of one or two dimensions, a rank of run_in_process, "
        "an mpi4py communicator, or None for the default group"
    )


def _open_mesh(mesh: DeviceMesh) -> Opened:
    if mesh.ndim == 1:
        return Opened(TorchDistributed(mesh.get_group()))
    if mesh.ndim == 2:
        return Opened(TorchDistributed(mesh._flatten().get_group()), (mesh.size(0), mesh.size(1)))
    raise UnsupportedError(f"group: a DeviceMesh of {mesh.ndim} dimensions; take the one or two of context parallelism")

"""Which transport carries the messages of a group? `open_transport` decides by the kind of the group."""

import os
import weakref
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringspan.errors import TransportError, UnsupportedError
from ringspan.transports.base import ALONE, Alone, Single, Transport
from ringspan.transports.in_process import InProcessRank
from ringspan.transports.mpi import MpiGroup, MpiTransport, is_mpi_comm, mpi_group
from ringspan.transports.torch_distributed import TorchDistributed

__all__ = ["FoundGroup", "Transport", "find_group", "open_transport"]


class FoundGroup(NamedTuple):
    """The group that an argument names, and its shape if the group is a 2-D mesh."""

    group: Any
    mesh_shape: tuple[int, int] | None = None


def find_group(group: Any) -> FoundGroup:
    """Return the group, or a mesh's group; for None the default process group, or a single rank if there is none."""
    if group is None:
        return FoundGroup(_default_group())
    if isinstance(group, DeviceMesh):
        return _group_of_mesh(group)
    return FoundGroup(mpi_group(group) if is_mpi_comm(group) else group)


def open_transport(group: Any) -> Transport:
    if isinstance(group, Alone):
        return Single()
    if isinstance(group, InProcessRank):
        transport: Transport = weakref.proxy(group)
        return transport
    if isinstance(group, dist.ProcessGroup):
        return TorchDistributed(group)
    if isinstance(group, MpiGroup):
        return MpiTransport(group.comm)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(
            "this rank is not a member of it", argument="group", remedy="call only on ranks that are"
        )
    raise UnsupportedError(
        "a group is a ProcessGroup, a DeviceMesh of one or two dimensions, a rank of "
        "run_in_process, an mpi4py communicator, or None for the default group",
        argument="group",
        value=group,
    )


def _default_group() -> Any:
    """Return the default group, or None. A process of torchrun without one is refused: each would do all the work."""
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    started = os.environ.get("WORLD_SIZE", "")
    if started.isdecimal() and int(started) > 1:
        raise TransportError(
            f"group=None, WORLD_SIZE={started}: the environment says that this is one of {started} processes, but "
            "there is no default process group; call torch.distributed.init_process_group(...) first, or pass group="
        )
    return ALONE


def _group_of_mesh(mesh: DeviceMesh) -> FoundGroup:
    """Return a mesh's process group, which lasts; `mesh["cp"]` is a new object each time."""
    if mesh.ndim not in (1, 2):
        raise UnsupportedError(
            f"a DeviceMesh of {mesh.ndim} dimensions",
            argument="group",
            remedy="take the one or two of context parallelism",
        )
    if mesh.ndim == 2 and not mesh.mesh_dim_names:
        raise UnsupportedError(
            "torch makes one group of two dimensions only if they have names",
            argument="group",
            value=mesh,
            remedy='make the mesh with mesh_dim_names=("ring", "ulysses") or other ones',
        )
    flat = mesh if mesh.ndim == 1 else mesh._flatten()
    try:
        group = flat.get_group()
    except RuntimeError as error:
        raise TransportError(f"group={mesh}: its process group is gone ({error}); make a new mesh") from error
    return FoundGroup(group, None if mesh.ndim == 1 else (mesh.size(0), mesh.size(1)))

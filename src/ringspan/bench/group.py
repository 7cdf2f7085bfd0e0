"""How a rank finds its group, and what ranks tell each other beside attention.

All goes through the transport, so that gloo, NCCL, MPI and threads are measured by the same code.
"""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringspan.bench.settings import Carrier
from ringspan.transports.base import Transport


def open_group(
    carrier: Carrier, rank: int, world_size: int, rendezvous: str, device: torch.device, timeout_s: float
) -> Any:
    """The group of all ranks, for any carrier but threads."""
    if carrier == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD
    if carrier == "nccl":
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(carrier, init_method=rendezvous, rank=rank, world_size=world_size, timeout=limit)
    return dist.group.WORLD


def meet(transport: Transport, timeout_s: float) -> None:
    """Return when all ranks are here; who waits, waits without using its core."""
    transport.all_gather_bytes(b".", timeout_s)


def gather_values(transport: Transport, value: object, timeout_s: float) -> list[Any]:
    """Every rank's value, in rank order."""
    payload = pickle.dumps(value)
    sizes = transport.all_gather_bytes(len(payload).to_bytes(8, "little"), timeout_s)
    longest = max(int.from_bytes(size, "little") for size in sizes)
    everyone = transport.all_gather_bytes(payload.ljust(longest, b"\0"), timeout_s)
    return [pickle.loads(payload) for payload in everyone]  # noqa: S301 - from a rank of our own group

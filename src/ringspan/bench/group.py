"""How does a rank open its group, and how do ranks exchange values and meet?

Everything goes through the transport, so that gloo, NCCL, MPI and threads are measured by the same code.
"""

import functools
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringspan.bench.settings import Carrier
from ringspan.transports.base import Receive, Send, Transport, gather_payloads


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
    """A barrier. A waiting rank does not use its core."""
    transport.all_gather_bytes(b".", timeout_s)


def gather_values(transport: Transport, value: object, timeout_s: float) -> list[Any]:
    """Every rank's value, in rank order."""
    everyone = gather_payloads(transport, pickle.dumps(value), timeout_s)
    return [pickle.loads(payload) for payload in everyone]  # noqa: S301 - from a rank of our own group


def sum_over_ranks(transport: Transport, tensors: Sequence[torch.Tensor], timeout_s: float) -> list[torch.Tensor]:
    """The sums of every rank's tensors, on all ranks: reduce-scatter in rank order, then all-gather."""
    sizes = [x.numel() for x in tensors]
    world_size, rank = transport.world_size, transport.rank
    part = -(-sum(sizes) // world_size)
    flat = tensors[0].new_empty(world_size * part)
    torch.cat([x.reshape(-1) for x in tensors], out=flat[: sum(sizes)])
    flat[sum(sizes) :] = 0
    parts = flat.view(world_size, part)
    mine = [own if peer == rank else torch.empty_like(own) for peer, own in enumerate(parts)]  # this part of every rank
    _exchange(transport, parts, mine, timeout_s)
    wide = torch.promote_types(flat.dtype, torch.float32)
    parts[rank] = functools.reduce(torch.add, (x.to(wide) for x in mine))
    _exchange(transport, [parts[rank]] * world_size, parts, timeout_s)
    return [x.view_as(like) for x, like in zip(torch.split(flat[: sum(sizes)], sizes), tensors, strict=True)]


def _exchange(
    transport: Transport,
    sends: Sequence[torch.Tensor] | torch.Tensor,
    receives: Sequence[torch.Tensor] | torch.Tensor,
    timeout_s: float,
) -> None:
    """Send the r-th tensor to rank r, and receive from it into the r-th."""
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    posted = transport.exchange(
        [Send(peer, sends[peer]) for peer in peers], [Receive(peer, receives[peer]) for peer in peers]
    )
    for handle in (*posted.receives, *posted.sends):
        handle.wait(timeout_s)

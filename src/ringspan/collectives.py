"""Whole sequences to shards and back, with gradients, for uneven shards.

`shard` takes this rank's rows of a tensor every rank holds; `gather` puts the whole together on every rank. The
gradient of a gathered row goes to the rank that owns it, summed over all ranks, as each of them may have used it.
"""

from typing import Any

import torch

from ringspan.arguments import check_timeout, check_world_size
from ringspan.contract import Signature
from ringspan.errors import RingspanError, ShapeError
from ringspan.layout import Layout
from ringspan.session import Session, session_of
from ringspan.tiles import local_rows
from ringspan.transports.all_to_all import all_to_all


def shard(whole: torch.Tensor, layout: Layout, group: Any = None, *, dim: int) -> torch.Tensor:
    """This rank's rows of a tensor that every rank holds; differentiable as any indexing is, without messages."""
    session = session_of(group)
    check_world_size(layout, session.transport.world_size)
    return layout.shard(whole, session.transport.rank, dim)


def gather(
    part: torch.Tensor, layout: Layout, group: Any = None, *, dim: int, timeout_s: float | None = None
) -> torch.Tensor:
    """The whole tensor on every rank, from the ranks' shards; differentiable.

    `timeout_s` is the deadline of every wait for another rank, also in the backward pass; by default that of the group.
    """
    session = session_of(group)
    deadline_s = session.transport.timeout_s
    try:
        deadline_s = check_timeout(timeout_s, deadline_s)
        check_world_size(layout, session.transport.world_size)
        _check_part(part, layout, session.transport.rank, dim)
    except RingspanError as error:
        session.contract.refuse(f"{type(error).__name__}: {error}", deadline_s)
        raise
    gathered: torch.Tensor = _Gather.apply(part, layout, session, dim, deadline_s)  # type: ignore[no-untyped-call]
    return gathered


def _check_part(part: torch.Tensor, layout: Layout, rank: int, dim: int) -> None:
    if not -part.ndim <= dim < part.ndim:
        raise ShapeError(f"dim={dim}: part has {part.ndim} dims; use {-part.ndim} to {part.ndim - 1}")
    if part.shape[dim] != layout.shard_len(rank):
        raise ShapeError(
            f"part.shape={tuple(part.shape)} on rank {rank}: the layout gives this rank {layout.shard_len(rank)} "
            f"positions along dim {dim}"
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, layout: Layout, session: Session, dim: int, deadline_s: float
    ) -> torch.Tensor:
        ctx.layout, ctx.session, ctx.dim, ctx.deadline_s = layout, session, dim, deadline_s
        _agree(session, "gather", part, layout, dim, deadline_s)
        part = part.contiguous()
        shapes = [_with_length(part, dim, layout.shard_len(rank)) for rank in range(layout.world_size)]
        return layout.unshard(all_to_all(session.transport, [part] * layout.world_size, shapes, deadline_s), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        layout, session, dim, deadline_s = ctx.layout, ctx.session, ctx.dim, ctx.deadline_s
        rank = session.transport.rank
        _agree(session, "gradient of gather", grads[0], layout, dim, deadline_s)
        pieces = [layout.shard(grads[0], peer, dim).contiguous() for peer in range(layout.world_size)]
        received = all_to_all(session.transport, pieces, [tuple(pieces[rank].shape)] * layout.world_size, deadline_s)
        grad = torch.stack(received).sum(dim=0)
        if rank > 0 and layout.replicated:
            # The whole has the replicated rows of rank 0, so its gradient is rank 0's alone.
            grad.movedim(dim, 0)[local_rows(layout, rank).replicated] = 0
        return grad, None, None, None, None


def _agree(session: Session, what: str, x: torch.Tensor, layout: Layout, dim: int, deadline_s: float) -> None:
    """All ranks are in the same call, with tensors that differ in the sharded dim only."""
    shape = list(x.shape)
    shape[dim] = layout.num_positions
    fields = {"call": what, "shape": shape, "dim": dim % x.ndim, "dtype": x.dtype, "layout": layout.fingerprint()}
    session.contract.agree(Signature.of(fields), deadline_s)


def _with_length(part: torch.Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(part.shape)
    shape[dim] = length
    return tuple(shape)

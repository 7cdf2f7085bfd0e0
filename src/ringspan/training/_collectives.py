"""How do whole sequences become shards and shards whole sequences, with gradients?

`shard` takes this rank's rows of a tensor that every rank holds; `gather` puts the whole together on every rank. Shards
may be uneven. The gradient of a gathered row is summed over all ranks and goes to the rank that owns the row.
"""

from typing import Any, NamedTuple

import torch

from ringspan.arguments import WHOLE, check_arguments
from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.program.problem import local_rows
from ringspan.runtime.checks import check_tensor, check_world_size
from ringspan.runtime.compiled import outside_of_programs
from ringspan.runtime.contract import Place, Signature
from ringspan.runtime.session import Session, session_of
from ringspan.transports.base import all_to_all


def shard(whole: torch.Tensor, layout: Layout, group: Any = None, *, dim: int) -> torch.Tensor:
    """Take this rank's rows of a tensor that every rank holds, without messages; differentiable like indexing."""
    session = session_of(group)
    check_world_size(layout, session.transport.world_size)
    _check_dim("whole", whole, dim)
    return layout.shard(whole, session.transport.rank, dim)


@outside_of_programs("gather")
def gather(
    part: torch.Tensor, layout: Layout, group: Any = None, *, dim: int, timeout_s: float | None = None
) -> torch.Tensor:
    """Put the ranks' shards together to the whole tensor, on every rank; differentiable.

    Args:
        part: This rank's rows, in the order of `layout.positions(rank)`.
        layout: Who holds which position.
        group: As in `attention`.
        dim: The dim of the sequence.
        timeout_s: The deadline of every wait for another rank, also in the backward pass; by default that of the group.
    """
    session = session_of(group)
    with session.call(timeout_s) as call:
        check_world_size(layout, session.transport.world_size)
        _check_part(part, layout, session.transport.rank, dim)
    return _gathered(part, _Where(layout, session, dim % part.ndim, call.deadline_s))


def _check_part(part: torch.Tensor, layout: Layout, rank: int, dim: int) -> None:
    check_tensor("part", part)
    _check_dim("part", part, dim)
    if part.shape[dim] != layout.shard_len(rank):
        raise ShapeError(
            f"the layout gives rank {rank} {layout.shard_len(rank)} positions along dim {dim}",
            argument="part.shape",
            value=tuple(part.shape),
            remedy=_way_out(part, layout.shard_len(rank)),
        )


def _way_out(part: torch.Tensor, shard_len: int) -> str:
    fitting = [str(dim) for dim, size in enumerate(part.shape) if size == shard_len]
    return f"use dim={' or dim='.join(fitting)}" if fitting else "pass the layout that the part was made with"


def _check_dim(name: str, x: torch.Tensor, dim: int) -> None:
    check_tensor(name, x)
    check_arguments(dim=(WHOLE, dim))
    if not x.ndim:
        raise ShapeError(
            "a single number has no dim of positions",
            argument=f"{name}.shape",
            value=(),
            remedy=f"use {name}[None] for one",
        )
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(
            f"{name} has {x.ndim} dims", argument="dim", value=dim, remedy=f"use {-x.ndim} to {x.ndim - 1}"
        )


class _Where(NamedTuple):
    """The layout, group, dim and deadline of a call."""

    layout: Layout
    session: Session
    dim: int
    deadline_s: float | None


def _gathered(part: torch.Tensor, where: _Where, place: Place | None = None) -> torch.Tensor:
    with where.session.call(where.deadline_s) as call:
        call.agree(_signature("gather", part, where), place)
        whole: torch.Tensor = _Gather.apply(part, where)  # type: ignore[no-untyped-call]
        return whole


def _reduced(whole: torch.Tensor, where: _Where, place: Place) -> torch.Tensor:
    with where.session.call(where.deadline_s) as call:
        call.agree(_signature("gradient of gather", whole, where), place)
        part: torch.Tensor = _Reduce.apply(whole, where)  # type: ignore[no-untyped-call]
        return part


def _resolved(x: torch.Tensor) -> torch.Tensor:
    """Materialise a lazy conjugate or negative, because the memory is sent."""
    return x.resolve_conj().resolve_neg()


def _keep(ctx: Any, where: _Where) -> None:
    """Save the identity of the call, so that ranks that differentiate equal calls in another order are detected."""
    ctx.where, ctx.place = where, Place("gradient of call", where.session.contract.num_calls)


class _Gather(torch.autograd.Function):
    """Gather the parts on every rank. Gather and reduce are linear, and each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, where: _Where) -> torch.Tensor:
        _keep(ctx, where)
        layout, session, dim, deadline_s = where
        part = _resolved(part).contiguous()
        shapes = [_with_length(part, dim, layout.shard_len(rank)) for rank in range(layout.world_size)]
        return layout.unshard(all_to_all(session.transport, [part] * layout.world_size, shapes, deadline_s), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(grads[0], ctx.where, ctx.place), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, where: _Where) -> torch.Tensor:
        _keep(ctx, where)
        layout, session, dim, deadline_s = where
        rank = session.transport.rank
        whole = _resolved(whole)
        pieces = [layout.shard(whole, peer, dim).contiguous() for peer in range(layout.world_size)]
        received = all_to_all(session.transport, pieces, [tuple(pieces[rank].shape)] * layout.world_size, deadline_s)
        part = torch.stack(received).sum(dim=0)
        if rank > 0 and layout.replicated:
            # `gather` takes replicated rows from rank 0, so only rank 0 gets their gradient.
            part.movedim(dim, 0)[local_rows(layout, rank).replicated] = 0
        return part

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gathered(grads[0], ctx.where, ctx.place), None


def _signature(what: str, x: torch.Tensor, where: _Where) -> Signature:
    """Describe a call; equal on ranks whose tensors differ in the sharded dim only."""
    layout, dim = where.layout, where.dim
    return Signature.of(
        {
            "call": what,
            "shape": _with_length(x, dim, layout.num_positions),
            "dim": dim,
            "dtype": x.dtype,
            "layout": layout.fingerprint(),
            "gradient": "wanted" if torch.is_grad_enabled() and x.requires_grad else "not wanted",
        }
    )


def _with_length(part: torch.Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(part.shape)
    shape[dim] = length
    return tuple(shape)

"""How is the gradient of an embedding summed in sequence order on any number of ranks?

A gradient per tile would be as large as the whole table, so ranks do not merge sums. Each rank receives a slice of the
features of all tokens, adds them in the order of positions, and sends its finished columns to all. A rank receives as
many elements as the gradients of its own shard have, and the table once.
"""

import itertools
from typing import Any

import torch
from torch.nn.functional import embedding as look_up

from ringspan.errors import ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.reproducible._ranks import Ranks, check_tokens, differentiable_once, open_ranks
from ringspan.runtime.checks import check_tensor
from ringspan.transports.base import all_to_all


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, layout: Layout, group: Any = None, timeout_s: float | None = None
) -> torch.Tensor:
    """Look up the rows of `weight` for token ids; the gradient has the same bits on any number of ranks.

    Args:
        ids: (batch, seq), integers: this rank's tokens in the order of the layout.
        weight: (vocabulary, features), the same on every rank. After backward every rank has its whole gradient.
        layout: As in `linear`.
        group: As in `linear`.
        timeout_s: As in `linear`.
    """

    def check(shard_len: int) -> None:
        check_tokens("ids", ids, shard_len)
        check_tensor("weight", weight)
        if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"ids.shape={tuple(ids.shape)} ({ids.dtype}): ids are (batch, seq), int64 or int32")
        if weight.ndim != 2 or not weight.is_floating_point() or weight.device != ids.device:
            raise ShapeError(
                f"weight.shape={tuple(weight.shape)} ({weight.dtype}, {weight.device}): weight is "
                f"(vocabulary, features), floating point, on the device of ids, {ids.device}"
            )
        wrong = ids[(ids < 0) | (ids >= len(weight))]
        if len(wrong):
            raise ShapeError(
                f"ids has {int(wrong[0])}: weight has {len(weight)} rows", remedy=f"use 0 to {len(weight) - 1}"
            )

    ranks = open_ranks(layout, group, timeout_s, check, [weight])
    rows: torch.Tensor = _Embedding.apply(weight, ids, ranks)  # type: ignore[no-untyped-call]
    return rows


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks, ctx.vocabulary = ranks, len(weight)
        ctx.save_for_backward(ids)
        return look_up(ids, weight)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        with ctx.ranks.agreed("gradient of reproducible.embedding", batch=len(ids), dtype=dout.dtype, ids=ids.dtype):
            return _weight_gradient(ctx.ranks, ctx.vocabulary, ids, dout).to(dout.dtype), None, None


def _weight_gradient(ranks: Ranks, vocabulary: int, ids: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Sum the gradient of the table, (vocabulary, features), in the accumulator dtype."""
    world_size, features = ranks.session.transport.world_size, dout.shape[2]
    cuts = [features * rank // world_size for rank in range(world_size + 1)]
    width = cuts[ranks.rank + 1] - cuts[ranks.rank]
    dwhole = _unshard(ranks, [dout[..., first:last] for first, last in itertools.pairwise(cuts)], (width,))
    all_ids = _unshard(ranks, [ids] * world_size, ())
    # This operator adds in the order of the ids for any number of threads.
    mine = torch.ops.aten.embedding_dense_backward(
        dwhole.to(accumulator_dtype(dout.dtype)), all_ids, vocabulary, -1, False
    )
    shapes = [(vocabulary, last - first) for first, last in itertools.pairwise(cuts)]
    return torch.cat(all_to_all(ranks.session.transport, [mine] * world_size, shapes, ranks.deadline_s), dim=1)


def _unshard(ranks: Ranks, parts: list[torch.Tensor], tail: tuple[int, ...]) -> torch.Tensor:
    """Send the r-th part to rank r; return the received parts in the order of positions, (batch, seq, *tail)."""
    layout = ranks.tiling.layout
    shapes = [(len(parts[0]), layout.shard_len(rank), *tail) for rank in range(layout.world_size)]
    received = all_to_all(ranks.session.transport, [part.contiguous() for part in parts], shapes, ranks.deadline_s)
    return layout.unshard(received, dim=1)

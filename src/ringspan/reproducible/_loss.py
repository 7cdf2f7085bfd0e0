"""How is the loss over the labels of all ranks summed? Each token alone, then a tree over the tiles of all ranks."""

from collections.abc import Iterator
from typing import Any, Literal

import torch

from ringspan.arguments import TEXT, check_arguments
from ringspan.errors import ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.reproducible._ranks import Ranks, check_tokens, differentiable_once, open_ranks
from ringspan.runtime.arithmetic import without_autocast
from ringspan.training import IGNORE_INDEX, check_can_be_ignored


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    layout: Layout,
    group: Any = None,
    reduction: Literal["mean", "sum"] = "mean",
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Compute the loss over the labels of all ranks that are not -100, with the same bits on any number of ranks.

    `backward()` gives each rank's logits their gradient, and the layers of this package turn it into the whole gradient
    of every weight, so gradients need no sum and no scaling. Without a label on any rank the loss is 0.

    Args:
        logits: (batch, seq, vocabulary), this rank's tokens in the order of the layout.
        labels: (batch, seq), the shifted labels that `rs.shard_batch` makes; -100 to ignore a token.
        layout: As in `linear`.
        group: As in `linear`.
        reduction: "mean" over the labels of all ranks, or "sum".
        timeout_s: As in `linear`.
    """

    def check(shard_len: int) -> None:
        check_arguments(reduction=(TEXT, reduction))
        check_tokens("logits", logits, shard_len)
        check_can_be_ignored(labels)
        if logits.ndim != 3 or not logits.is_floating_point() or labels.shape != logits.shape[:2]:
            raise ShapeError(
                f"logits.shape={tuple(logits.shape)} ({logits.dtype}), labels.shape={tuple(labels.shape)}: logits are "
                "(batch, seq, vocabulary), floating point, with one label for each token"
            )
        if reduction not in ("mean", "sum"):
            raise ShapeError('use "mean" or "sum"', argument="reduction", value=reduction)
        wrong = labels[(labels != IGNORE_INDEX) & ((labels < 0) | (labels >= logits.shape[2]))]
        if len(wrong):
            raise ShapeError(
                f"labels has {int(wrong[0])}: labels are 0 to {logits.shape[2] - 1}, or {IGNORE_INDEX} to be ignored"
            )

    ranks = open_ranks(layout, group, timeout_s, check)
    with without_autocast(logits.device.type):
        loss: torch.Tensor = _CrossEntropy.apply(logits, labels, reduction, ranks)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, reduction: str, ranks: Ranks) -> torch.Tensor:
        like = logits.new_empty(2, dtype=torch.float64)
        parts = _sums(ranks, logits, labels)
        total, count = ranks.sum_over_tiles(f"reproducible.cross_entropy, {reduction}", parts, like)
        ctx.ranks, ctx.count = ranks, count.clamp(min=1) if reduction == "mean" else torch.ones_like(count)
        ctx.save_for_backward(logits, labels)
        loss: torch.Tensor = (total / ctx.count).to(accumulator_dtype(logits.dtype))
        return loss

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, labels = ctx.saved_tensors
        scale = (dloss.to(torch.float64) / ctx.count).to(dloss.dtype)
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for strip in ctx.ranks.tiles:
            for logits_row, labels_row, dlogits_row in zip(logits, labels, dlogits, strict=True):
                tile, targets = logits_row[strip.rows], labels_row[strip.rows, None].long()
                counts = targets != IGNORE_INDEX
                dtile = tile.to(dloss.dtype).softmax(dim=-1)
                dtile.scatter_add_(-1, targets.clamp(min=0), -torch.ones_like(dtile[:, :1]))
                dlogits_row[strip.rows] = dtile.mul_(scale).masked_fill_(~counts, 0)
        return dlogits, None, None, None


def _sums(ranks: Ranks, logits: torch.Tensor, labels: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield for each tile the sum of the losses and their number."""
    dtype = accumulator_dtype(logits.dtype)
    for strip in ranks.tiles:
        part = logits.new_zeros(2, dtype=torch.float64)
        for logits_row, labels_row in zip(logits, labels, strict=True):
            targets = labels_row[strip.rows, None].long()
            counts = targets != IGNORE_INDEX
            logs = logits_row[strip.rows].to(dtype).log_softmax(dim=-1)
            losses = -logs.gather(-1, targets.clamp(min=0))
            part[0] += losses.masked_fill_(~counts, 0).sum(dtype=torch.float64)
            part[1] += counts.sum()
        yield part

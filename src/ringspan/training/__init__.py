"""Batches, labels, positions, the loss, shard and gather on ranks."""

from ringspan.training._batches import (
    IGNORE_INDEX,
    check_can_be_ignored,
    check_positions,
    cross_rank_mean_loss,
    next_token_labels,
    position_ids,
    shard_batch,
)
from ringspan.training._collectives import gather, shard

__all__ = [
    "IGNORE_INDEX",
    "check_can_be_ignored",
    "check_positions",
    "cross_rank_mean_loss",
    "gather",
    "next_token_labels",
    "position_ids",
    "shard",
    "shard_batch",
]

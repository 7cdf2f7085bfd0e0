"""How does `ring_flash_attn` of ring-attention-pytorch compute on our core?

Tensors are (batch, seq, heads, dim) with contiguous shards, or striped ones. Query head i reads KV head i mod kv_heads
there; ours reads i // group, so query heads are reordered on the way in and back on the way out.
"""

from typing import Any, NamedTuple

import torch

from ringspan.compat.sequence_first import attend_sequence_first, group_size
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped
from ringspan.mask import causal as causal_mask
from ringspan.mask import full
from ringspan.transports.base import ALONE

__all__ = ["default_attention", "ring_flash_attn", "ring_flash_attn_cuda"]


def ring_flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    bucket_size: int = 1024,
    ring_reduce_col: bool = False,
    striped_ring_attn: bool = False,
    max_lookback_seq_len: int | None = None,
    ring_size: int | None = None,
    softclamp_qk_sim: bool = False,
    softclamp_value: float = 50.0,
    *,
    group: Any = None,
) -> torch.Tensor:
    """Attention over the ranks, or with `ring_reduce_col=False` over this rank's own shard.

    Refused: key masks (the original ignores them under `causal`) and looking back by whole buckets.
    """
    members = group if ring_reduce_col else ALONE
    world_size = group_size(members)
    for name, value, remedy in (
        ("mask", mask, "describe padding by rs.per_row and call rs.attention"),
        ("max_lookback_seq_len", max_lookback_seq_len, "call rs.attention with rs.sliding_window(left, 0)"),
    ):
        if value is not None:
            raise UnsupportedError("this option is not computed here", argument=name, remedy=remedy)
    if ring_reduce_col and ring_size not in (None, world_size):
        raise UnsupportedError(
            f"the group has {world_size} ranks", argument="ring_size", value=ring_size, remedy="pass a smaller group"
        )
    is_striped = striped_ring_attn and ring_reduce_col
    rows = shard_rows(q.shape[1], world_size, bucket_size if is_striped else None)
    q, k, v = (x[:, rows.order] for x in (q, k, v))
    softcap = softclamp_value if softclamp_qk_sim else None
    out = attend_interleaved(q, k, v, causal, rows.layout, members, softcap)
    return out[:, rows.order.argsort()]


def attend_interleaved(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    layout: Layout,
    group: Any,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention in which query head i reads KV head i mod kv_heads."""
    heads = _grouped(q.shape[2], k.shape[2])
    seen = causal_mask() if causal else full()
    result = attend_sequence_first(q[:, :, heads], k, v, mask=seen, layout=layout, group=group, softcap=softcap)
    return result.out[:, :, heads.argsort()]


def ring_flash_attn_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    bucket_size: int = 1024,
    *options: Any,
    **named: Any,
) -> torch.Tensor:
    """Like `ring_flash_attn`, but stripes do not depend on `bucket_size`, as in the original's kernel."""
    del bucket_size
    return ring_flash_attn(q, k, v, mask, causal, max(1, q.shape[1]), *options, **named)


def default_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softclamp_qk_sim: bool = False,
    softclamp_value: float = 50.0,
) -> torch.Tensor:
    """Attention of this rank alone."""
    return ring_flash_attn(q, k, v, mask, causal, softclamp_qk_sim=softclamp_qk_sim, softclamp_value=softclamp_value)


class ShardRows(NamedTuple):
    """The layout of shards, and the rows of a shard in the order of their positions."""

    layout: Layout
    order: torch.Tensor


def shard_rows(shard_len: int, world_size: int, bucket_size: int | None) -> ShardRows:
    """Return contiguous shards, or striped ones.

    Stripes are dealt to the buckets of all ranks, and a shard has its buckets one after another: row i of bucket b of
    rank r is position i * (ranks * buckets) + r * buckets + b.
    """
    if bucket_size is None:
        return ShardRows(contiguous(shard_len * world_size, world_size), torch.arange(shard_len))
    bucket = min(bucket_size, shard_len)
    if shard_len % bucket:
        raise ShapeError(
            f"a striped shard of {shard_len} tokens has no whole number of buckets",
            argument="bucket_size",
            value=bucket_size,
            remedy="use a divisor of the shard's length",
        )
    num_buckets = shard_len // bucket
    layout = striped(shard_len * world_size, world_size, block=num_buckets)
    return ShardRows(layout, torch.arange(shard_len).view(num_buckets, bucket).T.reshape(-1))


def _grouped(num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """Reorder the query heads so that those of one KV head are neighbours."""
    if num_heads % num_kv_heads:
        raise ShapeError(
            f"{num_heads} query heads over {num_kv_heads} KV heads", argument="q.shape[2]", value=num_heads
        )
    return torch.arange(num_heads).view(-1, num_kv_heads).T.reshape(-1)

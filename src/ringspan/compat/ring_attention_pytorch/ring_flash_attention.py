"""How does `ring_flash_attn` of ring-attention-pytorch compute on our core?

Tensors are (batch, seq, heads, dim) with contiguous shards, or striped ones. Query head i reads KV head i mod kv_heads
there; ours reads i // group, so query heads are reordered on the way in and back on the way out. A key mask becomes a
layout of the keys that it keeps, one row of the batch at a time. A ring of fewer ranks than the group has becomes one
of several documents.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from ringspan.compat.sequence_first import SEQUENCE_FIRST, attend_sequence_first, check_tensors, group_size
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped
from ringspan.mask import Mask, documents, full
from ringspan.mask import causal as causal_mask
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of
from ringspan.span import Span
from ringspan.transports.base import ALONE

__all__ = [
    "default_attention",
    "ring_flash_attn",
    "ring_flash_attn_",
    "ring_flash_attn_cuda",
    "ring_flash_attn_cuda_",
]


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

    Args:
        q: The queries.
        k: The keys; of another length than `q` only for a rank's own attention, where causal rows end together.
        v: The values.
        mask: Which keys may be attended to, (batch, seq) of this rank; the original ignores it under `causal`.
        causal: Whether a token sees no later one.
        bucket_size: Which stripes a rank holds; see `shard_rows`.
        ring_reduce_col: Whether to attend over ranks.
        striped_ring_attn: Whether shards are stripes.
        max_lookback_seq_len: Refused: looking back by whole buckets is not computed here.
        ring_size: How many consecutive ranks share a sequence; a divisor of the group's size, which is the default.
        softclamp_qk_sim: Whether scores are clamped.
        softclamp_value: The bound of the scores.
        group: As in `rs.attention`.
    """
    check_tensors(SEQUENCE_FIRST, q=q, k=k, v=v)
    if v.shape[1] != k.shape[1]:
        raise ShapeError(f"k has {k.shape[1]} tokens", argument="v.shape", value=tuple(v.shape))
    members = group if ring_reduce_col else ALONE
    world_size = group_size(members)
    if max_lookback_seq_len is not None:
        raise UnsupportedError(
            "looking back by whole buckets is not computed here",
            argument="max_lookback_seq_len",
            remedy="call rs.attention with rs.sliding_window(left, 0)",
        )
    softcap = softclamp_value if softclamp_qk_sim else None
    if q.shape[1] != k.shape[1]:
        return _attend_across(q, k, v, mask, causal, members, softcap)
    size = world_size if ring_size is None or not ring_reduce_col else ring_size
    if size < 1 or world_size % size:
        raise UnsupportedError(f"it does not divide {world_size} ranks", argument="ring_size", value=ring_size)
    is_striped = striped_ring_attn and ring_reduce_col
    rows = shard_rows(q.shape[1], size, bucket_size if is_striped else None)
    q, k, v = (x[:, rows.order] for x in (q, k, v))
    keep = None if mask is None else mask[:, rows.order]
    rings = [_shifted(rows.layout, number * rows.layout.num_positions) for number in range(world_size // size)]
    layout = Layout(tuple(spans for ring in rings for spans in ring.spans_by_rank))
    seen = _mask(causal, [rows.layout.num_positions] * len(rings))
    out = attend_interleaved(q, k, v, seen, layout, members, softcap, keep)
    return out[:, rows.order.argsort()]


def _shifted(layout: Layout, start: int) -> Layout:
    return Layout(
        tuple(tuple(Span(x.start + start, x.stop + start, x.step) for x in spans) for spans in layout.spans_by_rank)
    )


def _mask(causal: bool, lengths: list[int]) -> Mask:
    mask = causal_mask() if causal else full()
    if len(lengths) == 1:
        return mask
    return documents(lengths) & mask if causal else documents(lengths)


ring_flash_attn_ = ring_flash_attn  # its `apply`, without a check of types there


def _attend_across(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    group: Any,
    softcap: float | None,
) -> torch.Tensor:
    """Attention to keys of another length, on one rank."""
    num_queries, num_keys = q.shape[1], k.shape[1]
    if group_size(group) > 1:
        raise UnsupportedError(
            f"{num_queries} queries and {num_keys} keys; the original would attend to the keys of this rank only",
            argument="ring_reduce_col",
            value=True,
            remedy="call rs.attention with kv_layout",
        )
    shift = num_keys - num_queries  # the last query and the last key have one position
    layout = Layout(((Span(max(0, shift), max(0, shift) + num_queries),),))
    kv_layout = Layout(((Span(max(0, -shift), max(0, -shift) + num_keys),),))
    return attend_interleaved(q, k, v, _mask(causal, [num_keys]), layout, group, softcap, mask, kv_layout)


def attend_interleaved(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    layout: Layout,
    group: Any,
    softcap: float | None = None,
    keep: torch.Tensor | None = None,
    kv_layout: Layout | None = None,
) -> torch.Tensor:
    """Attention in which query head i reads KV head i mod kv_heads; `keep` (batch, seq) says which keys count."""
    heads = _grouped(q.shape[2], k.shape[2])
    q = q[:, :, heads]
    kv_layout = layout if kv_layout is None else kv_layout

    def attend(rows: slice, keys: torch.Tensor | slice, kv_layout: Layout) -> torch.Tensor:
        parts = (q[rows], k[rows][:, keys], v[rows][:, keys])
        return attend_sequence_first(
            *parts, mask=mask, layout=layout, kv_layout=kv_layout, group=group, softcap=softcap
        ).out

    if keep is None:
        out = attend(slice(None), slice(None), kv_layout)
    else:
        kept = _of_all_ranks(keep, kv_layout, group)
        outs = []
        for row, keys in enumerate(keep):
            positions = [kv_layout.positions(rank)[mine[row]] for rank, mine in enumerate(kept)]
            outs.append(attend(slice(row, row + 1), keys, Layout(tuple(map(_spans, positions)))))
        out = torch.cat(outs)
    return out[:, :, heads.argsort()]


def _of_all_ranks(keep: torch.Tensor, layout: Layout, group: Any) -> list[np.ndarray[Any, Any]]:
    """The (batch, seq) masks of all ranks."""
    session = session_of(group)
    shard_len = layout.shard_len(session.transport.rank)
    with session.call() as call:
        if keep.dtype != torch.bool or keep.shape[1:] != (shard_len,):
            raise ShapeError(
                f"expected (batch, {shard_len}) in torch.bool",
                argument="mask",
                value=(tuple(keep.shape), keep.dtype),
            )
        fields = {"call": "mask of ring_flash_attn", "batch": len(keep), "layout": layout.fingerprint()}
        everyone = call.gather(Signature.of(fields), np.packbits(keep.cpu().numpy()).tobytes())
    sizes = [len(keep) * layout.shard_len(rank) for rank in range(layout.world_size)]
    return [
        np.unpackbits(np.frombuffer(x, np.uint8), count=size).astype(bool).reshape(len(keep), -1)
        for x, size in zip(everyone, sizes, strict=True)
    ]


def _spans(positions: np.ndarray[Any, Any]) -> tuple[Span, ...]:
    """Runs of ascending positions."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1) if len(positions) else []
    return tuple(Span(int(run[0]), int(run[-1]) + 1) for run in runs)


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


ring_flash_attn_cuda_ = ring_flash_attn_cuda


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

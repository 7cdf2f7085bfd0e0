"""The functions of ring-attention-pytorch (0.5.20) on our core.

Tensors are (batch, seq, heads, dim) with contiguous shards, or striped ones. Query head i reads KV head i mod kv_heads
there; ours reads i // group, so query heads are reordered on the way in and back on the way out.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ringspan.compat.sequence_first import attend_sequence_first, group_size
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped
from ringspan.mask import causal as causal_mask
from ringspan.mask import full
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.span import Span
from ringspan.transports.single import ALONE

__all__ = ["ring_flash_attn", "ring_flash_attn_cuda", "tree_attn_decode"]


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
    del bucket_size
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
    build = striped if striped_ring_attn and ring_reduce_col else contiguous
    layout = build(q.shape[1] * world_size, world_size)
    order = _grouped(q.shape[2], k.shape[2])
    seen = causal_mask() if causal else full()
    softcap = softclamp_value if softclamp_qk_sim else None
    result = attend_sequence_first(q[:, :, order], k, v, mask=seen, layout=layout, group=members, softcap=softcap)
    return result.out[:, :, order.argsort()]


ring_flash_attn_cuda = ring_flash_attn


def _grouped(num_heads: int, num_kv_heads: int) -> torch.Tensor:
    """The query heads in an order in which those of one KV head are neighbours."""
    if num_heads % num_kv_heads:
        raise ShapeError(
            f"{num_heads} query heads over {num_kv_heads} KV heads", argument="q.shape[2]", value=num_heads
        )
    return torch.arange(num_heads).view(-1, num_kv_heads).T.reshape(-1)


def tree_attn_decode(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    eps: float = 1e-8,
    shard_kv_seq: bool = True,
    use_triton: bool | None = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """One query (batch, heads, 1, dim), the same on all ranks, against keys over all ranks.

    Args:
        q: The query.
        k: All keys on every rank, or with `shard_kv_seq=False` this rank's; None where it has none.
        v: The values, like `k`.
        eps: Not needed here: an empty sum is exact.
        shard_kv_seq: Whether `k` and `v` are to be cut here.
        use_triton: Not needed here.
        group: As in `rs.attention`.
    """
    del eps, use_triton
    transport = session_of(group).transport
    rank, world_size = transport.rank, transport.world_size
    if (k is None) != (v is None):
        raise ShapeError("keys and values are both None or both present", argument="v")
    if k is None or v is None:
        if shard_kv_seq:
            raise ShapeError("keys and values that are to be cut must be given", argument="k", value=None)
        k = v = q.new_empty((*q.shape[:2], 0, q.shape[-1]))
    if shard_kv_seq:
        lengths = [part.shape[2] for part in k.chunk(world_size, 2)]
        lengths += [0] * (world_size - len(lengths))
        start = sum(lengths[:rank])
        k, v = (x[:, :, start : start + lengths[rank]] for x in (k, v))
    else:
        mine = k.shape[2].to_bytes(8, "little")
        lengths = [int.from_bytes(size, "little") for size in transport.all_gather_bytes(mine, None)]
    q_layout = Layout(((),) * world_size, replicated=(Span(0, q.shape[2]),))
    out = attention(q, k, v, mask=full(), layout=q_layout, kv_layout=_of_lengths(lengths), group=group)
    assert isinstance(out, torch.Tensor)
    return out


def _of_lengths(lengths: Sequence[int]) -> Layout:
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return Layout(tuple((Span(start, start + n),) for start, n in zip(starts, lengths, strict=True)))

"""How do the zigzag functions of ring-attention-pytorch compute on our core?

x, remove_padding = zig_zag_pad_seq(x)
(x, q_positions, kv_positions), gather_seq = zig_zag_shard(x)
out = zig_zag_attn(q, k, v, attn_mask=q_positions[:, None] >= kv_positions[None])
out = remove_padding(gather_seq(out))
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812

from ringspan.compat.ring_attention_pytorch.distributed import gather_batches
from ringspan.compat.ring_attention_pytorch.ring_flash_attention import attend_interleaved
from ringspan.errors import LayoutError, UnsupportedError
from ringspan.layout import Layout, zigzag
from ringspan.mask import causal, full
from ringspan.runtime.session import session_of
from ringspan.training import gather

__all__ = ["ShardOutput", "zig_zag_attn", "zig_zag_pad_seq", "zig_zag_shard"]

Inverse = Callable[[torch.Tensor], torch.Tensor]


def zig_zag_pad_seq(t: torch.Tensor, *, group: Any = None) -> tuple[torch.Tensor, Inverse]:
    """Pad (…, seq, dim) with zeros to a multiple of 2 * ranks; also returns what takes the padding away."""
    seq_len = t.shape[-2]
    chunks = 2 * session_of(group).transport.world_size
    return F.pad(t, (0, 0, 0, -seq_len % chunks)), lambda out: out[..., :seq_len, :]


class ShardOutput(NamedTuple):
    """A rank's shard, the positions of its tokens, and those of the keys of all ranks, rank by rank."""

    local_sequence: torch.Tensor
    query_positions: torch.Tensor
    key_value_positions: torch.Tensor


def zig_zag_shard(t: torch.Tensor, all_gather_batch: bool = False, *, group: Any = None) -> tuple[ShardOutput, Inverse]:
    """Cut (batch, seq, dim) into zigzag shards; also returns what puts shards together again."""
    transport = session_of(group).transport
    batches = None
    if all_gather_batch:
        t, batches = gather_batches(t, group)
    layout = _zigzag(t.shape[-2], transport.world_size)
    keys = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(transport.world_size)])
    mine = torch.from_numpy(layout.positions(transport.rank))

    def inverse(part: torch.Tensor) -> torch.Tensor:
        whole = gather(part.contiguous(), layout, group, dim=1)
        return whole if batches is None else batches.own(whole)

    shard = layout.shard(t, transport.rank, -2)
    return ShardOutput(shard, mine.to(t.device), keys.to(t.device)), inverse


def zig_zag_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout: float = 0.0,
    attn_mask: torch.Tensor | None = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """Zigzag shards (batch, heads, seq, dim); without a mask all tokens see each other.

    The mask that is computed is the causal one, made from the positions that `zig_zag_shard` returns.
    """
    if dropout:
        raise UnsupportedError("ranks would drop other weights than one process", argument="dropout", value=dropout)
    transport = session_of(group).transport
    layout = _zigzag(q.shape[-2] * transport.world_size, transport.world_size)
    if attn_mask is not None:
        mine = torch.from_numpy(layout.positions(transport.rank))
        keys = torch.cat([torch.from_numpy(layout.positions(rank)) for rank in range(transport.world_size)])
        is_earlier = (mine[:, None] >= keys[None]).to(attn_mask.device)
        if attn_mask.dtype != torch.bool or not torch.equal(attn_mask.expand_as(is_earlier), is_earlier):
            raise UnsupportedError(
                "only the causal mask of zigzag shards is computed",
                argument="attn_mask",
                remedy="call rs.attention with a mask such as rs.sliding_window, and layout=rs.zigzag(seq_len, ranks)",
            )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = full() if attn_mask is None else causal()
    return attend_interleaved(q, k, v, seen, layout, group).transpose(1, 2)


def _zigzag(seq_len: int, world_size: int) -> Layout:
    if seq_len % (2 * world_size):
        raise LayoutError(
            f"a sequence of {seq_len} tokens is not cut into {2 * world_size} equal chunks",
            argument="t",
            remedy="pad it with zig_zag_pad_seq",
        )
    return zigzag(seq_len, world_size)

"""How do `RingAttention` and `RingTransformer` of ring-attention-pytorch compute on our core?

Parameters have the names and shapes of the original, so its checkpoints load. With `auto_shard_seq` a rank gives whole
sequences, its own batch, and gets their outputs; without it, a rank gives a shard. As there, `RingTransformer` shards
by itself if it has ring attention, and `RingAttention` only if it is told to. There `ring_seq_size` and
`bucket_size` say how work is cut up; here `bucket_size` only tells which stripes a rank holds that gives shards.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from ringspan.compat.ring_attention_pytorch.distributed import gather_batches
from ringspan.compat.ring_attention_pytorch.ring_flash_attention import (
    attend_interleaved,
    default_attention,
    ring_flash_attn,
    shard_rows,
)
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped
from ringspan.mask import causal as causal_mask
from ringspan.mask import full
from ringspan.runtime.session import session_of
from ringspan.training import IGNORE_INDEX, cross_rank_mean_loss, gather

__all__ = ["RingAttention", "RingRotaryEmbedding", "RingTransformer", "apply_rotary_pos_emb", "default_attention"]


class RMSNorm(nn.Module):
    """A norm with the original's parameter."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal: torch.Tensor = F.normalize(x, dim=-1) * self.scale * self.gamma
        return normal


class RingRotaryEmbedding(nn.Module):
    """Angles (seq, dim) of this rank's positions."""

    inv_freq: torch.Tensor

    def __init__(
        self, dim: int, ring: bool = False, striped: bool = False, buckets: int = 1, theta: float = 10000
    ) -> None:
        super().__init__()
        self.ring, self.striped, self.buckets = ring, striped, buckets
        self.register_buffer("inv_freq", theta ** -(torch.arange(0, dim, 2).float() / dim))

    def forward(self, seq: int | torch.Tensor) -> torch.Tensor:
        """The angles of a shard of `seq` tokens, or of given positions."""
        if isinstance(seq, int):
            transport = session_of(None).transport
            rank, world_size = (transport.rank, transport.world_size) if self.ring else (0, 1)
            bucket = max(1, seq // self.buckets) if self.striped else None
            rows = shard_rows(seq, world_size, bucket)
            positions = torch.from_numpy(rows.layout.positions(rank))[rows.order.argsort()]
        else:
            positions = seq
        angles = positions.to(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat((angles, angles), -1)


def apply_rotary_pos_emb(pos: torch.Tensor, t: torch.Tensor, head_dim_first: bool = False) -> torch.Tensor:
    """Turn t, (batch, seq, heads, dim), by the angles; (batch, heads, seq, dim) with `head_dim_first`."""
    angles = pos if head_dim_first else pos[:, None]
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class _Sharding:
    """Turns whole sequences of all ranks into shards, and outputs back."""

    def __init__(self, x: torch.Tensor, is_striped: bool, group: Any) -> None:
        self._group = group
        self._whole, self._batches = gather_batches(x, group)
        transport = session_of(group).transport
        self._rank = transport.rank
        build: Callable[..., Layout] = striped if is_striped else contiguous
        self.layout = build(x.shape[1], transport.world_size)

    @property
    def part(self) -> torch.Tensor:
        return self.layout.shard(self._whole, self._rank, 1)

    def part_of(self, other: torch.Tensor | None) -> torch.Tensor | None:
        """The same part of what every rank has for its own batch."""
        if other is None:
            return None
        whole, _ = gather_batches(other, self._group)
        return self.layout.shard(whole, self._rank, 1)

    @property
    def positions(self) -> torch.Tensor:
        return torch.from_numpy(self.layout.positions(self._rank))

    def undo(self, out: torch.Tensor) -> torch.Tensor:
        return self._batches.own(gather(out.contiguous(), self.layout, self._group, dim=1))


class RingAttention(nn.Module):
    """Projections around ring attention, (batch, seq, dim) in and out."""

    def __init__(
        self,
        dim: int,
        *,
        dim_head: int = 64,
        heads: int = 8,
        num_grouped_query_heads: int = 1,
        causal: bool = False,
        eps: float = 1e-10,
        bucket_size: int = 512,
        ring_attn: bool = False,
        ring_seq_size: int = 512,
        max_lookback_seq_len: int | None = None,
        striped_ring_attn: bool = False,
        auto_shard_seq: bool | None = False,
        prenorm: bool = True,
        force_regular_attn: bool = False,
        rotary_embed: bool = False,
        rotary_embed_theta: int = 10000,
        use_cuda_kernel: bool | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        del eps, force_regular_attn  # an empty sum is exact here, and every way computes the same
        if heads % num_grouped_query_heads:
            raise ShapeError(f"{heads} heads in groups of {num_grouped_query_heads}", argument="heads", value=heads)
        if auto_shard_seq and not ring_attn:
            raise UnsupportedError("only ring attention shards sequences", argument="auto_shard_seq", value=True)
        if max_lookback_seq_len is not None:
            raise UnsupportedError(
                "looking back by whole buckets is not computed here",
                argument="max_lookback_seq_len",
                remedy="call rs.attention with rs.sliding_window(left, 0)",
            )
        self.causal, self.ring_attn, self.striped_ring_attn = causal, ring_attn, striped_ring_attn
        self.auto_shard_seq = ring_attn if auto_shard_seq is None else auto_shard_seq
        self.heads, self.dim_head, self.bucket_size, self.group = heads, dim_head, bucket_size, group
        self.use_cuda_kernel = torch.cuda.is_available() if use_cuda_kernel is None else use_cuda_kernel
        kv_heads = heads // num_grouped_query_heads
        self.qkv_head_breakdown = (heads, kv_heads, kv_heads)
        buckets = max(1, ring_seq_size // bucket_size)
        self.rotary_embed = (
            RingRotaryEmbedding(dim_head, ring_attn, striped_ring_attn, buckets, rotary_embed_theta)
            if rotary_embed
            else None
        )
        width = (heads + 2 * kv_heads) * dim_head
        self.to_qkv = nn.Sequential(RMSNorm(dim) if prenorm else nn.Identity(), nn.Linear(dim, width, bias=False))
        self.to_out = nn.Linear(heads * dim_head, dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
    ) -> torch.Tensor:
        """Take this rank's batch of whole sequences with `auto_shard_seq`, otherwise its shard, (batch, seq, dim)."""
        is_ring = self.ring_attn and not force_ring_reduce_off and session_of(self.group).transport.world_size > 1
        sharding = _Sharding(x, self.striped_ring_attn, self.group) if is_ring and self.auto_shard_seq else None
        if sharding is None:
            return self._attend(x, mask, rotary_emb, is_ring, ring_size, self.bucket_size)
        if rotary_emb is None and self.rotary_embed is not None:
            rotary_emb = self.rotary_embed(sharding.positions)
        part = self.attend_shard(sharding.part, sharding.part_of(mask), rotary_emb, sharding.layout)
        return sharding.undo(part)

    def _qkv(self, x: torch.Tensor, rotary_emb: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.dim_head))
        q, k, v = qkv.split(self.qkv_head_breakdown, -2)
        if rotary_emb is not None:
            q, k = (apply_rotary_pos_emb(rotary_emb, heads) for heads in (q, k))
        return q, k, v

    def _attend(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None,
        rotary_emb: torch.Tensor | None,
        is_ring: bool,
        ring_size: int | None,
        bucket_size: int,
    ) -> torch.Tensor:
        if rotary_emb is None and self.rotary_embed is not None:
            rotary_emb = self.rotary_embed(x.shape[1])
        if x.is_cuda and self.use_cuda_kernel:
            bucket_size = x.shape[1]
        out = ring_flash_attn(
            *self._qkv(x, rotary_emb),
            mask,
            causal=self.causal,
            bucket_size=bucket_size,
            ring_reduce_col=is_ring,
            striped_ring_attn=self.striped_ring_attn and is_ring,
            ring_size=ring_size if is_ring else None,
            group=self.group,
        )
        projected: torch.Tensor = self.to_out(out.flatten(2))
        return projected

    def attend_shard(
        self, x: torch.Tensor, mask: torch.Tensor | None, rotary_emb: torch.Tensor | None, layout: Layout
    ) -> torch.Tensor:
        """Attend with a shard that was cut by `layout`."""
        seen = causal_mask() if self.causal else full()
        out = attend_interleaved(*self._qkv(x, rotary_emb), seen, layout, self.group, keep=mask)
        projected: torch.Tensor = self.to_out(out.flatten(2))
        return projected


class RingTransformer(nn.Module):
    """A small language model, (batch, seq) in and logits (batch, seq, num_tokens) out."""

    def __init__(
        self,
        *,
        num_tokens: int,
        dim: int,
        depth: int,
        causal: bool = False,
        dim_head: int = 64,
        heads: int = 8,
        ff_mult: int = 4,
        num_grouped_query_heads: int = 1,
        bucket_size: int = 512,
        ring_attn: bool = False,
        striped_ring_attn: bool = False,
        ring_seq_size: int = 512,
        auto_shard_seq: bool | None = None,
        max_lookback_seq_len: tuple[int, ...] | int | None = None,
        rotary_embed_theta: int = 10000,
        ignore_index: int = -1,
        force_regular_attn: bool = False,
        use_cuda_kernel: bool | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.ring_attn, self.striped_ring_attn, self.group = ring_attn, striped_ring_attn, group
        self.auto_shard_seq = ring_attn if auto_shard_seq is None else auto_shard_seq
        self.ignore_index = ignore_index
        buckets = max(1, ring_seq_size // bucket_size)
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.rotary_emb = RingRotaryEmbedding(dim_head, ring_attn, striped_ring_attn, buckets, rotary_embed_theta)
        looks_back = (
            max_lookback_seq_len if isinstance(max_lookback_seq_len, tuple) else (max_lookback_seq_len,) * depth
        )
        if len(looks_back) != depth:
            raise ShapeError("one for each layer", argument="max_lookback_seq_len", value=max_lookback_seq_len)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    RingAttention(
                        dim,
                        dim_head=dim_head,
                        heads=heads,
                        num_grouped_query_heads=num_grouped_query_heads,
                        causal=causal,
                        bucket_size=bucket_size,
                        ring_attn=ring_attn,
                        ring_seq_size=ring_seq_size,
                        max_lookback_seq_len=look_back,
                        striped_ring_attn=striped_ring_attn,
                        force_regular_attn=force_regular_attn,
                        use_cuda_kernel=use_cuda_kernel,
                        group=group,
                    ),
                    nn.Sequential(
                        RMSNorm(dim), nn.Linear(dim, dim * ff_mult), nn.GELU(), nn.Linear(dim * ff_mult, dim)
                    ),
                ]
            )
            for look_back in looks_back
        )
        self.to_logits = nn.Sequential(RMSNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        return_loss: bool = False,
        force_ring_reduce_off: bool = False,
        ring_size: int | None = None,
    ) -> torch.Tensor:
        """Logits of this rank's tokens, or the mean loss of all ranks' labels.

        The loss is for DDP, which averages gradients: each rank's gradient is its share times the number of ranks.
        """
        counts = mask
        if labels is None and return_loss:
            x, labels = x[:, :-1], x[:, 1:]
            mask, counts = (None, None) if mask is None else (mask[:, :-1], mask[:, 1:])
        if labels is not None and counts is not None:
            labels = labels.masked_fill(~counts, self.ignore_index)
        world_size = session_of(self.group).transport.world_size
        is_ring = self.ring_attn and not force_ring_reduce_off and world_size > 1
        sharding = _Sharding(x, self.striped_ring_attn, self.group) if is_ring and self.auto_shard_seq else None
        if sharding is None:
            logits = self._run(x, self.rotary_emb(x.shape[1]), mask, force_ring_reduce_off, ring_size, None)
        else:
            part = sharding.part_of(mask)
            logits = self._run(sharding.part, self.rotary_emb(sharding.positions), part, False, ring_size, sharding)
        if labels is None:
            return logits if sharding is None else sharding.undo(logits)
        if sharding is not None:
            labels = sharding.part_of(labels)
            assert labels is not None
        labels = labels.masked_fill(labels == self.ignore_index, IGNORE_INDEX)
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if not is_ring:
            return losses.sum() / (labels != IGNORE_INDEX).sum()
        loss = cross_rank_mean_loss(losses, labels, self.group)
        return loss.detach() + world_size * (loss - loss.detach())

    def _run(
        self,
        tokens: torch.Tensor,
        angles: torch.Tensor,
        mask: torch.Tensor | None,
        force_ring_reduce_off: bool,
        ring_size: int | None,
        sharding: _Sharding | None,
    ) -> torch.Tensor:
        x = self.token_emb(tokens)
        for layer in self.layers:
            attend, feed_forward = cast("nn.ModuleList", layer)
            assert isinstance(attend, RingAttention)
            if sharding is None:
                x = x + attend(x, mask, angles, force_ring_reduce_off, ring_size)
            else:
                x = x + attend.attend_shard(x, mask, angles, sharding.layout)
            x = x + feed_forward(x)
        logits: torch.Tensor = self.to_logits(x)
        return logits

"""Another correct attention, and mistakes in it: keys and values are gathered whole, in plain torch.

It shares nothing with the rings of `rs.verify.faults`. Its mistakes were written from experience with real programs,
each with the names that a reader would accept, without regard to what the diagnosis knows.
"""

from typing import Any

import numpy as np
import torch

import ringspan as rs
from ringspan.verify.cases import FEATURES
from ringspan.verify.targets import Target, TargetCall

MISTAKES: dict[str, tuple[str, ...]] = {
    "causal by local rows": ("mask in local positions",),
    "own key hidden": ("diagonal off by one",),
    "window in absolute distance": ("causal part ignored",),
    "window one short": ("window off by one",),
    "scale by head_dim": ("wrong scale", "scale applied twice"),
    "foreign keys without gradients": ("gradient not summed over ranks",),
    "gradients reduced once more": ("gradient summed more than once",),
    "values of the neighbour": ("keys and values of different blocks",),
    "gathered in float16": ("precision lost",),
    "heads repeated in blocks": ("GQA repeat order",),
    "sink added to scores": ("sink ignored",),
    "sinks on rank 0 only": ("sink ignored",),
    "one head not written": ("output left at zero",),
    "documents cut one late": ("document boundaries off by one",),
    "prefix one longer": ("prefix off by one",),
    "output divided by ranks": ("output scaled",),
    "remainder of the length dropped": ("uneven shards cut", "last key of a block missing"),
    "padding of short shards attended": ("padding attended",),
    "queries turned from 0": ("RoPE offset",),
    "mask of row 0": ("mask of another batch row",),
    "dq without scale": ("scale missing in the backward pass",),
    "heads rolled on rank 1": ("heads in another order",),
    "mask of rank 0 on all": ("mask in local positions", "mask of another rank"),
    "softcap after the mask only": ("softcap ignored",),
}


class GatheringTarget(Target):
    """Correct, unless a mistake is named."""

    features = tuple(name for name in FEATURES if name != "float16")

    def __init__(self, mistake: str | None = None) -> None:
        assert mistake is None or mistake in MISTAKES
        self.mistake = mistake
        self.name = mistake or "gathering"

    def attend(self, call: TargetCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = call.q, call.k, call.v
        if call.case.has_rope:
            start = torch.zeros_like(call.positions) if self.mistake == "queries turned from 0" else call.positions
            q = turn(q, start + (torch.arange(len(start)) if self.mistake == "queries turned from 0" else 0))
            k = turn(k, call.kv_positions)
        k, v, allowed = self.gather(call, k, v)
        return self.softmax(call, q, k, v, allowed)

    def gather(self, call: TargetCall, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        dtype = k.dtype
        if self.mistake == "gathered in float16":
            k, v = k.half(), v.half()
        whole = [rs.gather(x, call.kv_layout, call.group, dim=2).to(dtype) for x in (k, v)]
        own = call.kv_layout.positions(call.rank)
        if self.mistake == "foreign keys without gradients":
            whole = [
                x.detach().index_copy(2, torch.from_numpy(own), part) for x, part in zip(whole, (k, v), strict=True)
            ]
        if self.mistake == "gradients reduced once more":
            whole = [scaled_gradient(x, call.world_size) for x in whole]
        if self.mistake == "values of the neighbour":
            order = np.arange(call.kv_layout.num_positions)
            for rank in range(call.world_size):
                rows = call.kv_layout.positions(rank)
                order[rows] = np.resize(call.kv_layout.positions((rank + 1) % call.world_size), len(rows))
            whole[1] = whole[1][:, :, torch.from_numpy(order)]
        return whole[0], whole[1], self.allowed(call)

    def allowed(self, call: TargetCall) -> torch.Tensor:
        q, kv = call.positions[:, None], torch.arange(call.kv_layout.num_positions)[None]
        if self.mistake == "mask of rank 0 on all":
            other = call.layout.positions(0)
            q = torch.from_numpy(np.resize(other, len(q)))[:, None]
        mask = torch.from_numpy(call.mask.allowed(q[:, 0].numpy(), kv[0].numpy()))
        kinds = call.case.features
        pattern = call.case.pattern
        if self.mistake == "causal by local rows" and pattern == ("causal",):
            mask = torch.ones(len(q), kv.shape[1], dtype=torch.bool).tril()
        if self.mistake == "own key hidden" and "causal" in kinds:
            mask = mask & (q != kv)
        if pattern[0] == "window" and self.mistake == "window in absolute distance":
            mask = (q - kv).abs() <= abs(pattern[1])
        if pattern[0] == "window" and self.mistake == "window one short":
            mask = mask & (q - kv < pattern[1])
        if self.mistake == "documents cut one late" and call.document_lengths and pattern[0] == "documents":
            ends = torch.tensor(call.document_lengths).cumsum(0)
            mask = torch.bucketize(q, ends) == torch.bucketize(kv, ends)
        if self.mistake == "prefix one longer" and pattern[0] == "prefix":
            mask = mask | (kv <= pattern[1])
        if self.mistake == "mask of row 0" and mask.ndim == 3:
            mask = mask[0]
        if self.mistake == "remainder of the length dropped":
            per_rank = call.kv_layout.num_positions // call.world_size
            for rank in range(call.world_size):
                mask[..., call.kv_layout.positions(rank)[per_rank:]] = False
        return mask[:, None] if mask.ndim == 3 else mask

    def softmax(
        self, call: TargetCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = q.dtype
        q, k, v = (x if dtype == torch.float64 else x.float() for x in (q, k, v))
        group = q.shape[1] // k.shape[1]
        if self.mistake == "heads repeated in blocks":
            k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        else:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
        if self.mistake == "scale by head_dim":
            scale = 1 / q.shape[-1]
        if self.mistake == "dq without scale":
            q = scaled_gradient(q, 1 / scale)
        scores = q @ k.mT * scale
        if self.mistake == "padding of short shards attended":
            lengths = [call.kv_layout.shard_len(rank) for rank in range(call.world_size)]
            padding = sum(max(lengths) - length for length in lengths)
            scores = torch.nn.functional.pad(scores, (0, padding))
            v = torch.nn.functional.pad(v, (0, 0, 0, padding))
            allowed = torch.nn.functional.pad(allowed, (0, padding), value=True)
        if call.softcap is not None and self.mistake != "softcap after the mask only":
            scores = call.softcap * torch.tanh(scores / call.softcap)
        scores = scores.masked_fill(~allowed, -torch.inf)
        sinks = None if call.sinks is None else call.sinks.to(scores.dtype)
        if sinks is not None and self.mistake == "sinks on rank 0 only" and call.rank:
            sinks = sinks * 0 - 1e9
        if sinks is not None and self.mistake == "sink added to scores":
            scores, sinks = scores + sinks[:, None, None], sinks * 0 - 1e9
        logits = (
            scores if sinks is None else torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        )
        lse = logits.logsumexp(-1)
        weights = (logits - lse.masked_fill(lse.isneginf(), 0)[..., None]).exp()[..., : scores.shape[-1]]
        out = weights @ v
        if self.mistake == "one head not written":
            out = torch.cat([out[:, :1], out[:, 1:2] * 0, out[:, 2:]], 1)
        if self.mistake == "output divided by ranks":
            out = out / call.world_size
        if self.mistake == "heads rolled on rank 1" and call.rank == 1:
            out, lse = out.roll(1, 1), lse.roll(1, 1)
        return out.to(dtype), lse


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def scaled_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    return _Scaled.apply(x, factor)


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

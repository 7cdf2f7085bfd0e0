"""Targets that need a process group, as other libraries' attention does."""

from typing import Any

import torch
import torch.distributed as dist

from ringspan.verify.targets import Target, TargetCall


class GatheredByGloo(Target):
    """Gathers keys and values of equal shards by torch.distributed alone; full and causal."""

    name = "GatheredByGloo"
    features = ("full", "causal", "float32", "float64", "bfloat16", "backward", "gqa", "scale", "few_heads")
    layouts = ("contiguous", "zigzag")
    ranks = "processes"

    def attend(self, call: TargetCall) -> torch.Tensor:
        if call.case.features - set(self.features):
            raise NotImplementedError(f"cannot do {sorted(call.case.features - set(self.features))}")
        k, v = (torch.cat(gather_equal(x), 2) for x in (call.k, call.v))
        positions = torch.cat([torch.from_numpy(call.kv_layout.positions(r)) for r in range(call.world_size)])
        allowed = torch.ones(len(call.positions), len(positions), dtype=torch.bool)
        if call.is_causal:
            allowed = positions[None] <= call.positions[:, None]
        return torch.nn.functional.scaled_dot_product_attention(
            call.q, k, v, attn_mask=allowed, scale=call.scale, enable_gqa=True
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = torch.stack(grads)
        dist.all_reduce(total)
        return total[dist.get_rank()]


def gather_equal(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _Gather.apply(x)


class Misbehaves(GatheredByGloo):
    """Refuses on all ranks, then fails on one of them, by the length of the case."""

    features = (*GatheredByGloo.features, "odd_length")

    def attend(self, call: TargetCall) -> torch.Tensor:
        if call.case.length == 10:
            raise NotImplementedError("not ten")
        if call.case.length == 12 and call.rank == 1:
            raise ValueError("rank 1 alone")
        return super().attend(call)

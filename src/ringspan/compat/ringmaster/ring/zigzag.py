"""Zigzag shards, as axolotl-ringmaster has them."""

import torch

from ringspan.compat.ringmaster.ring.loop import zigzag_ring_attention
from ringspan.layout import zigzag

__all__ = ["zigzag_ring_attention"]


def _zigzag_gidx(rank: int, half: int, world: int, device: torch.device) -> torch.Tensor:
    """The positions of a rank whose two chunks have `half` tokens each; tests of the original call it."""
    return torch.from_numpy(zigzag(2 * half * world, world).positions(rank)).to(device)

"""The exchange of heads for tokens."""

from typing import Any

import torch

from ringspan.layout import contiguous
from ringspan.runtime.session import session_of
from ringspan.training import gather

__all__ = ["seq_all_to_all"]


def seq_all_to_all(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: Any) -> torch.Tensor:
    """Gather one dim over the ranks and keep this rank's part of another; differentiable."""
    transport = session_of(group).transport
    rank, world_size = transport.rank, transport.world_size
    whole = gather(x.contiguous(), contiguous(x.shape[gather_dim] * world_size, world_size), group, dim=gather_dim)
    return contiguous(x.shape[scatter_dim], world_size).shard(whole, rank, scatter_dim)

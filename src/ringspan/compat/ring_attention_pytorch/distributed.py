"""How do the batches of all ranks become one batch whose sequences are cut over the ranks, and back?

Ranks of ring-attention-pytorch come with batches of their own, of any size. Together they attend to all of them: every
rank computes a shard of each sequence, and then gets the outputs of its own batch.
"""

from typing import Any, NamedTuple

import torch
from torch import nn

from ringspan.compat.lengths import gather_lengths, layout_of_lengths
from ringspan.errors import ShapeError
from ringspan.runtime.session import session_of
from ringspan.training import gather

__all__ = ["AllGather", "all_gather_variable_dim", "get_rank", "get_world_size", "is_distributed"]


def get_rank() -> int:
    """This rank's number in the default group."""
    return session_of(None).transport.rank


def get_world_size() -> int:
    """The number of ranks in the default group."""
    return session_of(None).transport.world_size


def is_distributed() -> bool:
    """Whether the default group has more than one rank."""
    return get_world_size() > 1


def all_gather_variable_dim(
    t: torch.Tensor, dim: int = 0, sizes: torch.Tensor | None = None, *, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather tensors whose sizes may differ along a dim; return them and their sizes."""
    del sizes  # asked for in any case
    lengths = gather_lengths(t, dim, group, "all_gather_variable_dim")
    return gather(t.contiguous(), layout_of_lengths(lengths), group, dim=dim), torch.tensor(lengths, device=t.device)


class AllGather(nn.Module):
    """`all_gather_variable_dim` as a module; its gradient is summed over the ranks."""

    def __init__(self, *, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, sizes: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors of all ranks, and their sizes along `dim`."""
        return all_gather_variable_dim(x, self.dim, sizes)


class Batches(NamedTuple):
    """The batches of all ranks, and this rank's rows."""

    sizes: list[int]
    rank: int

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of this rank."""
        start = sum(self.sizes[: self.rank])
        return whole[start : start + self.sizes[self.rank]]


def gather_batches(x: torch.Tensor, group: Any) -> tuple[torch.Tensor, Batches]:
    """All batches, (rows of all ranks, seq, …). The ranks' sequences must have one length."""
    lengths = gather_lengths(x, 1, group, "gather batches")
    if len(set(lengths)) > 1:
        raise ShapeError(f"the ranks have sequences of {lengths} tokens, and need one length", argument="x")
    whole, sizes = all_gather_variable_dim(x, 0, group=group)
    return whole, Batches(sizes.tolist(), session_of(group).transport.rank)

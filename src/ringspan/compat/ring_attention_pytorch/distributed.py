"""How do the batches of all ranks become one batch whose sequences are cut over the ranks, and back?

Ranks of ring-attention-pytorch come with batches of their own, of any size. Together they attend to all of them: every
rank computes a shard of each sequence, and then gets the outputs of its own batch.
"""

from typing import Any, NamedTuple

import torch

from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.runtime.session import session_of
from ringspan.span import Span
from ringspan.training import gather

__all__ = ["all_gather_variable_dim"]


def layout_of_lengths(lengths: list[int]) -> Layout:
    """A layout of consecutive shards with these lengths."""
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    return Layout(tuple((Span(start, start + n),) for start, n in zip(starts, lengths, strict=True)))


def all_gather_variable_dim(
    t: torch.Tensor, dim: int = 0, sizes: torch.Tensor | None = None, *, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather tensors whose sizes may differ along a dim; return them and their sizes."""
    del sizes  # asked for in any case
    transport = session_of(group).transport
    mine = t.shape[dim].to_bytes(8, "little")
    lengths = [int.from_bytes(size, "little") for size in transport.all_gather_bytes(mine, None)]
    return gather(t.contiguous(), layout_of_lengths(lengths), group, dim=dim), torch.tensor(lengths, device=t.device)


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
    transport = session_of(group).transport
    mine = x.shape[1].to_bytes(8, "little")
    lengths = {int.from_bytes(size, "little") for size in transport.all_gather_bytes(mine, None)}
    if len(lengths) > 1:
        raise ShapeError(f"the ranks have sequences of {sorted(lengths)} tokens, and need one length", argument="x")
    whole, sizes = all_gather_variable_dim(x, 0, group=group)
    return whole, Batches(sizes.tolist(), transport.rank)

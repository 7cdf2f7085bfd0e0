"""Which positions each rank holds."""

from collections.abc import Callable

from ringspan.errors import ShapeError
from ringspan.layout import Layout, contiguous, zigzag

__all__ = ["contiguous_indices", "head_tail_indices"]


def contiguous_indices(seq_len: int, world: int) -> list[list[int]]:
    """Equal consecutive shards."""
    return _indices(contiguous, seq_len, world, world)


def head_tail_indices(seq_len: int, world: int) -> list[list[int]]:
    """Zigzag shards: an early chunk and a late one for each rank."""
    return _indices(zigzag, seq_len, world, 2 * world)


def _indices(build: Callable[..., Layout], seq_len: int, world: int, chunks: int) -> list[list[int]]:
    if seq_len % chunks:
        raise ShapeError(f"it is not cut into {chunks} equal chunks", argument="seq_len", value=seq_len)
    layout = build(seq_len, world)
    return [layout.positions(rank).tolist() for rank in range(world)]

"""Where are keys and values in memory?

A sequence's tokens on this rank are stored in blocks, each for all layers. When a block is full another is added, whose
size grows with the sequence: no token is moved or copied, no token costs an allocation, and a long sequence is a few
long runs that a kernel can read. Rows behind the committed ones belong to the current turn; a turn that fails leaves
only spare room behind.
"""

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ringspan.errors import CacheError

MIN_BLOCK = 256  # tokens of room to spare in a new block
GROWTH = 4  # a new block has room for at least 1/GROWTH of what is there already

Rows = tuple[torch.Tensor, ...]
"""Keys and values of some tokens, each (1, KV heads, tokens, dim): (k, v)."""


class RowSpec(NamedTuple):
    """Layers, heads and device of a cache, and the last dim and dtype of each of its tensors."""

    num_layers: int
    num_kv_heads: int
    dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, over all layers."""
        row = sum(dim * dtype.itemsize for dim, dtype in zip(self.dims, self.dtypes, strict=True))
        return self.num_layers * self.num_kv_heads * row


class _Block:
    """Room for tokens of all layers: tensors (layers, KV heads, room, dim), and their views by layer."""

    def __init__(self, tensors: Rows) -> None:
        self.tensors = tensors
        # Making a view costs time in every decode step, when CPU caches are cold.
        self.layers: list[Rows] = list(zip(*(torch.split(x, 1) for x in tensors), strict=True))
        self.room = tensors[0].shape[2]


class Stored:
    """One sequence's tokens on this rank."""

    def __init__(self, spec: RowSpec) -> None:
        self.spec = spec
        self.starts: list[int] = []  # index of the first token of each block
        self.capacity = 0
        self._blocks: list[_Block] = []

    @property
    def nbytes(self) -> int:
        """Allocated memory, spare room included."""
        return self.capacity * self.spec.bytes_per_token

    def reserve(self, count: int) -> None:
        """Make room for `count` tokens in total."""
        if count <= self.capacity:
            return
        # With spare room, a long prompt and a short answer fit into one block.
        room = max(count - self.capacity + MIN_BLOCK, self.capacity // GROWTH)
        layers, heads, dims, dtypes, device = self.spec
        try:
            with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
                tensors = [
                    torch.empty(layers, heads, room, dim, dtype=dtype, device=device)
                    for dim, dtype in zip(dims, dtypes, strict=True)
                ]
        except (RuntimeError, OverflowError, TypeError) as error:  # TypeError: more tokens than a shape can count
            raise CacheError(
                f"no memory for {count} tokens of a sequence on one rank ({count * self.spec.bytes_per_token} bytes)",
                remedy="drop sequences that are no longer needed, or use more ranks",
            ) from error
        self._blocks.append(_Block(tuple(tensors)))
        self.starts.append(self.capacity)
        self.capacity += room

    def trim(self, count: int) -> None:
        """Free the blocks behind the first `count` tokens."""
        kept = bisect_right(self.starts, count - 1) if count else 0
        del self._blocks[kept:]
        self.capacity = self.starts[kept] if kept < len(self.starts) else self.capacity
        del self.starts[kept:]

    def copy(self) -> "Stored":
        twin = Stored(self.spec)
        with torch.inference_mode(False):
            twin._blocks = [_Block(tuple(x.clone() for x in block.tensors)) for block in self._blocks]
        twin.starts, twin.capacity = [*self.starts], self.capacity
        return twin

    def rows(self, layer: int, start: int, stop: int) -> Iterator[Rows]:
        """Tokens start … stop-1 of a layer, as views, one per block."""
        first = max(0, bisect_right(self.starts, start) - 1)
        for at, block in zip(self.starts[first:], self._blocks[first:], strict=True):
            lo, hi = max(start, at) - at, min(stop - at, block.room)
            if lo >= hi:
                return
            yield tuple([x.narrow(2, lo, hi - lo) for x in block.layers[layer]])

    def all_layers(self, count: int) -> Iterator[tuple[int, Rows]]:
        """The first `count` tokens, as (start, views (layers, KV heads, tokens, dim)) of each block."""
        for at, block in zip(self.starts, self._blocks, strict=True):
            if at < count:
                yield at, tuple(x[:, :, : count - at] for x in block.tensors)

    def write(self, layer: int, start: int, rows: Rows) -> None:
        """Write tokens from `start` on; there must be room."""
        done, count = 0, rows[0].shape[2]
        for views in self.rows(layer, start, start + count):
            length = views[0].shape[2]
            for view, x in zip(views, rows, strict=True):
                view.copy_(x if length == count else x[:, :, done : done + length])
            done += length
        assert done == count

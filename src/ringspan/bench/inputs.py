"""Which random tensors are measured? They do not depend on the layout, and no rank ever holds the whole sequence."""

from typing import NamedTuple

import numpy as np
import torch

from ringspan.bench.settings import Settings
from ringspan.span import Positions

_CHUNK = 1024  # positions per random generator


class Inputs(NamedTuple):
    """q (batch, heads, seq, head_dim), k and v (batch, KV heads, seq, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Drawn(NamedTuple):
    """The operands of a measurement. `dout`, the gradient of the output, is None without a backward pass."""

    inputs: Inputs
    dout: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (*self.inputs, self.dout) if x is not None)


def draw(settings: Settings, positions: Positions, device: torch.device) -> Drawn:
    """Normally distributed values for some positions, ascending."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    shapes = [
        (settings.batch, heads, _CHUNK, settings.head_dim)
        for heads in (settings.num_heads, settings.num_kv_heads, settings.num_kv_heads, settings.num_heads)
    ][: 4 if settings.has_backward else 3]
    tensors = [torch.empty((*b, len(positions), d), dtype=dtype, device=device) for *b, _, d in shapes]
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    for first in range(0, settings.seq_len, _CHUNK):
        start, stop = np.searchsorted(positions, [first, first + _CHUNK])
        if start == stop:
            continue
        generator = torch.Generator().manual_seed(settings.seed * 2**32 + first // _CHUNK)
        rows = torch.from_numpy(np.asarray(positions[start:stop]) - first)
        for x, shape in zip(tensors, shapes, strict=True):
            x[:, :, start:stop] = torch.randn(shape, generator=generator, dtype=drawn)[:, :, rows].to(device, dtype)
    return Drawn(Inputs(*tensors[:3]), tensors[3] if settings.has_backward else None)

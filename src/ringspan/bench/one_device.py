"""What does one device make of it: how fast, and which numbers are right?

The fair opponent is PyTorch's own `scaled_dot_product_attention`. It knows "full" and "causal"; any other mask it takes
only as a dense matrix, and then computes every pair, visible or not. So for other masks the opponent is this library on
one rank, which is faster, and the dense matrix, a few rows at a time, serves to check the numbers.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringspan.bench.inputs import Inputs
from ringspan.bench.result import Check
from ringspan.bench.settings import Settings
from ringspan.call import attention
from ringspan.layout import contiguous
from ringspan.mask import causal, full
from ringspan.transports.single import ALONE

SDPA = "scaled_dot_product_attention"

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Of |difference| / max(1, |value|): four roundings of a half type; long sums in the others take more room."""

_DENSE_ROWS = 256  # of the dense mask in memory at a time


class OneDevice(NamedTuple):
    """How one device computes the whole."""

    method: str
    run: Callable[[], torch.Tensor]


def one_device(settings: Settings, inputs: Inputs) -> OneDevice:
    """The fastest exact way on one device."""
    if _is_plain(settings):
        return OneDevice(SDPA, lambda: _sdpa(settings, inputs, is_causal=settings.mask == causal()))
    layout = contiguous(settings.seq_len, 1)

    def run() -> torch.Tensor:
        out = attention(*inputs, mask=settings.mask, layout=layout, group=ALONE, kernel=settings.kernel)
        assert isinstance(out, torch.Tensor)
        return out

    return OneDevice("ringspan on one rank", run)


def check(settings: Settings, inputs: Inputs, out: torch.Tensor, one_device_out: torch.Tensor) -> Check:
    """Whether `out` is what one device computes with PyTorch's own operator."""
    worst = torch.zeros((), dtype=torch.float64)
    parts = [(slice(None), one_device_out)] if _is_plain(settings) else _with_dense_mask(settings, inputs)
    for rows, expected in parts:
        worst = torch.maximum(worst, largest_error(out[:, :, rows], expected))  # a NaN stays one
    name = SDPA if _is_plain(settings) else f"{SDPA} with a dense mask"
    return Check(None if worst.isnan() else worst.item(), TOLERANCE[out.dtype], name)


def largest_error(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest |difference| / max(1, |value|); NaN if there is one."""
    x, expected = x.double().cpu(), expected.double().cpu()
    return ((x - expected).abs() / expected.abs().clamp(min=1)).max()


def _is_plain(settings: Settings) -> bool:
    return settings.mask in (full(), causal())


def _with_dense_mask(settings: Settings, inputs: Inputs) -> Iterator[tuple[slice, torch.Tensor]]:
    """Outputs, some rows at a time."""
    positions = np.arange(settings.seq_len)
    for first in range(0, settings.seq_len, _DENSE_ROWS):
        rows = slice(first, min(first + _DENSE_ROWS, settings.seq_len))
        allowed = torch.from_numpy(settings.mask.allowed(positions[rows], positions)).to(inputs.q.device)
        out = _sdpa(settings, inputs._replace(q=inputs.q[:, :, rows]), attn_mask=allowed)
        yield rows, out.masked_fill(~allowed.any(-1)[:, None], 0.0)


def _sdpa(
    settings: Settings, inputs: Inputs, is_causal: bool = False, attn_mask: torch.Tensor | None = None
) -> torch.Tensor:
    has_groups = settings.num_heads != settings.num_kv_heads
    return scaled_dot_product_attention(*inputs, attn_mask, is_causal=is_causal, enable_gqa=has_groups)

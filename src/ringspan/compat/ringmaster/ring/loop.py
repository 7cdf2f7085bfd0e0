"""`ring_attention` of axolotl-ringmaster."""

from typing import Any

import torch

from ringspan.compat.ringmaster.config import RotateMethod
from ringspan.compat.ringmaster.runtime import ALGORITHMS
from ringspan.compat.sequence_first import FlashOptions, flash_mask
from ringspan.layout import contiguous
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.transports.base import ALONE

__all__ = ["ring_attention"]


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
    provider: str = "math",
    rotate_method: RotateMethod | str = RotateMethod.ALLGATHER,
    attn_implementation: str = "math",
    window: tuple[int, int] | int | None = None,
) -> torch.Tensor:
    """Contiguous shards (batch, heads, seq, dim) in, (batch, seq, heads, dim) out, as transformers has them.

    Without a group a rank attends to its own tokens, as there. A `window` is computed with every `rotate_method`; the
    original refuses it for rings.
    """
    del provider, attn_implementation
    group = ALONE if group is None else group
    world_size = session_of(group).transport.world_size
    if isinstance(window, int):
        window = (window, 0 if causal else window)
    options = FlashOptions(dropout, scaling, causal, window or (-1, -1), None, return_attn_probs=False)
    layout = contiguous(q.shape[2] * world_size, world_size)
    algorithm = ALGORITHMS[RotateMethod(rotate_method)]
    out = attention(q, k, v, mask=flash_mask(options), layout=layout, group=group, algorithm=algorithm, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)

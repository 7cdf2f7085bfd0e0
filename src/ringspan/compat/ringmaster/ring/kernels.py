"""Attention of one rank, as axolotl-ringmaster calls it."""

import torch

from ringspan.compat.sequence_first import FlashOptions, SequenceFirst, attend_sequence_first, flash_mask
from ringspan.layout import Layout
from ringspan.span import Span
from ringspan.transports.base import ALONE

__all__ = ["math_block"]


def math_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
    attn_implementation: str | None = None,
    window: tuple[int, int] | None = None,
) -> SequenceFirst:
    """Attention (batch, seq, heads, dim) and its log-sum-exp; causal rows of unequal lengths end together."""
    del attn_implementation
    options = FlashOptions(dropout, scaling, causal, window or (-1, -1), None, return_attn_probs=True)
    stop = max(q.shape[1], k.shape[1])
    layouts = [Layout(((Span(stop - x.shape[1], stop),),)) for x in (q, k)]
    return attend_sequence_first(
        q, k, v, mask=flash_mask(options), layout=layouts[0], kv_layout=layouts[1], group=ALONE, scale=scaling
    )

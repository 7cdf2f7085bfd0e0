"""Attention with tensors (batch, seq, heads, dim) and the options of flash attention, on our core."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask, causal, documents, full, sliding_window
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of


class FlashOptions(NamedTuple):
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    alibi_slopes: object
    return_attn_probs: bool


class SequenceFirst(NamedTuple):
    """out (batch, seq, heads, dim), lse (batch, heads, seq)."""

    out: torch.Tensor
    lse: torch.Tensor


def flash_mask(options: FlashOptions, lengths: Sequence[int] | None = None) -> Mask:
    """The mask that flash attention's options mean; what cannot be computed exactly is refused."""
    if options.dropout_p:
        raise UnsupportedError(
            "ranks would drop other weights than one process", argument="dropout_p", value=options.dropout_p
        )
    if options.alibi_slopes is not None:
        raise UnsupportedError("biases are not added to scores here", argument="alibi_slopes", remedy="leave it out")
    left, right = (None if side < 0 else int(side) for side in options.window_size)
    mask = full() if left is None and right is None else sliding_window(left, right)
    if options.causal:
        mask = causal() if mask == full() else mask & causal()
    if lengths is None:
        return mask
    packed = documents(lengths)
    return packed if mask == full() else packed & mask


def attend_sequence_first(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    layout: Layout,
    group: Any,
    scale: float | None = None,
    softcap: float | None = None,
    algorithm: str = "auto",
    kv_layout: Layout | None = None,
) -> SequenceFirst:
    """`rs.attention` on (batch, seq, heads, dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ShapeError("expected (batch, seq, heads, dim)", argument=f"{name}.shape", value=tuple(x.shape))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    result = attention(
        *heads_first,
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        group=group,
        scale=scale,
        softcap=softcap,
        algorithm=algorithm,
        return_lse=True,
    )
    assert isinstance(result, tuple)
    return SequenceFirst(result.out.transpose(1, 2), result.lse)


def group_size(group: Any) -> int:
    """The number of ranks in a group."""
    return session_of(group).transport.world_size

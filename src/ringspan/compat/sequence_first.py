"""Attention with tensors (batch, seq, heads, dim) and the options of flash attention, on our core."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ringspan.arguments import FLAG, NUMBER, WHOLE, Kind, check_arguments, instance_of, list_of
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask, causal, documents, full, sliding_window
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of

SEQUENCE_FIRST, PACKED, HEADS_FIRST = "(batch, seq, heads, dim)", "(tokens, heads, dim)", "(batch, heads, seq, dim)"
_TENSOR = instance_of(torch.Tensor, "torch.randn(1, 1024, 8, 64)")
_WINDOW = Kind("two whole numbers", "give (left, right)", lambda value: list_of(WHOLE).holds(value) and len(value) == 2)


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


def check_tensors(form: str, **given: torch.Tensor) -> None:
    """Refuse anything but tensors with the dims of a form, such as "(batch, seq, heads, dim)"."""
    for name, x in given.items():
        check_arguments(**{name: (_TENSOR, x)})
        if x.ndim != form.count(",") + 1:
            raise ShapeError(f"expected {form}", argument=f"{name}.shape", value=tuple(x.shape))


def flash_mask(options: FlashOptions, lengths: Sequence[int] | None = None) -> Mask:
    """The mask that flash attention's options mean; what cannot be computed exactly is refused."""
    check_arguments(
        dropout_p=(NUMBER, options.dropout_p),
        causal=(FLAG, options.causal),
        window_size=(_WINDOW, options.window_size),
        return_attn_probs=(FLAG, options.return_attn_probs),
    )
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
    check_tensors(SEQUENCE_FIRST, q=q, k=k, v=v)
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

"""Attention with shards of one sequence, or of packed documents, as axolotl-ringmaster calls it."""

from collections.abc import Callable
from typing import Any

import torch

from ringspan.arguments import WHOLE, Kind, check_arguments, list_of, optional
from ringspan.compat.ringmaster.config import RotateMethod
from ringspan.compat.ringmaster.runtime import ALGORITHMS, lengths_by_row
from ringspan.compat.sequence_first import HEADS_FIRST, FlashOptions, check_tensors, flash_mask
from ringspan.layout import Layout, contiguous, zigzag
from ringspan.mask import Mask, per_row
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.transports.base import ALONE

__all__ = ["distflash_attention", "ring_attention", "varlen_ring_attention", "zigzag_ring_attention"]

_METHOD = Kind(
    "a way to rotate",
    f"give one of {[str(way) for way in RotateMethod]}",
    lambda way: isinstance(way, str) and way in [*RotateMethod],
)
_WINDOW = Kind(
    "a whole number, or two", "give (left, right)", lambda window: WHOLE.holds(window) or list_of(WHOLE).holds(window)
)


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
    check_arguments(rotate_method=(_METHOD, rotate_method))
    algorithm = ALGORITHMS[RotateMethod(rotate_method)]
    return _attend(q, k, v, group, causal, scaling, dropout, window, algorithm=algorithm)


def varlen_ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    scaling: float | None,
    cu_seqlens: torch.Tensor,
    causal: bool = True,
    dropout: float = 0.0,
    window: tuple[int, int] | int | None = None,
    attn_implementation: str = "math",
) -> torch.Tensor:
    """Like `ring_attention`, within documents of these cumulative lengths over all rows of the whole batch."""
    del attn_implementation
    return _attend(q, k, v, group, causal, scaling, dropout, window, cu_seqlens)


def zigzag_ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    scaling: float | None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention with zigzag shards."""
    return _attend(q, k, v, group, True, scaling, 0.0, None, cu_seqlens, build=zigzag)


def distflash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    scaling: float | None,
    cu_seqlens: torch.Tensor | None = None,
    attn_implementation: str = "flash_attention_2",
) -> torch.Tensor:
    """Causal attention with contiguous shards."""
    del attn_implementation
    return _attend(q, k, v, group, True, scaling, 0.0, None, cu_seqlens)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: Any,
    causal: bool,
    scaling: float | None,
    dropout: float,
    window: tuple[int, int] | int | None,
    cu_seqlens: torch.Tensor | None = None,
    build: Callable[..., Layout] = contiguous,
    algorithm: str = "auto",
) -> torch.Tensor:
    check_tensors(HEADS_FIRST, q=q, k=k, v=v)
    check_arguments(window=(optional(_WINDOW), window))
    group = ALONE if group is None else group
    world_size = session_of(group).transport.world_size
    if isinstance(window, int):
        window = (window, 0 if causal else window)
    options = FlashOptions(dropout, scaling, causal, window or (-1, -1), None, return_attn_probs=False)
    layout = build(q.shape[2] * world_size, world_size)
    mask: Mask = flash_mask(options)
    if cu_seqlens is not None:
        rows = [flash_mask(options, lengths) for lengths in lengths_by_row(cu_seqlens, layout.num_positions)]
        mask = rows[0] if len(rows) == 1 else per_row(rows)
    out = attention(q, k, v, mask=mask, layout=layout, group=group, algorithm=algorithm, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)

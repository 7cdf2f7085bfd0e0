"""The functions of ring-flash-attention (0.1.8), on any device.

    from ringspan.compat.ring_flash_attn import zigzag_ring_flash_attn_func

Tensors are (batch, seq, heads, dim), for the packed-document functions (tokens, heads, dim), each rank with its shard.
`window_size` is computed, where the original accepts and ignores it; dropout, `alibi_slopes` and a soft cap are
refused. `deterministic` asks for what always holds here. Gradients are those of one process.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ringspan.compat.packed import (
    Llama3Documents,
    layout_of_documents,
    lengths_of,
    llama3_documents,
    llama3_flash_attn_prepare_cu_seqlens,
)
from ringspan.compat.sequence_first import (
    PACKED,
    SEQUENCE_FIRST,
    FlashOptions,
    attend_sequence_first,
    check_tensors,
    flash_mask,
    group_size,
)
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.runtime.compiled import outside_of_programs

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]

# Compiled, a returned lse would need a gradient, and lengths are not known before the call.
_OUTSIDE = outside_of_programs("attend over documents and return an lse")

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]


@_OUTSIDE
def _dense(
    build: Callable[..., Layout],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attend within one sequence over all ranks."""
    del deterministic
    options = FlashOptions(dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    check_tensors(SEQUENCE_FIRST, q=q, k=k, v=v)
    world_size = group_size(group)
    layout = build(q.shape[1] * world_size, world_size)
    result = attend_sequence_first(q, k, v, mask=flash_mask(options), layout=layout, group=group, scale=softmax_scale)
    return (result.out, result.lse, None) if return_attn_probs else result.out


@_OUTSIDE
def _packed(
    build: Callable[..., Layout],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Attend within packed documents, each spread over all ranks."""
    del max_seqlen, deterministic
    options = FlashOptions(dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    check_tensors(PACKED, q=q, k=k, v=v)
    layout, lengths = layout_of_documents(lengths_of(cu_seqlens), group_size(group), build)
    return _attend_packed(q, k, v, options, layout, lengths, group)


@_OUTSIDE
def _llama3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    heads_k_stride: int,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Any = None,
) -> Result:
    """Packed documents in contiguous shards; `heads_k_stride` only saves memory there, and is not needed here."""
    del cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, deterministic
    options = FlashOptions(dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)
    check_tensors(PACKED, q=q, k=k, v=v)
    found: Llama3Documents = llama3_documents(cu_seqlens_q, local_k_slice, q.shape[0], group)
    return _attend_packed(q, k, v, options, found.layout, found.lengths, group)


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: FlashOptions,
    layout: Layout,
    lengths: Sequence[int],
    group: Any,
) -> Result:
    """Tensors are (tokens, heads, dim); the lse is (heads, tokens)."""
    result = attend_sequence_first(
        *(x.unsqueeze(0) for x in (q, k, v)),
        mask=flash_mask(options, lengths),
        layout=layout,
        group=group,
        scale=options.softmax_scale,
    )
    out, lse = result.out.squeeze(0), result.lse.squeeze(0)
    return (out, lse, None) if options.return_attn_probs else out


def _kvpacked(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function for k and v in one tensor, (..., 2, heads, dim)."""

    @_OUTSIDE
    def call(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Result:
        return function(q, *_unpacked("kv", kv, 2), *args, **kwargs)

    return _described(call, function, ["q", "kv"], 3)


def _qkvpacked(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function for q, k and v in one tensor, (..., 3, heads, dim)."""

    @_OUTSIDE
    def call(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Result:
        return function(*_unpacked("qkv", qkv, 3), *args, **kwargs)

    return _described(call, function, ["qkv"], 3)


def _unpacked(name: str, packed: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(packed, torch.Tensor) or packed.ndim < 3 or packed.shape[-3] != count:
        shown = tuple(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        raise ShapeError(f"expected a tensor (..., {count}, heads, dim), got {shown}", argument=name)
    return packed.unbind(-3)


def _described(
    call: Callable[..., Result], function: Callable[..., Result], names: list[str], num_replaced: int
) -> Callable[..., Result]:
    """Give a function its name, signature and docstring."""
    signature = inspect.signature(function)
    tensors = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    rest = list(signature.parameters.values())[num_replaced:]
    call.__doc__ = getattr(function, "__doc__", None)
    call.__signature__ = signature.replace(parameters=[*tensors, *rest])  # type: ignore[attr-defined]
    return call


ring_flash_attn_func = partial(_dense, contiguous)
ring_flash_attn_kvpacked_func = _kvpacked(ring_flash_attn_func)
ring_flash_attn_qkvpacked_func = _qkvpacked(ring_flash_attn_func)
zigzag_ring_flash_attn_func = partial(_dense, zigzag)
zigzag_ring_flash_attn_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_func)
zigzag_ring_flash_attn_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_func)
stripe_flash_attn_func = partial(_dense, striped)
stripe_flash_attn_kvpacked_func = _kvpacked(stripe_flash_attn_func)
stripe_flash_attn_qkvpacked_func = _qkvpacked(stripe_flash_attn_func)
ring_flash_attn_varlen_func = partial(_packed, contiguous)
ring_flash_attn_varlen_kvpacked_func = _kvpacked(ring_flash_attn_varlen_func)
ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_func = partial(_packed, zigzag)
zigzag_ring_flash_attn_varlen_kvpacked_func = _kvpacked(zigzag_ring_flash_attn_varlen_func)
zigzag_ring_flash_attn_varlen_qkvpacked_func = _qkvpacked(zigzag_ring_flash_attn_varlen_func)
llama3_flash_attn_varlen_func = _llama3
llama3_flash_attn_varlen_kvpacked_func = _kvpacked(_llama3)
llama3_flash_attn_varlen_qkvpacked_func = _qkvpacked(_llama3)


class _Substituted(NamedTuple):
    """The attention that stands for flash attention in this process, and its group."""

    attention: Any
    group: Any


_SUBSTITUTED: list[_Substituted] = []  # none or one


def substitute_hf_flash_attn(process_group: Any, heads_k_stride: int) -> None:
    """Let models of transformers with "flash_attention_2" attend over the ranks of a group, in this process.

    Where flash attention is not installed, transformers refuses that name: use attn_implementation="ring_attn".
    Each rank calls the model with its contiguous shard of a packed sequence and that shard's `position_ids`, after
    `update_ring_flash_attn_params`. What cannot be exact is refused at the forward. `heads_k_stride` only saves memory
    there.
    """
    del heads_k_stride
    from ringspan.compat.models import ShardAttention

    if not _SUBSTITUTED:
        names = ("flash_attention_2", "ring_attn")
        _SUBSTITUTED.append(_Substituted(ShardAttention(names, "update_ring_flash_attn_params"), process_group))
    _SUBSTITUTED[0] = _SUBSTITUTED[0]._replace(group=process_group)


def update_ring_flash_attn_params(cu_seqlens: torch.Tensor, process_group: Any) -> None:
    """Announce the next packed sequence by the cumulative lengths of its documents, whole, on every rank."""
    if not _SUBSTITUTED:
        raise UnsupportedError(
            "no attention was substituted",
            argument="process_group",
            remedy="call substitute_hf_flash_attn(process_group, heads_k_stride) first",
        )
    from ringspan.compat.models import Shards

    attention, group = _SUBSTITUTED[0]
    world_size = group_size(process_group)
    if process_group is not group and world_size != group_size(group):
        raise UnsupportedError("another group than the substituted attention has", argument="process_group")
    lengths = lengths_of(cu_seqlens)
    total = sum(lengths)
    if total % world_size:
        raise ShapeError(
            f"{total} tokens cannot be cut into {world_size} equal shards",
            argument="cu_seqlens",
            remedy="pad the packed sequence with a document of its own",
        )
    shards = Shards(process_group, contiguous(total, world_size), (tuple(lengths),))
    attention.announce(lambda _: shards)

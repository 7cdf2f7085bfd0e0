"""How do PyTorch's fused CUDA operators compute attention of one piece, with its log-sum-exp and gradients?

This file was never run on a GPU, forward or backward. Tests trace it for signatures, shapes and dtypes only, so it is
kept thin. On a machine with a GPU, `ringspan bench selfcheck` runs every path and compares it with dense attention.

Forward: flash and cuDNN accept grouped heads. Efficient needs equal numbers of heads and is called once for each head
of a group, because repeating K and V would cost their memory. Flash and cuDNN have no suitable mask, so MASKED pieces
go to efficient with an additive mask. All three return the lse as a natural logarithm, in different shapes. NaN and
infinity spread within a tile as the operator spreads them: a check would make the host wait for the device at every
piece.

Backward: each operator derives delta from dout and out, and the weights as exp(score - lse), so with merged out and lse
it returns a piece's share. An lse of +inf makes the weights 0. The operators assume the memory layout of their own
forward pass without a check: flash reads the lse as dense; efficient reads out as (batch, rows, heads, dim) and the lse
with padded rows; cuDNN caches a compiled graph by the strides of q, k and v only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ringspan.kernels.base import (
    KernelGradients,
    KernelRequest,
    Merged,
    attend_turned,
    differentiate_turned,
    with_unit_stride,
)
from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece, PieceKind

_aten = torch.ops.aten

HALF_TYPES = (torch.float16, torch.bfloat16)

HEAD_DIM_MULTIPLE = 8
"""The operators load 16 bytes at a time: 8 elements of a half dtype."""

BIAS_MULTIPLE = 16
"""Rows of an additive mask must start at multiples of this many elements."""

LSE_MULTIPLE = 32
"""Efficient pads the rows of the lse to a multiple of this."""


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One fused operator: `attend(q, k, v, is_causal, scale)`, its gradients, and the inputs that it accepts."""

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], Partial]
    differentiate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Merged, bool, float], KernelGradients]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    equal_head_dims: bool = True
    min_keys: int = 1
    needs_ampere: bool = True

    def refuses(self, request: KernelRequest) -> str | None:
        """Refuse devices, dtypes and head dims that the operator has no code for."""
        widths = request.head_dim, request.v_head_dim
        if request.reproducible:
            return "was not tried in reproducible mode"
        if request.softcap is not None:
            return "has no softcap"
        if request.device.type != "cuda":
            return "takes only tensors on a CUDA device"
        if request.dtype not in self.dtypes:
            return f"takes only {', '.join(str(dtype) for dtype in self.dtypes)}"
        if any(width % HEAD_DIM_MULTIPLE for width in widths):
            return f"takes head_dim and v_head_dim only in multiples of {HEAD_DIM_MULTIPLE}"
        if self.equal_head_dims and widths[0] != widths[1]:
            return "takes only v_head_dim equal to head_dim"
        if self.max_head_dim is not None and max(widths) > self.max_head_dim:
            return f"takes head_dim only up to {self.max_head_dim}"
        needs_ampere = self.needs_ampere or request.dtype == torch.bfloat16
        # Without a device the tensors are fake, and there is no capability to query.
        if needs_ampere and torch.cuda.is_available() and torch.cuda.get_device_capability(request.device) < (8, 0):
            return "takes this dtype only on devices of compute capability 8.0 or newer"
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        if piece.kind is PieceKind.ANTICAUSAL:
            return attend_turned(self.forward, q, k, v, piece, scale)
        q, k, v = (with_unit_stride(x) for x in (q, k, v))
        if piece.kind is PieceKind.MASKED:
            return _attend_masked(q, k, v, piece, scale)
        attend = self.attend if k.shape[2] >= self.min_keys else _attend_efficient
        return attend(q, k, v, piece.kind is PieceKind.CAUSAL, scale)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        if piece.kind is PieceKind.ANTICAUSAL:
            return differentiate_turned(self.backward, q, k, v, merged, piece, scale)
        q, k, v = (with_unit_stride(x) for x in (q, k, v))
        if piece.kind is PieceKind.MASKED:
            return _differentiate_efficient(q, k, v, merged, False, scale, _bias(_hidden(piece, q), q))
        differentiate = self.differentiate if k.shape[2] >= self.min_keys else _differentiate_efficient
        return differentiate(q, k, v, merged, piece.kind is PieceKind.CAUSAL, scale)


def _attend_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Partial:
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return Partial(out, lse)


def _attend_cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float) -> Partial:
    out, lse, *_ = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
    return Partial(out, lse.reshape(q.shape[:-1]))  # from (batch, heads, rows, 1)


def _attend_efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None = None,
) -> Partial:
    """Call the operator once for each head of a group; `bias` is (rows, keys)."""
    batch, _, num_rows, _ = q.shape
    kv_heads = k.shape[1]
    if bias is not None:
        bias = bias.expand(batch, kv_heads, -1, -1)
    members = torch.unflatten(q, 1, (kv_heads, -1)).unbind(2)
    parts = [
        _aten._scaled_dot_product_efficient_attention(member, k, v, bias, True, 0.0, is_causal, scale=scale)
        for member in members
    ]
    # The operator pads the lse to a multiple of 32 rows.
    outs, lses = [part[0] for part in parts], [part[1].narrow(-1, 0, num_rows) for part in parts]
    if len(parts) == 1:
        return Partial(outs[0], lses[0])
    return Partial(torch.stack(outs, 2).flatten(1, 2), torch.stack(lses, 2).flatten(1, 2))


def _attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
    hidden = _hidden(piece, q)
    out, lse = _attend_efficient(q, k, v, False, scale, _bias(hidden, q))
    # The operator returns lse = 0 for a row that sees no key.
    sees_nothing = hidden.all(-1)
    return Partial(out.masked_fill(sees_nothing.unsqueeze(-1), 0.0), lse.masked_fill(sees_nothing, -torch.inf))


def _hidden(piece: Piece, q: torch.Tensor) -> torch.Tensor:
    assert piece.allowed is not None
    return torch.from_numpy(~piece.allowed).to(q.device)


def _bias(hidden: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return 0 where a key is visible and -inf where it is not."""
    num_rows, num_keys = hidden.shape
    row_stride = -(-num_keys // BIAS_MULTIPLE) * BIAS_MULTIPLE
    bias = torch.zeros(num_rows, row_stride, dtype=q.dtype, device=q.device).narrow(1, 0, num_keys)
    return bias.masked_fill_(hidden, -torch.inf)


def _differentiate_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, is_causal: bool, scale: float
) -> KernelGradients:
    dout, out, lse = merged
    lengths = (None, None, q.shape[2], k.shape[2])  # all rows of a batch have the same length
    seed = _no_seed(q)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *lengths, 0.0, is_causal, seed, seed, scale=scale
    )
    return KernelGradients(*grads)


def _differentiate_cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, is_causal: bool, scale: float
) -> KernelGradients:
    dout, out, lse = (x.contiguous() for x in merged)
    lengths = (None, None, q.shape[2], k.shape[2])
    seed = _no_seed(q)
    if torch.__version__ >= "2.9":  # from 2.9 on, the lse has cuDNN's own shape
        lse = lse.unsqueeze(-1)
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, seed, None, *lengths, 0.0, is_causal, scale=scale
    )
    return KernelGradients(*grads)


def _differentiate_efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    is_causal: bool,
    scale: float,
    bias: torch.Tensor | None = None,
) -> KernelGradients:
    """Call the operator once for each head of a group; `bias` is (rows, keys)."""
    batch, _, num_rows, _ = q.shape
    kv_heads = k.shape[1]
    if bias is not None:
        bias = bias.expand(batch, kv_heads, -1, -1)
    seed = _no_seed(q)
    padded_lse = pad(merged.lse, (0, -num_rows % LSE_MULTIPLE), value=torch.inf).contiguous()
    groups = (torch.unflatten(x, 1, (kv_heads, -1)).unbind(2) for x in (q, merged.dout, merged.out, padded_lse))
    parts = []
    for member, dout, out, lse in zip(*groups, strict=True):
        out_by_rows = out.transpose(1, 2).contiguous().transpose(1, 2)
        *grads, _ = _aten._scaled_dot_product_efficient_attention_backward(
            *(dout, member, k, v, bias, out_by_rows, lse, seed, seed, 0.0),
            (True, True, True, False),  # gradients of q, k and v, not of the bias
            is_causal,
            scale=scale,
        )
        parts.append(grads)
    if len(parts) == 1:
        return KernelGradients(*parts[0])
    dqs, dks, dvs = zip(*parts, strict=True)
    dk, dv = (torch.stack(grads).sum(0, dtype=torch.float32) for grads in (dks, dvs))
    return KernelGradients(torch.stack(dqs, 2).flatten(1, 2), dk, dv)


def _no_seed(q: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for the random state: dropout is 0, but cuDNN's operator converts the state anyway."""
    return q.new_empty((), dtype=torch.int64)


FLASH = CudaKernel("sdpa_flash", _attend_flash, _differentiate_flash, HALF_TYPES, max_head_dim=256)
EFFICIENT = CudaKernel(
    "sdpa_efficient",
    _attend_efficient,
    _differentiate_efficient,
    (*HALF_TYPES, torch.float32),
    equal_head_dims=False,
    needs_ampere=False,
)
CUDNN = CudaKernel("sdpa_cudnn", _attend_cudnn, _differentiate_cudnn, HALF_TYPES, max_head_dim=128, min_keys=2)

"""What must a kernel provide? Attention of one piece on one device with its log-sum-exp, and the gradients.

A kernel refuses requests that it cannot serve, with the reason, before it computes anything. The next kernel then takes
the request; no kernel approximates.

With its queries and keys in reverse order, an anticausal piece is causal: `attend_turned` lets a causal operator
compute it. Reversing takes copies, which cost little next to the products; without it the triangle would be cut into
dozens of pieces, each with its own merge.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece, PieceKind


class KernelRequest(NamedTuple):
    """The features that a call needs of its kernel.

    With `reproducible`, a row's bits must not depend on the other rows or heads. With `softcap`, a score s becomes
    softcap · tanh(s / softcap) before the mask and the softmax.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    reproducible: bool = False
    softcap: float | None = None


class KernelGradients(NamedTuple):
    """dq, dk and dv of a piece, with the shapes of q, k and v."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Merged(NamedTuple):
    """The merged results that the backward pass takes: `out` and `lse` cover all keys of a query, not one piece.

    `dout` and `out` are (batch, heads, n, v_head_dim); `lse` is (batch, heads, n). A row that sees no key has
    lse = +inf here, so that its weights are 0.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Kernel(Protocol):
    """Attention of one piece."""

    @property
    def name(self) -> str:
        """The name in `kernel=` and in error messages."""

    def refuses(self, request: KernelRequest) -> str | None:
        """Return why the kernel cannot serve a request, or None if it can."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        """Attend q (batch, heads, n, head_dim) to k and v (batch, KV heads, m, …), already cut to the piece.

        Neither n nor m is 0. The kernel reads only the piece's kind and its `allowed`. The result has the accumulator
        dtype or the dtype of q. Rows that see no key have out = 0 and lse = -inf.
        """

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        """Compute one piece's share of the gradients; the shares of all pieces add up to the gradients."""


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """Make the last dim contiguous; the fused operators assume it without a check."""
    return x if x.stride(-1) == 1 else x.contiguous()


_SEQ = 2  # the dim of queries and of keys


def attend_turned(
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Piece, float], Partial],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    piece: Piece,
    scale: float,
) -> Partial:
    part = forward(_turned(q), _turned(k), _turned(v), _as_causal(piece), scale)
    return Partial(*map(_turned, part))


def differentiate_turned(
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Merged, Piece, float], KernelGradients],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    piece: Piece,
    scale: float,
) -> KernelGradients:
    of_rows = Merged(*map(_turned, merged))
    part = backward(_turned(q), _turned(k), _turned(v), of_rows, _as_causal(piece), scale)
    return KernelGradients(*map(_turned, part))


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(_SEQ)


def _as_causal(piece: Piece) -> Piece:
    return piece._replace(kind=PieceKind.CAUSAL)

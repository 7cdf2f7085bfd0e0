"""What a kernel is: attention of one piece on one device, with the log-sum-exp that merging needs, and its gradients.

A kernel says what it cannot do, with the reason, before anything is computed. What one cannot do is handed to the next;
nothing is ever approximated.
"""

from typing import NamedTuple, Protocol

import torch

from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece


class Request(NamedTuple):
    """What a call will ask of its kernel; if `reproducible`, the same bits whatever else is in a call."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    v_head_dim: int
    reproducible: bool = False


class Gradients(NamedTuple):
    """dq, dk and dv of a piece, each in the shape of its tensor."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class Merged(NamedTuple):
    """What the backward pass knows of its queries: all of their keys are in `out` and `lse`, not a piece's alone.

    `dout` and `out` (batch, heads, n, v_head_dim), `lse` (batch, heads, n), +inf for a row that sees no key at all, so
    that its weights are 0.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Kernel(Protocol):
    """Attention of one piece."""

    @property
    def name(self) -> str:
        """What `kernel=` and error messages call it."""

    def refuses(self, request: Request) -> str | None:
        """Why the kernel cannot serve such a call, or None if it can."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        """Attend q (batch, heads, n, head_dim) to k and v (batch, KV heads, m, …), already cut to the piece.

        Neither n nor m is 0. Only the kind of the piece and its `allowed` matter here. The parts come back in the
        accumulator type or in that of q; rows that see no key have out = 0 and lse = -inf.
        """

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> Gradients:
        """A piece's share of the gradients: those of all pieces add up to the whole."""


def with_unit_stride(x: torch.Tensor) -> torch.Tensor:
    """The fused operators take the last dim for contiguous without looking: make it so where it is not."""
    return x if x.stride(-1) == 1 else x.contiguous()

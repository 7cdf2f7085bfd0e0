"""How does a causal operator compute an anticausal piece?

With its queries and keys in reverse order, an anticausal piece is causal. Reversing takes copies, which cost little
next to the products. Without it the triangle would be cut into dozens of pieces, each with its own merge.
"""

from collections.abc import Callable

import torch

from ringspan.kernels.base import KernelGradients, Merged
from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece, PieceKind

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

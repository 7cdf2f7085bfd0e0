"""Sums of tensors whose bits do not depend on what else is in a call, nor on the number of threads.

The kernel computes each head and block of rows by itself, so a cell comes out the same whatever stands beside it. Two
things around it do not, and are seen to here:

- Vectorised exp and logaddexp give other bits in the remainder of a loop than in its body. They are applied to
  contiguous numbers without a remainder, no more at a time than one thread takes (`merge_steadily`).
- A call for a single head is one task, in which the matrix products themselves use all threads and give other bits than
  on one. With a second head beside it each product stays on its thread; the second is a copy of the first.

One call for several tiles of queries is faster, and rows come out the same however many there are; but no library says
so, and therefore that is tried first (`tiles_at_once`).
"""

from functools import lru_cache

import torch

from ringspan.execute import Value
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Gradients, Kernel, Merged, Request
from ringspan.pieces import Piece, PieceKind
from ringspan.runtime import TorchArithmetic
from ringspan.softmax import Partial, accumulator_dtype, merge_steadily
from ringspan.tree import TILE


class SteadyArithmetic(TorchArithmetic):
    """The arithmetic of the reproducible mode."""

    merge_parts = staticmethod(merge_steadily)

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor) -> None:
        super().__init__(kernel if torch.get_num_threads() == 1 else _NeverAlone(kernel), scale, like)

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend a piece of all queries; the lse in order, as every merge wants it."""
        out, lse = super().begin(piece, q, kv)
        return out, lse.contiguous()


AT_ONCE = 4
"""From 768 rows on the CPU operator takes larger blocks; with more than 2,048 there is nothing more to gain."""


@lru_cache(maxsize=64)
def tiles_at_once(name: str, request: Request) -> int:
    """How many tiles of queries one call may attend: several, if on this machine that gives the bits of one by one."""
    kernel = choose_kernel(name, request)
    dtype = accumulator_dtype(request.dtype)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, rows, dim, dtype=dtype, generator=generator)
        for rows, dim in ((AT_ONCE * TILE, request.head_dim), (TILE, request.head_dim), (TILE, request.v_head_dim))
    )
    scale = request.head_dim**-0.5

    def attend(rows: slice) -> Partial:
        piece = Piece(slice(0, rows.stop - rows.start), slice(0, TILE), PieceKind.FULL, None, None)
        return kernel.forward(q[:, :, rows], k, v, piece, scale)

    one_by_one = [attend(slice(i * TILE, (i + 1) * TILE)) for i in range(AT_ONCE)]
    for number in range(2, AT_ONCE + 1):
        together = attend(slice(0, number * TILE))
        for parts, whole in zip(zip(*one_by_one[:number], strict=True), together, strict=True):
            if not torch.equal(torch.cat(parts, 2), whole):
                return 1
    return AT_ONCE


class _NeverAlone:
    """A kernel that is never called for one batch row and KV head alone."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def refuses(self, request: Request) -> str | None:
        return self.kernel.refuses(request)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        if not _is_alone(k):
            return self.kernel.forward(q, k, v, piece, scale)
        part = self.kernel.forward(_twice(q), _twice(k), _twice(v), piece, scale)
        return Partial(*(x[:1] for x in part))

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> Gradients:
        if not _is_alone(k):
            return self.kernel.backward(q, k, v, merged, piece, scale)
        part = self.kernel.backward(_twice(q), _twice(k), _twice(v), Merged(*map(_twice, merged)), piece, scale)
        return Gradients(*(x[:1] for x in part))


def _is_alone(k: torch.Tensor) -> bool:
    return k.shape[0] * k.shape[1] == 1


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x.expand(2, *x.shape[1:])

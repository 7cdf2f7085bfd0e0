"""Pieces and tensors for the tests of kernels, forward and backward."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan.kernels import sdpa_cpu
from ringspan.kernels.reference import ReferenceKernel
from ringspan.kernels.sdpa_cpu import SdpaCpu
from ringspan.program.pieces import Piece, PieceKind

SCALE = 0.3
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Allowed = npt.NDArray[np.bool_]
CUT = 400  # causal tokens for which the CPU kernel computes the last ones in their own call
ODD_VALUES = [torch.nan, torch.inf, -torch.inf]

SIZES = {
    PieceKind.FULL: [(1, 1), (1, 300), (7, 13), (130, 257)],
    PieceKind.CAUSAL: [(1, 1), (17, 17), (65, 65), (197, 197), (CUT, CUT)],
    PieceKind.ANTICAUSAL: [(1, 1), (17, 17), (65, 65), (CUT, CUT)],
    PieceKind.MASKED: [(1, 3), (5, 9), (64, 101), (33, 200)],
}

each_kernel = pytest.mark.parametrize("kernel", [ReferenceKernel(), SdpaCpu()], ids=lambda kernel: kernel.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
each_ratio = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=lambda heads: f"{heads[0]}over{heads[1]}")


RUN = 40
IN_RUNS = {PieceKind.FULL: (70, 2 * RUN + 21), PieceKind.CAUSAL: (2 * RUN + 21, 2 * RUN + 21)}  # three when short


def take_short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the CPU kernel attend RUN keys per call, and one KV head with its query heads after the first call."""
    kinds = (PieceKind.FULL, PieceKind.CAUSAL)
    monkeypatch.setattr(sdpa_cpu, "_run_length", lambda *_: RUN)
    for name, value in (("_LEAST_RUN", RUN // 2), ("_CACHED_BYTES", 0)):
        monkeypatch.setattr(sdpa_cpu, name, dict.fromkeys(kinds, value))
    for name in ("_MANY_ROWS", "_SLAB_BYTES"):
        monkeypatch.setattr(sdpa_cpu, name, 1)


def random_qkv(
    n: int,
    m: int,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 8,
    v_head_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
) -> QKV:
    generator = torch.Generator().manual_seed(n * 1000 + m)
    shapes = (
        (batch, heads[0], n, head_dim),
        (batch, heads[1], m, head_dim),
        (batch, heads[1], m, v_head_dim or head_dim),
    )
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v


def random_mask(n: int, m: int) -> Allowed:
    """About half of the pairs visible, none in the second row."""
    allowed = np.random.default_rng(n * 1000 + m).random((n, m)) < 0.5
    allowed[1:2] = False
    return allowed


def piece_of(kind: PieceKind, n: int, m: int) -> tuple[Piece, Allowed]:
    """A piece and the equivalent dense mask."""
    allowed = np.ones((n, m), np.bool_)
    if kind is PieceKind.CAUSAL:
        assert n == m
        allowed = np.tril(allowed)
    elif kind is PieceKind.ANTICAUSAL:
        assert n == m
        allowed = np.triu(allowed)
    elif kind is PieceKind.MASKED:
        allowed = random_mask(n, m)
    own = allowed if kind is PieceKind.MASKED else None
    return Piece(slice(0, n), slice(0, m), kind, own, None), allowed


class LargestTensor(TorchDispatchMode):
    """Return the elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple) else (result,)
        inputs = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in made:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self.numel = max(self.numel, x.numel())
        return result

"""What `ringspan bench selfcheck` finds when a kernel is wrong."""

from collections.abc import Callable

import pytest
import torch

from ringspan.bench import selfcheck
from ringspan.bench.result import PathCheck
from ringspan.kernels.base import KernelGradients
from ringspan.kernels.sdpa_cpu import SdpaCpu
from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece, PieceKind

FORWARD, BACKWARD = "kernel sdpa_cpu, float32, cpu", "kernel sdpa_cpu backward, float32, cpu"


class Broken(SdpaCpu):
    """Right but for MASKED pieces, of which it spoils the first result of one method."""

    def __init__(self, method: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.method = method
        self.spoil = spoil

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        out, lse = super().forward(q, k, v, piece, scale)
        return Partial(self._spoilt("forward", out, piece), lse)

    def backward(self, q, k, v, merged, piece: Piece, scale: float) -> KernelGradients:
        dq, dk, dv = super().backward(q, k, v, merged, piece, scale)
        return KernelGradients(self._spoilt("backward", dq, piece), dk, dv)

    def _spoilt(self, method: str, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        return self.spoil(x) if method == self.method and piece.kind is PieceKind.MASKED else x


def find(monkeypatch: pytest.MonkeyPatch, kernel: SdpaCpu) -> dict[str, PathCheck]:
    monkeypatch.setattr(selfcheck, "KERNELS", (kernel,))
    return {it.path: it for it in selfcheck._check_kernels()}


def refuse(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel found to launch!")


@pytest.mark.parametrize(
    ("spoil", "note"),
    [
        (lambda x: x * 1.01, "limit 1.0e-05"),
        (lambda x: x.clone().fill_(torch.nan), "not finite"),
        (refuse, "no kernel found to launch!"),
    ],
    ids=["another number", "NaN", "error"],
)
@pytest.mark.parametrize(
    ("method", "wrong", "right"), [("forward", FORWARD, BACKWARD), ("backward", BACKWARD, FORWARD)]
)
def test_a_wrong_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, wrong: str, right: str, spoil: Callable, note: str
) -> None:
    found = find(monkeypatch, Broken(method, spoil))
    assert found[right].status == "ok"
    assert found[wrong].status == "failed"
    assert note in found[wrong].note

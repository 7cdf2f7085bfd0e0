"""The CUDA kernels as far as they go without a GPU.

Fake tensors check signatures, shapes and types of the real operators. What happens around the operators is checked on
numbers: stand-ins compute the same on the CPU and return it the way the real ones do, oddities included.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from ringspan.kernels import sdpa_cuda
from ringspan.kernels.base import KernelGradients, KernelRequest, Merged
from ringspan.kernels.sdpa_cuda import CUDNN, EFFICIENT, FLASH, CudaKernel
from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece, PieceKind
from support import oracle

SCALE = 0.3
HALF = KernelRequest(torch.device("cuda"), torch.bfloat16, 64, 64)
NAMES = {
    FLASH: "_scaled_dot_product_flash_attention",
    EFFICIENT: "_scaled_dot_product_efficient_attention",
    CUDNN: "_scaled_dot_product_cudnn_attention",
}

each_kernel = pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CUDNN], ids=lambda kernel: kernel.name)
each_kind = pytest.mark.parametrize("kind", PieceKind)
each_ratio = pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=lambda heads: f"{heads[0]}over{heads[1]}")


def piece_of(kind: PieceKind, n: int, m: int) -> Piece:
    allowed = None
    if kind is PieceKind.MASKED:
        allowed = np.random.default_rng(0).random((n, m)) < 0.5
        allowed[1] = False
    return Piece(slice(0, n), slice(0, m), kind, allowed, None)


def visible(piece: Piece) -> torch.Tensor:
    if piece.allowed is not None:
        return torch.from_numpy(piece.allowed)
    everything = torch.ones(piece.q.stop, piece.kv.stop, dtype=torch.bool)
    triangles = {PieceKind.CAUSAL: everything.tril(), PieceKind.ANTICAUSAL: everything.triu()}
    return triangles.get(piece.kind, everything)


# What they accept


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (FLASH, {}, None),
        (FLASH, {"dtype": torch.float16, "head_dim": 256, "v_head_dim": 256}, None),
        (FLASH, {"device": torch.device("cpu")}, "CUDA device"),
        (FLASH, {"dtype": torch.float32}, "torch.float16, torch.bfloat16"),
        (FLASH, {"head_dim": 264, "v_head_dim": 264}, "up to 256"),
        (FLASH, {"v_head_dim": 128}, "v_head_dim equal to head_dim"),
        (FLASH, {"head_dim": 20, "v_head_dim": 20}, "multiples of 8"),
        (EFFICIENT, {"dtype": torch.float32}, None),
        (EFFICIENT, {"dtype": torch.float64}, "torch.float32"),
        (EFFICIENT, {"head_dim": 512, "v_head_dim": 128}, None),
        (EFFICIENT, {"v_head_dim": 30}, "multiples of 8"),
        (CUDNN, {"head_dim": 128, "v_head_dim": 128}, None),
        (CUDNN, {"head_dim": 136, "v_head_dim": 136}, "up to 128"),
        (CUDNN, {"dtype": torch.float32}, "torch.float16, torch.bfloat16"),
    ],
)
def test_what_they_refuse(kernel: CudaKernel, changes: dict[str, Any], reason: str | None) -> None:
    found = kernel.refuses(HALF._replace(**changes))
    assert (found is None) if reason is None else (reason in str(found))


def test_older_devices_have_no_bfloat16_and_no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    half = HALF._replace(dtype=torch.float16)
    found = {kernel.name: (kernel.refuses(HALF), kernel.refuses(half)) for kernel in (FLASH, EFFICIENT, CUDNN)}
    too_old = "takes this dtype only on devices of compute capability 8.0 or newer"
    assert found == {
        "sdpa_flash": (too_old, too_old),
        "sdpa_efficient": (too_old, None),
        "sdpa_cudnn": (too_old, too_old),
    }
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert FLASH.refuses(HALF) is None


# The real operators on fake tensors


@pytest.fixture(autouse=True)
def contiguous_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method checks the device of the tensor first, even of a fake one; the operator behind it does not."""
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.contiguous.default(x))


class Calls(TorchDispatchMode):
    """Record the calls of attention operators with their arguments, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if "attention" in name:
            self.made.append((name, args, kwargs))
        return func(*args, **(kwargs or {}))


def parameters(name: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments]


def fake_qkv(n: int, m: int, heads: tuple[int, int], dtype: torch.dtype, v_head_dim: int = 64) -> list[torch.Tensor]:
    shapes = (2, heads[0], n, 64), (2, heads[1], m, 64), (2, heads[1], m, v_head_dim)
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]


@each_kernel
@each_kind
@each_ratio
def test_shapes_and_types(
    subtests: pytest.Subtests, kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for dtype in kernel.dtypes:
        with subtests.test(dtype=dtype):
            for n, m in [(33, 33), (64, 64)] if kind.is_triangle else [(33, 50), (2, 1)]:
                with FakeTensorMode():
                    q, k, v = fake_qkv(n, m, heads, dtype)
                    part = kernel.forward(q, k, v, piece_of(kind, n, m), SCALE)
                    assert part.out.shape == q.shape
                    assert part.out.dtype == dtype
                    assert part.lse.shape == q.shape[:3]
                    assert part.lse.dtype == torch.float32
                    assert {part.out.device.type, part.lse.device.type} == {"cuda"}


@each_kernel
@each_kind
@each_ratio
def test_which_operator_is_called_and_how(kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]) -> None:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = fake_qkv(40, 40, heads, torch.float16)
        kernel.forward(q, k, v, piece_of(kind, 40, 40), SCALE)
    used = EFFICIENT if kind is PieceKind.MASKED else kernel
    assert len(calls.made) == (heads[0] // heads[1] if used is EFFICIENT else 1)
    for name, (_, keys, values, *rest), kwargs in calls.made:
        assert name == NAMES[used]
        assert [keys is k, values is v] == [kind is not PieceKind.ANTICAUSAL] * 2
        assert kwargs["scale"] == SCALE
        given = dict(zip(parameters(name)[3:], rest, strict=False))
        assert given.get("dropout_p", 0.0) == 0.0
        assert given.get("is_causal", False) == (kind.is_triangle)
        assert given.get("compute_log_sumexp", True)


def test_one_key_is_too_few_for_cudnn() -> None:
    with FakeTensorMode(), Calls() as calls:
        CUDNN.forward(*fake_qkv(3, 1, (2, 2), torch.float16), piece_of(PieceKind.FULL, 3, 1), SCALE)
    assert [name for name, *_ in calls.made] == [NAMES[EFFICIENT]]


def test_rows_of_the_additive_mask_are_aligned() -> None:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = fake_qkv(5, 50, (4, 2), torch.float16)
        EFFICIENT.forward(q, k, v, piece_of(PieceKind.MASKED, 5, 50), SCALE)
    for _, (_, _, _, bias, *_), _ in calls.made:
        assert bias.shape == (2, 2, 5, 50)
        assert bias.dtype == torch.float16
        assert bias.stride(-1) == 1
        assert [stride % 8 for stride in bias.stride()[:3]] == [0, 0, 0]


def test_efficient_takes_values_of_another_width() -> None:
    with FakeTensorMode():
        part = EFFICIENT.forward(*fake_qkv(5, 50, (4, 2), torch.float32, 128), piece_of(PieceKind.FULL, 5, 50), SCALE)
        assert part.out.shape == (2, 4, 5, 128)


def fake_merged(q: torch.Tensor, v: torch.Tensor) -> Merged:
    """Possible layouts: lse stored as (batch, rows, heads), dout expanded from one number, out as rows of a whole."""
    batch, heads, num_rows, _ = q.shape
    out = q.new_empty(batch, heads, num_rows + 3, v.shape[-1]).narrow(2, 3, num_rows)
    lse = q.new_empty(batch, num_rows, heads, dtype=torch.float32).transpose(1, 2)
    return Merged(q.new_empty(()).expand(out.shape), out, lse)


@each_kernel
@each_kind
@each_ratio
def test_shapes_and_types_of_gradients(
    subtests: pytest.Subtests, kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for dtype in kernel.dtypes:
        with subtests.test(dtype=dtype):
            for n, m in [(33, 33), (64, 64)] if kind.is_triangle else [(33, 50), (2, 1)]:
                with FakeTensorMode():
                    q, k, v = fake_qkv(n, m, heads, dtype)
                    found = kernel.backward(q, k, v, fake_merged(q, v), piece_of(kind, n, m), SCALE)
                    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
                    assert {x.dtype for x in found} <= {dtype, torch.float32}
                    assert found.dq.dtype == dtype
                    assert {x.device.type for x in found} == {"cuda"}


@each_kernel
@each_kind
@each_ratio
def test_which_operator_is_called_backward_and_how(kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]) -> None:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = fake_qkv(40, 40, heads, torch.float16)
        merged = fake_merged(q, v)
        kernel.backward(q, k, v, merged, piece_of(kind, 40, 40), SCALE)
    used = EFFICIENT if kind is PieceKind.MASKED else kernel
    assert len(calls.made) == (heads[0] // heads[1] if used is EFFICIENT else 1)
    for name, args, kwargs in calls.made:
        assert name == f"{NAMES[used]}_backward"
        given = dict(zip(parameters(name), args, strict=False)) | kwargs
        assert [given["key"] is k, given["value"] is v] == [kind is not PieceKind.ANTICAUSAL] * 2
        assert given["scale"] == SCALE
        assert given["dropout_p"] == 0.0
        assert given.get("is_causal", False) == (kind.is_triangle)
        assert (given.get("attn_bias") is not None) == (kind is PieceKind.MASKED)
        assert given["philox_seed"].device.type == "cuda"
        if used is not EFFICIENT:
            # Sequence lengths per batch row would mean packed rows.
            assert (given["cum_seq_q"], given["cum_seq_k"], given["max_q"], given["max_k"]) == (None, None, 40, 40)


def operands_backward(kernel: CudaKernel, n: int) -> list[dict[str, Any]]:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = fake_qkv(n, n, (4, 2), torch.float16)
        kernel.backward(q, k, v, fake_merged(q, v), piece_of(PieceKind.FULL, n, n), SCALE)
    return [dict(zip(parameters(name), args, strict=False)) for name, args, _ in calls.made]


@pytest.mark.parametrize("n", [33, 64])
def test_memory_is_as_the_forward_operators_leave_it(n: int) -> None:
    """Layouts that the operators assume without a check; see the kernels' file."""
    (given,) = operands_backward(FLASH, n)
    assert given["logsumexp"].is_contiguous()
    (given,) = operands_backward(CUDNN, n)
    assert given["logsumexp"].shape == (2, 4, n, 1)
    assert all(given[name].is_contiguous() for name in ("grad_out", "out", "logsumexp"))
    for given in operands_backward(EFFICIENT, n):
        assert given["logsumexp"].shape == (2, 2, -(-n // 32) * 32)
        assert given["logsumexp"].stride(-1) == 1
        assert [stride % 8 for stride in given["logsumexp"].stride()[:2]] == [0, 0]
        assert given["out"].transpose(1, 2).is_contiguous()
        assert given["grad_input_mask"] == [True, True, True, False]


def test_before_torch_2_9_cudnn_takes_the_lse_without_a_last_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.1+cu126"))
    (given,) = operands_backward(CUDNN, 33)
    assert given["logsumexp"].shape == (2, 4, 33)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.10.0"))
    (given,) = operands_backward(CUDNN, 33)
    assert given["logsumexp"].shape == (2, 4, 33, 1)


def test_one_key_is_too_few_for_the_gradients_of_cudnn() -> None:
    with FakeTensorMode(), Calls() as calls:
        q, k, v = fake_qkv(3, 1, (2, 2), torch.float16)
        CUDNN.backward(q, k, v, fake_merged(q, v), piece_of(PieceKind.FULL, 3, 1), SCALE)
    assert [name for name, *_ in calls.made] == [f"{NAMES[EFFICIENT]}_backward"]


def test_efficient_takes_values_of_another_width_backward() -> None:
    with FakeTensorMode():
        q, k, v = fake_qkv(5, 50, (4, 2), torch.float32, 128)
        found = EFFICIENT.backward(q, k, v, fake_merged(q, v), piece_of(PieceKind.FULL, 5, 50), SCALE)
        assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


# What happens around the operators, on numbers


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scale: float) -> Partial:
    """Attention as the fused operators compute it: out = 0 and lse = 0 for a row that sees no key."""
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * scale + bias
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    lse = torch.logsumexp(scores, -1)
    return Partial(weights @ v.repeat_interleave(group, 1), lse.masked_fill(lse.isneginf(), 0.0))


def causal_bias(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> torch.Tensor:
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return torch.zeros(hidden.shape).masked_fill(hidden & torch.tensor(is_causal), -torch.inf)


def flash(q, k, v, dropout_p, is_causal, *, scale):
    out, lse = plain(q, k, v, causal_bias(q, k, is_causal), scale)
    return (out, lse, *[None] * 7)


def cudnn(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
    assert k.shape[2] > 1
    out, lse = plain(q, k, v, causal_bias(q, k, is_causal), scale)
    return (out, lse.unsqueeze(-1), *[None] * 7)


def efficient(q, k, v, bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
    assert q.shape[1] == k.shape[1]
    bias = causal_bias(q, k, is_causal) if bias is None else bias
    out, lse = plain(q, k, v, bias, scale)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), None, None


def plain_backward(dout, q, k, v, out, lse, bias: torch.Tensor, scale: float) -> KernelGradients:
    assert {x.stride(-1) for x in (q, k, v)} == {1}
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    weights = (q @ keys.mT * scale + bias - lse.unsqueeze(-1)).exp()
    dscores = scale * weights * (dout @ values.mT - (dout * out).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2) for x in (dscores.mT @ q, weights.mT @ dout))
    return KernelGradients(dscores @ keys, dk, dv)


def flash_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale):
    assert lse.is_contiguous()
    return plain_backward(dout, q, k, v, out, lse, causal_bias(q, k, is_causal), scale)


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, *, scale
):
    assert k.shape[2] > 1
    assert all(x.is_contiguous() for x in (dout, out, lse))
    return plain_backward(dout, q, k, v, out, lse.squeeze(-1), causal_bias(q, k, is_causal), scale)


def efficient_backward(dout, q, k, v, bias, out, lse, seed, offset, dropout_p, wanted, is_causal, *, scale):
    assert q.shape[1] == k.shape[1]
    batch, heads, num_rows, width = out.shape
    # Read as the operator reads: out with its own strides, the lse with a padded end.
    out = out.as_strided(out.shape, (out.stride(0), out.stride(1), heads * width, 1))
    assert lse.as_strided((batch, heads, -(-num_rows // 32) * 32), (*lse.stride()[:2], 1))[..., num_rows:].isinf().all()
    bias = causal_bias(q, k, is_causal) if bias is None else bias
    return *plain_backward(dout, q, k, v, out, lse[..., :num_rows], bias, scale), None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = dict(zip(NAMES.values(), (flash, efficient, cudnn), strict=True))
    names = [f"{name}_backward" for name in NAMES.values()]
    backward = dict(zip(names, (flash_backward, efficient_backward, cudnn_backward), strict=True))
    monkeypatch.setattr(sdpa_cuda, "_aten", SimpleNamespace(**forward, **backward))


def random_qkv(heads: tuple[int, int], n: int, m: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = zip((heads[0], heads[1], heads[1]), (n, m, m), strict=True)
    return [torch.randn(2, count, length, 8, generator=generator) for count, length in sizes]


@pytest.mark.usefixtures("stand_ins")
@each_kernel
@each_kind
@each_ratio
def test_results_are_put_together_rightly(
    subtests: pytest.Subtests, kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for n, m in [(33, 33), (64, 64)] if kind.is_triangle else [(33, 50), (4, 1)]:
        with subtests.test(n=n, m=m):
            qkv = random_qkv(heads, n, m)
            piece = piece_of(kind, n, m)
            out, lse = oracle.dense_attention(*(x.numpy() for x in qkv), visible(piece).numpy(), SCALE)
            for inputs in (qkv, [x.mT.contiguous().mT for x in qkv]):
                part = kernel.forward(*inputs, piece, SCALE)
                torch.testing.assert_close(part.out, torch.from_numpy(out).float())
                torch.testing.assert_close(part.lse, torch.from_numpy(lse).float())


@pytest.mark.usefixtures("stand_ins")
@each_kernel
@each_kind
@each_ratio
def test_gradients_are_put_together_rightly(
    subtests: pytest.Subtests, kernel: CudaKernel, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for n, m in [(33, 33), (64, 64)] if kind.is_triangle else [(33, 50), (4, 1)]:
        with subtests.test(n=n, m=m):
            qkv = random_qkv(heads, n, m)
            piece = piece_of(kind, n, m)
            allowed = visible(piece).numpy()
            out, lse = (torch.from_numpy(x).float() for x in oracle.dense_attention(*qkv, allowed, SCALE))
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
            expected = oracle.dense_gradients(*qkv, allowed, dout, SCALE)
            by_rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*qkv, dout, out, lse)]
            by_columns = [x.mT.contiguous().mT for x in (*qkv, dout, out, lse)]
            for q, k, v, *merged in ([*qkv, dout, out, lse], by_rows, by_columns):
                found = kernel.backward(q, k, v, Merged(*merged), piece, SCALE)
                for x, y in zip(found, expected, strict=True):
                    torch.testing.assert_close(x, torch.from_numpy(y).float())

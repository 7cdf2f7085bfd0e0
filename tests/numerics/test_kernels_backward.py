"""The gradients of the kernels that run on a CPU, against dense float64 attention."""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringspan.kernels.reference
from ringspan.kernels import Kernel
from ringspan.kernels.base import KernelGradients, Merged
from ringspan.kernels.reference import MAX_SCORES, ReferenceKernel
from ringspan.kernels.sdpa_cpu import SdpaCpu
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.program.pieces import Piece, PieceKind
from support import oracle
from support.kernel_cases import (
    CUT,
    IN_RUNS,
    ODD_VALUES,
    QKV,
    RUN,
    SCALE,
    SIZES,
    Allowed,
    LargestTensor,
    each_dtype,
    each_kernel,
    each_ratio,
    piece_of,
    random_qkv,
    take_short_runs,
)

each_kind = pytest.mark.parametrize("kind", PieceKind)

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Relative to the largest gradient: out has the dtype of q, so half dtypes are rounded before a kernel begins."""


def random_dout(qkv: QKV) -> torch.Tensor:
    q, _, v = qkv
    generator = torch.Generator().manual_seed(7)
    return torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64).to(q.dtype)


def merged_of(qkv: QKV, allowed: Allowed, dout: torch.Tensor) -> Merged:
    """The result that the forward pass hands over, by the oracle."""
    out, lse = (torch.from_numpy(x) for x in oracle.dense_attention(*(x.double().numpy() for x in qkv), allowed, SCALE))
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return Merged(dout, out.to(dout.dtype), lse.to(accumulator_dtype(dout.dtype)))


def truth(qkv: QKV, allowed: Allowed, dout: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = (x.double().numpy() for x in qkv)
    return [torch.from_numpy(x) for x in oracle.dense_gradients(q, k, v, allowed, dout.double().numpy(), SCALE)]


def assert_near(found: KernelGradients, expected: list[torch.Tensor], dtype: torch.dtype) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        assert x.dtype == accumulator_dtype(dtype)
        limit = TOLERANCE[dtype] * y.abs().max().clamp(min=1)
        assert (x.double() - y).abs().max() <= limit  # and no NaN


def assert_right(kernel: Kernel, qkv: QKV, piece: Piece, allowed: Allowed) -> None:
    dout = random_dout(qkv)
    found = kernel.backward(*qkv, merged_of(qkv, allowed, dout), piece, SCALE)
    assert_near(found, truth(qkv, allowed, dout), dout.dtype)


@each_kernel
@each_dtype
@each_kind
@each_ratio
def test_pieces_of_any_size(
    subtests: pytest.Subtests, kernel: Kernel, dtype: torch.dtype, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for n, m in SIZES[kind]:
        with subtests.test(n=n, m=m):
            assert_right(kernel, random_qkv(n, m, heads, dtype=dtype), *piece_of(kind, n, m))


@each_kernel
@each_kind
def test_pieces_of_several_inner_blocks(kernel: Kernel, kind: PieceKind) -> None:
    assert_right(kernel, random_qkv(775, 775, (2, 1), batch=1), *piece_of(kind, 775, 775))


@each_kernel
@each_dtype
@each_kind
def test_any_head_dim_and_v_head_dim(
    subtests: pytest.Subtests, kernel: Kernel, dtype: torch.dtype, kind: PieceKind
) -> None:
    for head_dim, v_head_dim in [(1, 1), (7, 7), (24, 16), (16, 24), (5, 1), (1, 9), (80, 300)]:
        with subtests.test(head_dim=head_dim, v_head_dim=v_head_dim):
            assert_right(kernel, random_qkv(33, 33, (4, 2), head_dim, v_head_dim, dtype), *piece_of(kind, 33, 33))


@each_kernel
@each_dtype
@each_ratio
def test_the_shares_of_all_pieces_add_up(kernel: Kernel, dtype: torch.dtype, heads: tuple[int, int]) -> None:
    """Queries that see 20 keys of one rank, all masked-in keys of another, and their own causally."""
    n, lengths = 40, (20, 30, 40)
    kinds = (PieceKind.FULL, PieceKind.MASKED, PieceKind.CAUSAL)
    pieces, masks = zip(*(piece_of(kind, n, m) for kind, m in zip(kinds, lengths, strict=True)), strict=True)
    allowed = np.concatenate(masks, 1)
    q, k, v = qkv = random_qkv(n, sum(lengths), heads, v_head_dim=12, dtype=dtype)
    dout = random_dout(qkv)
    merged = merged_of(qkv, allowed, dout)
    shares = [
        kernel.backward(q, keys, values, merged, piece, SCALE)
        for piece, keys, values in zip(pieces, k.split(lengths, 2), v.split(lengths, 2), strict=True)
    ]
    dqs, dks, dvs = zip(*shares, strict=True)
    found = KernelGradients(sum(dqs[1:], dqs[0]), torch.cat(dks, 2), torch.cat(dvs, 2))
    assert_near(found, truth(qkv, allowed, dout), dtype)


@each_kernel
@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_types_lose_at_most_twice_what_plain_attention_loses(
    kernel: Kernel, kind: PieceKind, dtype: torch.dtype
) -> None:
    """The root mean square error is bounded: plain attention keeps its output in float32, here it has a half dtype.

    A sharp softmax with few keys shows this most: single elements can have three times the error.
    """
    piece, allowed = piece_of(kind, 200, 200)
    if kind is PieceKind.MASKED:
        allowed[1, 0] = True  # plain attention has no result for a row that sees no key
    qkv = random_qkv(200, 200, (4, 4), 64, dtype=dtype)
    dout = random_dout(qkv)
    leaves = [x.clone().requires_grad_() for x in qkv]
    # Not the fused operator: its bfloat16 code kills the process on virtual CPUs that promise missing instructions.
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*leaves, attn_mask=torch.from_numpy(allowed), scale=SCALE)
    plain = torch.autograd.grad(out, leaves, dout)
    ours = kernel.backward(*qkv, merged_of(qkv, allowed, dout), piece, SCALE)
    for x, y, expected in zip(ours, plain, truth(qkv, allowed, dout), strict=True):
        error, plain_error = ((it.to(dtype).double() - expected).square().mean().sqrt() for it in (x, y))
        assert 0 < error <= 2 * plain_error


@each_kernel
def test_rows_that_see_nothing(subtests: pytest.Subtests, kernel: Kernel) -> None:
    """For any merged values, such rows give and get no gradient."""
    qkv = random_qkv(5, 9)
    piece, allowed = piece_of(PieceKind.MASKED, 5, 9)
    dout = random_dout(qkv)
    for value in (1.0, *ODD_VALUES):
        with subtests.test(value=value):
            dout[:, :, 1] = value
            merged = merged_of(qkv, allowed, dout)
            assert merged.lse[:, :, 1].isposinf().all()
            found = kernel.backward(*qkv, merged, piece, SCALE)
            assert torch.equal(found.dq[:, :, 1], torch.zeros(2, 2, 8))
            assert_near(found, truth(qkv, allowed, dout.nan_to_num(0.0, 0.0, 0.0)), dout.dtype)
    nowhere = np.zeros((5, 9), np.bool_)
    found = kernel.backward(*qkv, merged_of(qkv, nowhere, dout), piece._replace(allowed=nowhere), SCALE)
    assert [x.any().item() for x in found] == [False] * 3


@each_kernel
def test_rows_that_see_keys_of_other_pieces_only(kernel: Kernel) -> None:
    q, k, v = random_qkv(5, 9)
    piece, allowed = piece_of(PieceKind.MASKED, 5, 4)
    everything = np.concatenate([allowed, np.ones((5, 5), np.bool_)], 1)
    merged = merged_of((q, k, v), everything, random_dout((q, k, v)))
    assert merged.lse.isfinite().all()
    found = kernel.backward(q, k[:, :, :4], v[:, :, :4], merged, piece, SCALE)
    assert torch.equal(found.dq[:, :, 1], torch.zeros(2, 2, 8))


# NaN and infinity


def share_row_by_row(qkv: QKV, merged: Merged, allowed: Allowed) -> list[torch.Tensor]:
    """Attend each row alone to the keys that it sees, so that nothing else can reach it or those keys."""
    q, k, v, dout, out, lse = (x.double() for x in (*qkv, *merged))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for row, seen in enumerate(torch.from_numpy(allowed)):
        here = slice(row, row + 1)
        weights = (SCALE * (q[:, :, here] @ k[:, :, seen].mT) - lse[:, :, here, None]).exp()
        delta = (dout[:, :, here] * out[:, :, here]).sum(-1, keepdim=True)
        dscores = SCALE * weights * (dout[:, :, here] @ v[:, :, seen].mT - delta)
        dq[:, :, here] = dscores @ k[:, :, seen]
        dk[:, :, seen] += dscores.mT @ q[:, :, here]
        dv[:, :, seen] += weights.mT @ dout[:, :, here]
    return [dq, dk, dv]


def assert_reaches_only_what_sees_it(kernel: Kernel, qkv: QKV, dout: torch.Tensor, kind: PieceKind) -> None:
    piece, allowed = piece_of(kind, qkv[0].shape[2], qkv[1].shape[2])
    part = ReferenceKernel().forward(*qkv, piece, SCALE)
    lse = part.lse.masked_fill(part.lse == -torch.inf, torch.inf)
    merged = Merged(dout, part.out.to(dout.dtype), lse)
    found = kernel.backward(*qkv, merged, piece, SCALE)
    for x, expected in zip(found, share_row_by_row(qkv, merged, allowed), strict=True):
        # Lost elements are infinite or NaN, depending on the order of operations.
        lost = ~expected.isfinite()
        assert torch.equal(~x.isfinite(), lost)
        torch.testing.assert_close(x.double()[~lost], expected[~lost], rtol=1e-4, atol=1e-4)


@each_kernel
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_reach_only_what_sees_them(
    subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind, dtype: torch.dtype, value: float
) -> None:
    for n, column in [(1, 0), (6, 3), (40, 0), (40, 17), (40, 39)]:
        with subtests.test(n=n, column=column):
            for which in range(4):
                qkv = random_qkv(n, n, dtype=dtype)
                dout = random_dout(qkv)
                (*qkv, dout)[which][0, 1, column, 2] = value
                assert_reaches_only_what_sees_it(kernel, qkv, dout, kind)


@each_kernel
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
def test_odd_values_of_all_kinds_at_once(subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind) -> None:
    random = np.random.default_rng(0)
    for trial in range(12):
        with subtests.test(trial=trial):
            n = (4, 21, 64)[trial % 3]
            qkv = random_qkv(n, n)
            tensors = (*qkv, random_dout(qkv))
            for value in ODD_VALUES:
                x = tensors[trial % 4]
                x[torch.from_numpy(random.random(tuple(x.shape)) < 0.01)] = value
            assert_reaches_only_what_sees_it(kernel, qkv, tensors[3], kind)


@each_kernel
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
def test_odd_values_in_a_later_inner_block(subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind) -> None:
    for which in range(4):
        with subtests.test(which=which):
            qkv = random_qkv(530, 530, batch=1)
            dout = random_dout(qkv)
            (*qkv, dout)[which][:, :, 520] = torch.nan
            assert_reaches_only_what_sees_it(kernel, qkv, dout, kind)


@each_kernel
def test_odd_values_before_and_after_a_cut(subtests: pytest.Subtests, kernel: Kernel) -> None:
    for row in (0, 255, 256, CUT - 1):
        with subtests.test(row=row):
            for which in range(4):
                qkv = random_qkv(CUT, CUT, batch=1)
                dout = random_dout(qkv)
                (*qkv, dout)[which][0, 1, row, 2] = torch.nan
                assert_reaches_only_what_sees_it(kernel, qkv, dout, PieceKind.CAUSAL)


@each_dtype
@pytest.mark.parametrize("kind", IN_RUNS)
@each_ratio
def test_runs_of_keys(
    dtype: torch.dtype, kind: PieceKind, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_short_runs(monkeypatch)
    qkv = random_qkv(*IN_RUNS[kind], heads, v_head_dim=5, dtype=dtype)
    assert_right(SdpaCpu(), qkv, *piece_of(kind, *IN_RUNS[kind]))


def test_odd_values_in_runs_of_keys(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    take_short_runs(monkeypatch)
    for row in (0, RUN - 1, RUN, 2 * RUN):
        with subtests.test(row=row):
            for which in range(4):
                qkv = random_qkv(*IN_RUNS[PieceKind.CAUSAL])
                dout = random_dout(qkv)
                (*qkv, dout)[which][1, 1, row, 2] = torch.nan
                assert_reaches_only_what_sees_it(SdpaCpu(), qkv, dout, PieceKind.CAUSAL)


@each_kernel
@pytest.mark.parametrize("which", ["q", "k"])
def test_an_infinity_without_weight_reaches_only_what_sees_it(kernel: Kernel, which: str) -> None:
    """All scores of the row are -inf, so only one gradient shows it: dq for a key, dk for a query."""
    q, k, v = (x.abs() for x in random_qkv(530, 530, batch=1))
    {"q": q, "k": k}[which][:, :, 260] = -torch.inf
    assert_reaches_only_what_sees_it(kernel, (q, k, v), random_dout((q, k, v)), PieceKind.CAUSAL)


# Memory


@each_kernel
@each_kind
@each_dtype
def test_strided_views(subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind, dtype: torch.dtype) -> None:
    n = m = 40
    piece, allowed = piece_of(kind, n, m)
    qkv = random_qkv(n, m, (4, 2), dtype=dtype)
    dout = random_dout(qkv)
    merged = merged_of(qkv, allowed, dout)
    expected = truth(qkv, allowed, dout)
    tensors = [*qkv, *merged[:2], merged.lse.unsqueeze(-1)]
    views = {
        "(batch, seq, heads, dim)": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
        "dim not last": [x.mT.contiguous().mT for x in tensors],
        "batch last": [x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) for x in tensors],
        "every other": [x.repeat_interleave(2, -1)[..., ::2] for x in tensors],
        "rows of a longer tensor": [torch.cat([x, x], 2)[:, :, n:] for x in tensors],
        "every other row": [x.repeat_interleave(2, 2)[:, :, ::2] for x in tensors],
    }
    for name, (q, k, v, a, b, lse) in views.items():
        with subtests.test(name):
            assert all(torch.equal(x, y) for x, y in zip(tensors, (q, k, v, a, b, lse), strict=True)), name
            assert_near(kernel.backward(q, k, v, Merged(a, b, lse.squeeze(-1)), piece, SCALE), expected, dtype)


@each_kernel
@each_kind
@each_dtype
def test_the_gradient_of_a_sum_has_no_strides(
    subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind, dtype: torch.dtype
) -> None:
    piece, allowed = piece_of(kind, 40, 40)
    for v_head_dim in (1, 8, 12):
        with subtests.test(v_head_dim=v_head_dim):
            qkv = random_qkv(40, 40, (4, 2), v_head_dim=v_head_dim, dtype=dtype)
            dout = torch.ones((), dtype=dtype).expand(2, 4, 40, v_head_dim)
            assert set(dout.stride()) == {0}
            found = kernel.backward(*qkv, merged_of(qkv, allowed, dout), piece, SCALE)
            assert_near(found, truth(qkv, allowed, dout), dtype)


@each_kernel
@each_kind
def test_nothing_given_is_written_to(kernel: Kernel, kind: PieceKind) -> None:
    piece, allowed = piece_of(kind, 40, 40)
    allowed.flags.writeable = False
    qkv = random_qkv(40, 40, (4, 2))
    merged = merged_of(qkv, allowed, random_dout(qkv))
    before = [x.clone() for x in (*qkv, *merged)]
    kernel.backward(*qkv, merged, piece, SCALE)
    assert all(torch.equal(x, y) for x, y in zip((*qkv, *merged), before, strict=True))


@pytest.mark.parametrize("kind", [PieceKind.FULL, PieceKind.CAUSAL])
def test_the_reference_holds_few_scores(kind: PieceKind) -> None:
    n = 1100
    qkv = random_qkv(n, n, (4, 1), batch=1)
    piece, allowed = piece_of(kind, n, n)
    dout = random_dout(qkv)
    merged = merged_of(qkv, allowed, dout)
    assert 4 * n * n > 2 * MAX_SCORES
    with LargestTensor() as largest:
        found = ReferenceKernel().backward(*qkv, merged, piece, SCALE)
    assert largest.numel <= MAX_SCORES
    assert_near(found, truth(qkv, allowed, dout), dout.dtype)


def test_the_reference_in_blocks_of_any_height(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in PieceKind:
        with subtests.test(kind=kind):
            for max_scores in (1, 700, 2000):
                monkeypatch.setattr(ringspan.kernels.reference, "MAX_SCORES", max_scores)
                assert_right(ReferenceKernel(), random_qkv(33, 33, (4, 2)), *piece_of(kind, 33, 33))


def test_the_fused_operator_repeats_no_keys_and_values() -> None:
    qkv = random_qkv(64, 4000, (4, 1), head_dim=64, batch=1)
    piece, allowed = piece_of(PieceKind.FULL, 64, 4000)
    merged = merged_of(qkv, allowed, random_dout(qkv))
    with LargestTensor() as largest:
        SdpaCpu().backward(*qkv, merged, piece, SCALE)
    assert largest.numel == qkv[1].numel()

"""The kernels that run on a CPU, against dense float64 attention."""

import math

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ringspan.kernels.reference
import ringspan.kernels.sdpa_cpu
from ringspan.errors import UnsupportedError
from ringspan.kernels import KERNELS, Kernel, KernelRequest, choose_kernel
from ringspan.kernels.base import Merged
from ringspan.kernels.reference import MAX_SCORES, ReferenceKernel
from ringspan.kernels.sdpa_cpu import FOLD_KEYS, FOLD_ROWS, SdpaCpu
from ringspan.kernels.softmax import Partial, accumulator_dtype
from ringspan.program.pieces import PieceKind
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


def assert_right(part: Partial, qkv: QKV, allowed: Allowed) -> None:
    """The expected result in the accumulator dtype, for every dtype of the input."""
    out, lse = oracle.dense_attention(*(x.double().numpy() for x in qkv), allowed, SCALE)
    dtype = accumulator_dtype(qkv[0].dtype)
    torch.testing.assert_close(part.out, torch.from_numpy(out).to(dtype))
    torch.testing.assert_close(part.lse, torch.from_numpy(lse).to(dtype))


@each_kernel
@each_dtype
@pytest.mark.parametrize("kind", PieceKind)
@each_ratio
def test_pieces_of_any_size(
    subtests: pytest.Subtests, kernel: Kernel, dtype: torch.dtype, kind: PieceKind, heads: tuple[int, int]
) -> None:
    for n, m in SIZES[kind]:
        with subtests.test(n=n, m=m):
            qkv = random_qkv(n, m, heads, dtype=dtype)
            piece, allowed = piece_of(kind, n, m)
            assert_right(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@pytest.mark.parametrize("kind", PieceKind)
def test_pieces_of_several_inner_blocks(kernel: Kernel, kind: PieceKind) -> None:
    qkv = random_qkv(775, 775, (2, 1), batch=1)
    piece, allowed = piece_of(kind, 775, 775)
    assert_right(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@each_dtype
@pytest.mark.parametrize("kind", PieceKind)
def test_any_head_dim_and_v_head_dim(
    subtests: pytest.Subtests, kernel: Kernel, dtype: torch.dtype, kind: PieceKind
) -> None:
    for head_dim, v_head_dim in [(1, 1), (7, 7), (24, 16), (16, 24), (5, 1), (1, 9), (80, 300)]:
        with subtests.test(head_dim=head_dim, v_head_dim=v_head_dim):
            qkv = random_qkv(33, 33, (4, 2), head_dim, v_head_dim, dtype)
            piece, allowed = piece_of(kind, 33, 33)
            assert_right(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_types_lose_at_most_twice_what_plain_attention_loses(kernel: Kernel, dtype: torch.dtype) -> None:
    qkv = random_qkv(200, 200, (4, 4), 64, dtype=dtype)
    piece, allowed = piece_of(PieceKind.CAUSAL, 200, 200)
    truth = torch.from_numpy(oracle.dense_attention(*(x.double().numpy() for x in qkv), allowed, SCALE)[0])
    # Not the fused operator: its bfloat16 code kills the process on virtual CPUs that promise missing instructions.
    with sdpa_kernel(SDPBackend.MATH):
        plain = scaled_dot_product_attention(*qkv, is_causal=True, scale=SCALE)
    ours = kernel.forward(*qkv, piece, SCALE).out.to(dtype)
    error, plain_error = ((out.double() - truth).abs().max() for out in (ours, plain))
    assert error <= 2 * plain_error
    assert plain_error > 0


@each_kernel
def test_nothing_to_attend(kernel: Kernel) -> None:
    """A batch of size 0."""
    piece, _ = piece_of(PieceKind.CAUSAL, 5, 5)
    part = kernel.forward(*(torch.zeros(0, 2, 5, 8) for _ in range(3)), piece, 1.0)
    assert part.out.shape == (0, 2, 5, 8)
    assert part.lse.shape == (0, 2, 5)


@each_kernel
def test_zeros_beside_v_are_not_kept(kernel: Kernel) -> None:
    """They are as long as results for a narrower v until the backward pass."""
    q, k, v = random_qkv(5, 5, head_dim=64, v_head_dim=8)
    piece, _ = piece_of(PieceKind.FULL, 5, 5)
    out, lse = kernel.forward(q, k, v, piece, SCALE)
    gradients = kernel.backward(q, k, v, Merged(out, out, lse), piece, SCALE)
    for x, like in zip((out, *gradients), (v, q, k, v), strict=True):
        assert x.untyped_storage().nbytes() == x.nbytes == like.nbytes


@each_kernel
def test_rows_that_see_nothing(kernel: Kernel) -> None:
    q, k, v = random_qkv(5, 9)
    piece, _ = piece_of(PieceKind.MASKED, 5, 9)
    part = kernel.forward(q, k, v, piece, SCALE)
    assert torch.equal(part.out[:, :, 1], torch.zeros(2, 2, 8))
    assert torch.equal(part.lse[:, :, 1], torch.full((2, 2), -torch.inf))
    nowhere = piece._replace(allowed=np.zeros((5, 9), np.bool_))
    part = kernel.forward(q, k, v, nowhere, SCALE)
    assert torch.equal(part.out, torch.zeros(2, 2, 5, 8))
    assert torch.equal(part.lse, torch.full((2, 2, 5), -torch.inf))


@each_kernel
def test_a_read_only_mask(kernel: Kernel) -> None:
    qkv = random_qkv(5, 9)
    piece, allowed = piece_of(PieceKind.MASKED, 5, 9)
    allowed.flags.writeable = False
    assert_right(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


# NaN and infinity


def plain_attention(qkv: QKV, allowed: Allowed) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each row alone to the keys that it sees, so that nothing else can reach it."""
    q, k, v = (x.double() for x in qkv)
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for row, seen in enumerate(torch.from_numpy(allowed)):
        scores = SCALE * (q[:, :, row, None] @ k[:, :, seen].mT)
        has_weight = scores.ne(-torch.inf).any(-1, keepdim=True)
        weights = torch.where(has_weight, torch.softmax(scores, -1), 0.0)
        out[:, :, row] = (weights @ v[:, :, seen]).squeeze(-2)
        lse[:, :, row] = torch.logsumexp(scores, -1).squeeze(-1)
    return out, lse


def assert_plain(part: Partial, qkv: QKV, allowed: Allowed) -> None:
    out, lse = plain_attention(qkv, allowed)
    torch.testing.assert_close(part.out, out.to(part.out.dtype), equal_nan=True)
    # A sum with an infinite score is infinite or NaN, depending on the order of operations.
    lost = ~(lse.isfinite() | lse.isneginf())
    torch.testing.assert_close(part.lse.masked_fill(lost, 0.0), lse.masked_fill(lost, 0.0).to(part.lse.dtype))
    assert not part.lse[lost].isfinite().any()
    assert not part.lse[lost].isneginf().any()


@each_kernel
@pytest.mark.parametrize("kind", PieceKind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_reach_only_rows_that_see_them(
    subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind, dtype: torch.dtype, value: float
) -> None:
    for n, column in [(1, 0), (6, 3), (40, 0), (40, 17), (40, 39)]:
        with subtests.test(n=n, column=column):
            piece, allowed = piece_of(kind, n, n)
            for which in (0, 1, 2):
                qkv = random_qkv(n, n, dtype=dtype)
                qkv[which][0, 1, column, 2] = value
                assert_plain(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
def test_odd_values_in_a_later_inner_block(kernel: Kernel, kind: PieceKind) -> None:
    piece, allowed = piece_of(kind, 530, 530)
    q, k, v = random_qkv(530, 530)
    expected = ReferenceKernel().forward(q, k, v, piece, SCALE)
    v[:, :, 520] = torch.nan
    out = kernel.forward(q, k, v, piece, SCALE).out
    sees_it = torch.from_numpy(allowed[:, 520])
    torch.testing.assert_close(out[:, :, ~sees_it], expected.out[:, :, ~sees_it])
    assert out[:, :, sees_it].isnan().all()


@each_kernel
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
def test_odd_values_of_all_kinds_at_once(subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind) -> None:
    random = np.random.default_rng(0)
    for trial in range(12):
        with subtests.test(trial=trial):
            n = (4, 21, 64)[trial % 3]
            piece, allowed = piece_of(kind, n, n)
            qkv = random_qkv(n, n)
            for x in qkv[1:]:
                for value in ODD_VALUES:
                    x[torch.from_numpy(random.random(tuple(x.shape[:3])) < 0.1), trial % 8] = value
            assert_plain(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_before_and_after_a_cut(subtests: pytest.Subtests, kernel: Kernel, value: float) -> None:
    piece, allowed = piece_of(PieceKind.CAUSAL, CUT, CUT)
    for column in (0, 255, 256, CUT - 1):
        with subtests.test(column=column):
            for which in (0, 1, 2):
                qkv = random_qkv(CUT, CUT, batch=1)
                qkv[which][0, 1, column, 2] = value
                assert_plain(kernel.forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
@pytest.mark.parametrize("keys", [slice(0, 256), slice(256, None)], ids=["early", "late"])
def test_scores_that_are_all_minus_infinity_on_one_side_of_a_cut(kernel: Kernel, keys: slice) -> None:
    piece, allowed = piece_of(PieceKind.CAUSAL, CUT, CUT)
    q, k, v = random_qkv(CUT, CUT, batch=1)
    q = q.abs()
    k[:, :, keys] = -torch.inf
    assert_plain(kernel.forward(q, k, v, piece, SCALE), (q, k, v), allowed)


@each_dtype
@pytest.mark.parametrize("kind", IN_RUNS)
@each_ratio
def test_runs_of_keys(
    dtype: torch.dtype, kind: PieceKind, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_short_runs(monkeypatch)
    qkv = random_qkv(*IN_RUNS[kind], heads, v_head_dim=5, dtype=dtype)
    piece, allowed = piece_of(kind, *IN_RUNS[kind])
    assert_right(SdpaCpu().forward(*qkv, piece, SCALE), qkv, allowed)


@pytest.mark.parametrize("kind", IN_RUNS)
@pytest.mark.parametrize("value", ODD_VALUES)
def test_odd_values_in_runs_of_keys(
    subtests: pytest.Subtests, kind: PieceKind, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_short_runs(monkeypatch)
    piece, allowed = piece_of(kind, *IN_RUNS[kind])
    for row in (0, RUN - 1, RUN, 69):
        with subtests.test(row=row):
            for which in (0, 1, 2):
                qkv = random_qkv(*IN_RUNS[kind])
                qkv[which][1, 1, row, 2] = value
                assert_plain(SdpaCpu().forward(*qkv, piece, SCALE), qkv, allowed)


@pytest.mark.parametrize("kind", IN_RUNS)
@pytest.mark.parametrize("keys", [slice(0, RUN), slice(RUN, 2 * RUN), slice(2 * RUN, None), slice(0, None)])
def test_a_run_whose_scores_are_all_minus_infinity(
    kind: PieceKind, keys: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_short_runs(monkeypatch)
    piece, allowed = piece_of(kind, *IN_RUNS[kind])
    q, k, v = random_qkv(*IN_RUNS[kind])
    q = q.abs()
    k[:, :, keys] = -torch.inf
    assert_plain(SdpaCpu().forward(q, k, v, piece, SCALE), (q, k, v), allowed)


@each_kernel
@pytest.mark.parametrize("m", [1, 3, 8, 9, 16, 33, 512, 513, 530, 1030])
def test_no_nan_is_lost_however_the_keys_fall_into_blocks(subtests: pytest.Subtests, kernel: Kernel, m: int) -> None:
    """If every score is NaN or -inf, the CPU operator treats the row as one that sees no key."""
    piece, allowed = piece_of(PieceKind.FULL, 3, m)
    for nans in (slice(None), slice(0, 1), slice(-1, None), slice(0, 512), slice(512, None)):
        with subtests.test(nans=nans):
            for others in (1.0, -torch.inf):
                q, k, v = random_qkv(3, m)
                q = q.abs()
                k[:] = others
                k[:, :, nans] = torch.nan
                assert_plain(kernel.forward(q, k, v, piece, SCALE), (q, k, v), allowed)


@each_kernel
def test_scores_that_are_all_minus_infinity_have_no_weight(kernel: Kernel) -> None:
    q, k, v = random_qkv(4, 9)
    piece, _ = piece_of(PieceKind.FULL, 4, 9)
    part = kernel.forward(q.abs(), torch.full_like(k, -torch.inf), v, piece, SCALE)
    assert torch.equal(part.out, torch.zeros_like(q))
    assert torch.equal(part.lse, torch.full((2, 2, 4), -torch.inf))


@each_kernel
def test_a_log_sum_exp_of_zero_is_nothing_special(kernel: Kernel) -> None:
    q, k, v = random_qkv(3, 1)
    piece, _ = piece_of(PieceKind.FULL, 3, 1)
    part = kernel.forward(torch.zeros_like(q), k, v, piece, SCALE)
    assert torch.equal(part.lse, torch.zeros(2, 2, 3))
    torch.testing.assert_close(part.out, v.expand(2, 2, 3, 8))


# Work


@pytest.mark.parametrize(
    ("kind", "n", "m", "expected"),
    [
        (PieceKind.CAUSAL, 256, 256, [(256, 256)]),
        (PieceKind.CAUSAL, 383, 383, [(383, 383)]),
        (PieceKind.CAUSAL, 384, 384, [(384, 256), (128, 128)]),
        (PieceKind.CAUSAL, 512, 512, [(512, 256), (256, 256)]),
        (PieceKind.CAUSAL, 513, 513, [(513, 513)]),
        (PieceKind.CAUSAL, 768, 768, [(768, 768)]),
        (PieceKind.CAUSAL, 1024, 1024, [(1024, 768), (256, 256)]),
        (PieceKind.CAUSAL, 4096, 4096, [(4096, 3840), (256, 256)]),
        (PieceKind.CAUSAL, 4608, 4608, [(4608, 2304), (2304, 2304)]),
        (PieceKind.CAUSAL, 6656, 6656, [(6656, 2304), (4352, 2304), (2048, 1792), (256, 256)]),
        (PieceKind.FULL, 767, 4096, [(767, 4096)]),
        (PieceKind.FULL, 768, 3071, [(768, 3071)]),
        (PieceKind.FULL, 768, 3072, [(768, 2048), (768, 1024)]),
        (PieceKind.MASKED, 768, 4096, [(768, 4096)]),
    ],
)
def test_what_the_operator_is_asked_for(
    kind: PieceKind, n: int, m: int, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_for(monkeypatch)
    piece, _ = piece_of(kind, n, m)
    part = SdpaCpu().forward(*random_qkv(n, m, (1, 1), head_dim=128, batch=1), piece, SCALE)
    assert asked == [(1, *shape) for shape in expected]
    assert part.out.shape == (1, 1, n, 128)


@pytest.mark.parametrize(("head_dim", "num_keys"), [(64, 4096), (128, 2048), (256, 1024), (1024, 512)])
def test_a_run_has_a_megabyte_of_keys(head_dim: int, num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_for(monkeypatch)
    m = num_keys + 1024
    qkv = random_qkv(768, m, (1, 1), head_dim=head_dim, batch=1)
    SdpaCpu().forward(*qkv, piece_of(PieceKind.FULL, 768, m)[0], SCALE)
    assert asked[0] == (1, 768, num_keys)


def test_late_runs_are_added_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_for(monkeypatch)
    qkv = random_qkv(1024, 3072, (16, 8), head_dim=128, batch=1)
    SdpaCpu().forward(*qkv, piece_of(PieceKind.FULL, 1024, 3072)[0], SCALE)
    assert asked == [(16, 1024, 2048), *[(8, 1024, 1024)] * 2]


def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record the heads, queries and keys of each later call."""
    asked = []

    def operator(q: torch.Tensor, k: torch.Tensor, *args: object, **kwargs: object) -> object:
        asked.append((q.shape[1], q.shape[2], k.shape[2]))
        return real(q, k, *args, **kwargs)

    real = ringspan.kernels.sdpa_cpu._operator
    monkeypatch.setattr(ringspan.kernels.sdpa_cpu, "_operator", operator)
    return asked


# Memory


@each_kernel
@pytest.mark.parametrize("kind", PieceKind)
@each_dtype
def test_strided_views(subtests: pytest.Subtests, kernel: Kernel, kind: PieceKind, dtype: torch.dtype) -> None:
    n = m = 40
    piece, allowed = piece_of(kind, n, m)
    qkv = random_qkv(n, m, (4, 2), dtype=dtype)
    views = {
        "(batch, seq, heads, dim)": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv],
        "dim not last": [x.mT.contiguous().mT for x in qkv],
        "every other": [x.repeat_interleave(2, -1)[..., ::2] for x in qkv],
        "rows of a longer tensor": [torch.cat([x, x], 2)[:, :, n:] for x in qkv],
    }
    for name, strided in views.items():
        with subtests.test(name):
            assert all(torch.equal(x, view) for x, view in zip(qkv, strided, strict=True)), name
            assert_right(kernel.forward(*strided, piece, SCALE), qkv, allowed)
    one_for_all = [x[:1].expand(2, -1, -1, -1) for x in qkv]
    assert_right(kernel.forward(*one_for_all, piece, SCALE), tuple(one_for_all), allowed)


@pytest.mark.parametrize("n", [1, 2, FOLD_ROWS, FOLD_ROWS + 1])
@pytest.mark.parametrize("m", [FOLD_KEYS - 1, FOLD_KEYS, 600])
def test_few_rows_against_many_keys(subtests: pytest.Subtests, n: int, m: int) -> None:
    """Sizes at which the heads of a group become rows of one head, and sizes just below."""
    piece, allowed = piece_of(PieceKind.FULL, n, m)
    for heads in [(6, 2), (4, 1), (4, 4)]:
        with subtests.test(heads=heads):
            q, k, v = random_qkv(n, m, heads)
            for queries in (q, q.transpose(1, 2).contiguous().transpose(1, 2)):
                assert_right(SdpaCpu().forward(queries, k, v, piece, SCALE), (q, k, v), allowed)


@pytest.mark.parametrize("kind", [PieceKind.FULL, PieceKind.CAUSAL])
def test_the_reference_holds_few_scores(kind: PieceKind) -> None:
    n = 1100
    qkv = random_qkv(n, n, (4, 1), batch=1)
    piece, allowed = piece_of(kind, n, n)
    assert 4 * n * n > 2 * MAX_SCORES
    with LargestTensor() as largest:
        part = ReferenceKernel().forward(*qkv, piece, SCALE)
    assert largest.numel <= MAX_SCORES
    assert_right(part, qkv, allowed)


def test_the_reference_in_blocks_of_any_height(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in PieceKind:
        with subtests.test(kind=kind):
            piece, allowed = piece_of(kind, 33, 33)
            qkv = random_qkv(33, 33, (4, 2))
            for max_scores in (1, 700, 2000):
                monkeypatch.setattr(ringspan.kernels.reference, "MAX_SCORES", max_scores)
                assert_right(ReferenceKernel().forward(*qkv, piece, SCALE), qkv, allowed)


@each_kernel
def test_keys_and_values_are_never_copied(subtests: pytest.Subtests, kernel: Kernel) -> None:
    """K and V are not repeated for the heads that share them; only q, out and some scores are allocated."""
    for n in (1, 200):
        with subtests.test(n=n):
            q, k, v = random_qkv(n, 4000, (4, 1), head_dim=64, batch=1)
            piece, _ = piece_of(PieceKind.FULL, n, 4000)
            with LargestTensor() as largest:
                kernel.forward(q, k, v, piece, SCALE)
            assert largest.numel < (k.numel() if n == 1 else MAX_SCORES)
            assert largest.numel >= q.numel()


# Choice

CPU = KernelRequest(torch.device("cpu"), torch.float32, 64, 64)
CUDA = CPU._replace(device=torch.device("cuda"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (CPU, "sdpa_cpu"),
        (CPU._replace(head_dim=7, v_head_dim=300, dtype=torch.float16), "sdpa_cpu"),
        (CPU._replace(dtype=torch.float8_e4m3fn), "reference"),
        (CPU._replace(device=torch.device("meta")), "reference"),
        (CUDA, "sdpa_flash"),
        (CUDA._replace(dtype=torch.float32), "sdpa_efficient"),
        (CUDA._replace(head_dim=192, v_head_dim=128), "sdpa_efficient"),
        (CUDA._replace(dtype=torch.float64), "reference"),
        (CUDA._replace(head_dim=65), "reference"),
    ],
)
def test_auto_takes_the_first_that_can(request_: KernelRequest, name: str) -> None:
    assert choose_kernel("auto", request_).name == name


def test_a_name_takes_that_kernel() -> None:
    assert {
        kernel.name: choose_kernel(kernel.name, CUDA if "cpu" not in kernel.name else CPU) for kernel in KERNELS
    } == {kernel.name: kernel for kernel in KERNELS}


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(UnsupportedError) as raised:
        choose_kernel("fast", CPU)
    assert str(raised.value) == (
        "kernel='fast': there is no such kernel; use one of auto, sdpa_flash, sdpa_efficient, sdpa_cudnn, sdpa_cpu, "
        "reference"
    )


def test_a_refusal_gives_the_reason_and_who_could() -> None:
    with pytest.raises(UnsupportedError) as raised:
        choose_kernel("sdpa_flash", CPU)
    assert str(raised.value) == (
        "kernel='sdpa_flash': cannot compute torch.float32 on cpu, head_dim=64, v_head_dim=64: sdpa_flash takes only "
        "tensors on a CUDA device; use auto, or sdpa_cpu or reference"
    )


def test_a_request_that_no_kernel_serves_gives_every_reason() -> None:
    with pytest.raises(
        UnsupportedError, match=r"torch.int64 on cpu.*sdpa_cpu takes only float64.*; convert the tensors"
    ):
        choose_kernel("auto", CPU._replace(dtype=torch.int64))


def test_names_differ() -> None:
    names = [kernel.name for kernel in KERNELS]
    assert len({*names, "auto"}) == len(names) + 1
    assert math.prod(name.isidentifier() for name in names)

"""The arithmetic of one piece against dense attention over the same pairs, and the laws of merging."""

import tracemalloc
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import ringspan.simulate.blockwise as blockwise
from ringspan.program.pieces import Piece, PieceKind
from ringspan.schedule import Block
from ringspan.simulate.blockwise import KV_ROWS, Q_ROWS, Blockwise
from support.oracle import dense_attention, dense_gradients

OUT, DQ, DKV = Block("out", 0), Block("dq", 0), Block("dkv", 0)
SCALE = 0.3
DIM, V_DIM = 4, 3
TOLERANCE = {np.float16: 1e-5, np.float32: 1e-5, np.float64: 1e-12}

kinds = pytest.mark.parametrize("kind", PieceKind)
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)
head_counts = pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (3, 1)])
broken_values = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])

# --- merge ---

Partial = tuple[np.ndarray, np.ndarray]


@st.composite
def partials(draw: st.DrawFn) -> Partial:
    """Draw (out, lse) of four queries, some of which may see no key."""
    out = draw(arrays(np.float64, (4, 2), elements=st.floats(-100, 100)))
    lse = draw(arrays(np.float64, (4, 1), elements=st.floats(-800, 800) | st.just(-np.inf)))
    return np.where(np.isneginf(lse), 0, out), lse


def merged(*parts: Partial) -> Partial:
    into = tuple(x.copy() for x in parts[0])
    for part in parts[1:]:
        Blockwise(into[0].dtype, SCALE).merge(OUT, into, part)
    return into  # type: ignore[return-value]


def assert_close(a: Partial, b: Partial) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-10)


@settings(deadline=None)
@given(partials(), partials())
def test_merge_is_commutative_to_the_bit(a: Partial, b: Partial) -> None:
    for x, y in zip(merged(a, b), merged(b, a), strict=True):
        np.testing.assert_array_equal(x, y)


@settings(deadline=None)
@given(partials(), partials(), partials())
def test_merge_is_associative_to_rounding(a: Partial, b: Partial, c: Partial) -> None:
    assert_close(merged(merged(a, b), c), merged(a, merged(b, c)))


@settings(deadline=None)
@given(partials(), partials())
def test_merge_weighs_by_the_exponential_of_lse(a: Partial, b: Partial) -> None:
    out, lse = merged(a, b)
    np.testing.assert_allclose(lse, np.logaddexp(a[1], b[1]), rtol=1e-12, atol=1e-12)
    seen = ~np.isneginf(lse[:, 0])
    shares = [np.exp(part[1][seen] - lse[seen]) for part in (a, b)]
    np.testing.assert_allclose(out[seen], shares[0] * a[0][seen] + shares[1] * b[0][seen], rtol=1e-10, atol=1e-10)
    np.testing.assert_array_equal(out[~seen], 0)


@settings(deadline=None)
@given(partials())
def test_a_new_sum_changes_nothing_on_either_side(a: Partial) -> None:
    nothing = Blockwise(np.float64, SCALE).new_sum(OUT, ((4, 2), (4, 1)))
    for both in (merged(a, nothing), merged(nothing, a)):
        for x, y in zip(both, a, strict=True):
            np.testing.assert_array_equal(x, y)


@dtypes
def test_sums_of_nothing_merge_to_nothing(dtype: type) -> None:
    sum_dtype = np.result_type(dtype, np.float32)
    nothing = Blockwise(sum_dtype, SCALE).new_sum(OUT, ((4, 2), (4, 1)))
    out, lse = merged(nothing, nothing)
    assert out.dtype == lse.dtype == sum_dtype
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("block", [DQ, DKV])
def test_gradients_merge_by_addition(block: Block) -> None:
    arithmetic = Blockwise(np.float64, SCALE)
    into = arithmetic.new_sum(block, ((2, 3), (2, 1)))
    for part in ((np.full((2, 3), 2.0), np.ones((2, 1))), (np.full((2, 3), 3.0), np.ones((2, 1)))):
        arithmetic.merge(block, into, part)
    np.testing.assert_array_equal(into[0], 5)
    np.testing.assert_array_equal(into[1], 2)


@broken_values
def test_merge_keeps_a_broken_row_to_itself(value: float) -> None:
    a = np.full((2, 1), 1.0), np.zeros((2, 1))
    b = np.array([[2.0], [value]]), np.array([[0.0], [value]])
    out, lse = merged(a, b)
    assert (out[0, 0], lse[0, 0]) == pytest.approx((1.5, np.log(2)))
    assert not np.isfinite(out[1, 0])


# --- attend and attend_grad ---


class Case(NamedTuple):
    """A tile with one piece, and the mask of the whole tile."""

    piece: Piece
    allowed: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray

    def attended(self) -> Partial:
        """Attend the tile; return (out, lse)."""
        arithmetic = self.arithmetic()
        *lead, rows, _ = self.q.shape
        out = arithmetic.new_sum(OUT, ((*lead, rows, V_DIM), (*lead, rows, 1)))
        arithmetic.attend(self.piece, (self.q,), (self.k, self.v), out)
        return out  # type: ignore[return-value]

    def gradients(self, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, ...]:
        """Differentiate the tile; return (dq, dk, dv)."""
        arithmetic = self.arithmetic()
        dq = arithmetic.new_sum(DQ, (self.q.shape,))
        dkv = arithmetic.new_sum(DKV, (self.k.shape, self.v.shape))
        arithmetic.attend_grad(self.piece, (self.q, self.dout, out, lse), (self.k, self.v), dq, dkv)
        return (*dq, *dkv)

    def arithmetic(self) -> Blockwise:
        return Blockwise(np.result_type(self.q.dtype, np.float32), SCALE)

    def dense(self) -> tuple[np.ndarray, np.ndarray]:
        return dense_attention(self.q, self.k, self.v, self.allowed, SCALE)

    def dense_gradients(self) -> tuple[np.ndarray, ...]:
        return dense_gradients(self.q, self.k, self.v, self.allowed, self.dout, SCALE)


def make_case(
    kind: PieceKind,
    height: int,
    width: int,
    *,
    dtype: type = np.float64,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    batch: tuple[int, ...] = (),
    rows: tuple[int, ...] | None = None,
    seed: int = 0,
) -> Case:
    """The piece lies inside its tile, with two rows and three columns before it and one of each after it."""
    rng = np.random.default_rng(seed)
    width = height if kind.is_triangle else width
    inside = {
        PieceKind.FULL: np.ones((height, width), bool),
        PieceKind.CAUSAL: np.tri(height, width, dtype=bool),
        PieceKind.ANTICAUSAL: np.tri(height, width, dtype=bool).T,
        PieceKind.MASKED: rng.random((height, width)) < 0.4,
    }[kind]
    allowed = np.pad(inside, ((2, 1), (3, 1)))
    if rows is not None:
        allowed = np.isin(np.arange(batch[0]), rows)[:, None, None] & allowed
    piece = Piece(slice(2, 2 + height), slice(3, 3 + width), kind, inside if kind is PieceKind.MASKED else None, rows)

    def normal(heads: int, length: int, dim: int) -> np.ndarray:
        return rng.standard_normal((*batch, heads, length, dim)).astype(dtype)

    return Case(
        piece,
        allowed,
        q=normal(num_heads, height + 3, DIM),
        k=normal(num_kv_heads, width + 4, DIM),
        v=normal(num_kv_heads, width + 4, V_DIM),
        dout=normal(num_heads, height + 3, V_DIM),
    )


def assert_agrees(case: Case, tolerance: float) -> None:
    out, lse = case.attended()
    expected_out, expected_lse = case.dense()
    np.testing.assert_allclose(out, expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse[..., 0], expected_lse, rtol=tolerance, atol=tolerance)
    for grad, expected in zip(case.gradients(out, lse), case.dense_gradients(), strict=True):
        np.testing.assert_allclose(grad, expected, rtol=tolerance, atol=tolerance * max(1, np.abs(expected).max()))


@kinds
@dtypes
@head_counts
def test_a_piece_agrees_with_dense_attention(kind: PieceKind, dtype: type, num_heads: int, num_kv_heads: int) -> None:
    case = make_case(kind, 9, 7, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, batch=(2,))
    assert_agrees(case, TOLERANCE[dtype])


@settings(deadline=None)
@given(
    st.sampled_from(PieceKind), st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5),
    st.sampled_from([(1, 1), (4, 2)]), st.integers(0, 99),
)  # fmt: skip
def test_any_piece_in_blocks_of_any_size(
    kind: PieceKind, height: int, width: int, q_rows: int, kv_rows: int, heads: tuple[int, int], seed: int
) -> None:
    case = make_case(kind, height, width, num_heads=heads[0], num_kv_heads=heads[1], seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "Q_ROWS", q_rows)
        patch.setattr(blockwise, "KV_ROWS", kv_rows)
        assert_agrees(case, 1e-12)


@kinds
@pytest.mark.parametrize(
    ("height", "width"), [(Q_ROWS, KV_ROWS), (2 * Q_ROWS + 3, 20), (20, KV_ROWS + 5), (3 * Q_ROWS - 1, KV_ROWS + 5)]
)
def test_pieces_larger_than_a_block(kind: PieceKind, height: int, width: int) -> None:
    assert_agrees(make_case(kind, height, width, num_heads=2, num_kv_heads=1), 1e-12)


@kinds
def test_a_piece_of_some_batch_rows_leaves_the_others_alone(kind: PieceKind) -> None:
    case = make_case(kind, 6, 5, num_heads=4, num_kv_heads=2, batch=(4,), rows=(0, 3))
    assert_agrees(case, 1e-12)
    out, lse = case.attended()
    assert not out[1:3].any()
    assert np.isneginf(lse[1:3]).all()


def test_pieces_add_up() -> None:
    """A tile that is cut in two gives the same result, and rows outside the second piece keep the first piece's."""
    whole = make_case(PieceKind.FULL, 8, 10, num_heads=2)
    left, right = (whole.piece._replace(kv=slice(*ends)) for ends in ((3, 7), (7, 13)))
    arithmetic = whole.arithmetic()
    out = whole._replace(piece=left).attended()
    arithmetic.attend(right._replace(q=slice(2, 6)), (whole.q,), (whole.k, whole.v), out)
    first_only = whole._replace(piece=left).attended()
    np.testing.assert_array_equal(out[0][:, 6:], first_only[0][:, 6:])
    arithmetic.attend(right._replace(q=slice(6, 10)), (whole.q,), (whole.k, whole.v), out)
    assert_close(out, whole.attended())


@dtypes
def test_sums_keep_their_own_dtype(dtype: type) -> None:
    case = make_case(PieceKind.CAUSAL, 6, 6, dtype=dtype)
    out, lse = case.attended()
    expected = np.result_type(dtype, np.float32)
    assert {x.dtype for x in (out, lse, *case.gradients(out, lse))} == {expected}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_scores_do_not_overflow(dtype: type) -> None:
    case = make_case(PieceKind.CAUSAL, 6, 6, dtype=dtype)
    case = case._replace(q=case.q * dtype(1e4))
    out, lse = case.attended()
    expected_out, expected_lse = case.dense()
    np.testing.assert_allclose(out, expected_out, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse[..., 0], expected_lse, rtol=1e-5)
    assert all(np.isfinite(grad).all() for grad in case.gradients(out, lse))


@kinds
def test_memory_does_not_grow_with_the_piece(kind: PieceKind) -> None:
    case = make_case(kind, 6 * Q_ROWS, 4 * KV_ROWS, dtype=np.float32)
    out = case.attended()
    dq, dkv = (np.zeros_like(case.q),), (np.zeros_like(case.k), np.zeros_like(case.v))
    runs = {
        "attend": lambda: case.arithmetic().attend(case.piece, (case.q,), (case.k, case.v), out),
        "attend_grad": lambda: case.arithmetic().attend_grad(
            case.piece, (case.q, case.dout, *out), (case.k, case.v), dq, dkv
        ),
    }
    for name, run in runs.items():
        tracemalloc.start()
        run()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5 * Q_ROWS * KV_ROWS * 4, name


# --- NaN and infinity ---


@broken_values
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
@pytest.mark.parametrize("name", ["k", "v"])
def test_a_broken_key_reaches_only_the_queries_that_see_it(kind: PieceKind, name: str, value: float) -> None:
    clean = make_case(kind, 9, 9, num_heads=2, num_kv_heads=1)
    broken = with_value(clean, name, value, row=7)
    sees = clean.allowed[:, 7]
    assert sees.any()
    assert not sees[2:-1].all()
    out, lse = clean.attended()
    broken_out, broken_lse = broken.attended()
    np.testing.assert_allclose(broken_out[:, ~sees], out[:, ~sees], atol=1e-12)
    np.testing.assert_allclose(broken_lse[:, ~sees], lse[:, ~sees], atol=1e-12)
    if name == "v" or np.isnan(value):
        assert not np.isfinite(broken_out[:, sees]).all(axis=-1).any()

    dq, dk, dv = clean.gradients(out, lse)
    broken_dq, broken_dk, broken_dv = broken.gradients(broken_out, broken_lse)
    np.testing.assert_allclose(broken_dq[:, ~sees], dq[:, ~sees], atol=1e-12)
    # Keys seen by none of the queries that see the broken one.
    apart = ~clean.allowed[sees].any(axis=0)
    np.testing.assert_allclose(broken_dk[:, apart], dk[:, apart], atol=1e-12)
    np.testing.assert_allclose(broken_dv[:, apart], dv[:, apart], atol=1e-12)


@broken_values
@pytest.mark.parametrize("kind", [PieceKind.CAUSAL, PieceKind.MASKED])
@pytest.mark.parametrize("name", ["q", "dout"])
def test_a_broken_query_reaches_only_itself_and_the_keys_it_sees(kind: PieceKind, name: str, value: float) -> None:
    clean = make_case(kind, 9, 9, num_heads=2, num_kv_heads=1)
    broken = with_value(clean, name, value, row=5)
    others = np.arange(clean.q.shape[-2]) != 5
    sees = clean.allowed[5]
    assert sees.any()
    assert not sees[3:-1].all()
    out, lse = clean.attended()
    broken_out, broken_lse = broken.attended()
    np.testing.assert_array_equal(broken_out[:, others], out[:, others])

    dq, dk, dv = clean.gradients(out, lse)
    broken_dq, broken_dk, broken_dv = broken.gradients(broken_out, broken_lse)
    np.testing.assert_allclose(broken_dq[:, others], dq[:, others], atol=1e-12)
    np.testing.assert_allclose(broken_dk[:, ~sees], dk[:, ~sees], atol=1e-12)
    np.testing.assert_allclose(broken_dv[:, ~sees], dv[:, ~sees], atol=1e-12)
    assert not np.isfinite(broken_dq[:, 5]).all()


def with_value(case: Case, name: str, value: float, row: int) -> Case:
    x = getattr(case, name).copy()
    x[..., row, 1] = value
    return case._replace(**{name: x})


def test_a_query_whose_keys_are_all_hidden_is_left_alone() -> None:
    case = make_case(PieceKind.MASKED, 5, 5)
    allowed = case.allowed.copy()
    allowed[4] = False
    case = case._replace(allowed=allowed, piece=case.piece._replace(allowed=allowed[2:-1, 3:-1]))
    out, lse = case.attended()
    assert not out[:, 4].any()
    assert np.isneginf(lse[:, 4]).all()
    dq, _, _ = case.gradients(out, lse)
    assert not dq[:, 4].any()
    assert_agrees(case, 1e-12)


@kinds
def test_scores_of_minus_infinity_have_no_weight(kind: PieceKind) -> None:
    case = make_case(kind, 5, 5)
    case = case._replace(q=np.ones_like(case.q), k=np.full_like(case.k, -np.inf))
    out, lse = case.attended()
    assert not out.any()
    assert np.isneginf(lse).all()
    _, dk, dv = case.gradients(out, lse)
    assert not dk.any()
    assert not dv.any()

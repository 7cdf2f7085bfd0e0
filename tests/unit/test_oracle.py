"""All other tests trust the oracle, so it is checked against loops, differences and matrices written by hand."""

import math

import numpy as np
import pytest

from support import oracle

RNG_SEED = 20


def picture(rows):
    """A mask drawn by hand: one string for each query, x where it may attend."""
    return np.array([[mark == "x" for mark in row] for row in rows])


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (("full",), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (("causal",), ["x...", "xx..", "xxx.", "xxxx"]),
        (("sliding_window", 1, 0), ["x...", "xx..", ".xx.", "..xx"]),
        (("sliding_window", 0, 2), ["xxx.", ".xxx", "..xx", "...x"]),
        (("sliding_window", None, 0), ["x...", "xx..", "xxx.", "xxxx"]),
        (("sliding_window", 1, None), ["xxxx", "xxxx", ".xxx", "..xx"]),
        (("sliding_window", None, None), ["xxxx", "xxxx", "xxxx", "xxxx"]),
        (("prefix", 2), ["xx..", "xx..", "xxx.", "xxxx"]),
        (("prefix", 0), ["x...", "xx..", "xxx.", "xxxx"]),
        (("documents", (1, 3)), ["x...", ".xxx", ".xxx", ".xxx"]),
        (("documents", (2, 0, 2)), ["xx..", "xx..", "..xx", "..xx"]),
        (("frame_causal", 2, 0), ["xx..", "xx..", "xxxx", "xxxx"]),
        (("frame_causal", 2, 1), ["x...", "xxx.", "xxx.", "xxxx"]),
        (("and", ("documents", (2, 2)), ("causal",)), ["x...", "xx..", "..x.", "..xx"]),
        (("or", ("sliding_window", 0, 0), ("prefix", 1)), ["x...", "xx..", "xxx.", "xxxx"]),
        (("or", ("documents", (3, 1)), ("causal",)), ["xxx.", "xxx.", "xxx.", "xxxx"]),
    ],
)
def test_masks_as_drawn_by_hand(spec, rows):
    np.testing.assert_array_equal(oracle.dense_mask(spec, range(4), range(4)), picture(rows))


def test_frames_after_a_text_of_three():
    rows = ["xxx....", "xxx....", "xxx....", "xxxxx..", "xxxxx..", "xxxxxxx", "xxxxxxx"]
    np.testing.assert_array_equal(oracle.dense_mask(("frame_causal", 2, 3), range(7), range(7)), picture(rows))


def test_masks_speak_of_positions_not_of_indices():
    np.testing.assert_array_equal(oracle.dense_mask(("causal",), [5, 2], [2, 3, 9]), picture(["xx.", "x.."]))
    np.testing.assert_array_equal(oracle.dense_mask(("documents", (3, 3)), [5, 2], [0, 3]), picture([".x", "x."]))


def test_rows_of_a_batch_have_their_own_masks():
    spec = ("and", ("per_row", (("full",), ("documents", (1, 2)))), ("causal",))
    mask = oracle.dense_mask(spec, range(3), range(3))
    np.testing.assert_array_equal(mask, [picture(["x..", "xx.", "xxx"]), picture(["x..", ".x.", ".xx"])])


def test_unknown_masks_and_positions_past_the_documents_are_refused():
    with pytest.raises(ValueError, match="no such mask"):
        oracle.dense_mask(("diagonal",), range(2), range(2))
    with pytest.raises(IndexError):
        oracle.dense_mask(("documents", (1, 1)), range(3), range(3))


def attend_by_loops(q, k, v, allowed, scale):
    """Attend one batch entry and one head at a time, one number at a time; allowed is (batch, q, kv)."""
    batch, heads, q_len, dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros((batch, heads, q_len, v.shape[-1]))
    lse = np.full((batch, heads, q_len), -np.inf)
    for b, h, i in np.ndindex(batch, heads, q_len):
        weights = {}
        for j in range(k.shape[2]):
            if allowed[b, i, j]:
                weights[j] = math.exp(scale * sum(q[b, h, i, d] * k[b, h // group, j, d] for d in range(dim)))
        total = sum(weights.values())
        for j, weight in weights.items():
            out[b, h, i] += weight / total * v[b, h // group, j]
        if weights:
            lse[b, h, i] = math.log(total)
    return out, lse


def random_case(kv_heads=2, batch=2, q_len=4, kv_len=5):
    """Four heads, dim 3 and v_dim 2; the second query of the first batch entry sees no key."""
    rng = np.random.default_rng(RNG_SEED)
    q = rng.standard_normal((batch, 4, q_len, 3))
    k = rng.standard_normal((batch, kv_heads, kv_len, 3))
    v = rng.standard_normal((batch, kv_heads, kv_len, 2))
    allowed = rng.random((batch, q_len, kv_len)) < 0.6
    allowed[0, 1] = False
    return q, k, v, allowed


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_attention_is_the_triple_loop(kv_heads, scale):
    q, k, v, allowed = random_case(kv_heads)
    out, lse = oracle.dense_attention(q, k, v, allowed, scale)
    expected_out, expected_lse = attend_by_loops(q, k, v, allowed, scale or 3**-0.5)
    np.testing.assert_allclose(out, expected_out, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-15)
    assert out.dtype == lse.dtype == np.float64


def test_a_row_without_keys_is_zero_and_minus_infinity():
    q, k, v, allowed = random_case()
    out, lse = oracle.dense_attention(q, k, v, allowed)
    assert (out[0, :, 1] == 0).all()
    assert np.isneginf(lse[0, :, 1]).all()
    assert np.isfinite(lse[1]).all()
    no_keys, no_lse = oracle.dense_attention(q, k[:, :, :0], v[:, :, :0], allowed[:, :, :0])
    assert (no_keys == 0).all()
    assert np.isneginf(no_lse).all()


def test_large_scores_do_not_overflow():
    out, lse = oracle.dense_attention([[1e4]], [[1.0], [2.0]], [[3.0], [5.0]], [[True, True]])
    np.testing.assert_array_equal(out, [[5.0]])
    np.testing.assert_array_equal(lse, [2e4])


def test_plain_matrices_and_one_mask_for_all_rows():
    q, k, v, allowed = random_case(kv_heads=4)
    out, lse = oracle.dense_attention(q, k, v, allowed[1])
    one_out, one_lse = oracle.dense_attention(q[0, 3], k[0, 3], v[0, 3], allowed[1])
    assert one_out.shape == (4, 2)
    np.testing.assert_allclose(one_out, out[0, 3], rtol=1e-14)
    np.testing.assert_allclose(one_lse, lse[0, 3], rtol=1e-14)


def test_rows_of_masks_belong_to_the_first_batch_axis():
    rng = np.random.default_rng(RNG_SEED)
    q, k, v = (rng.standard_normal((2, 3, 1, 4, 5)) for _ in range(3))
    allowed = oracle.dense_mask(("per_row", (("causal",), ("full",))), range(4), range(4))
    out, lse = oracle.dense_attention(q, k, v, allowed)
    for row in range(2):
        row_out, row_lse = oracle.dense_attention(q[row], k[row], v[row], allowed[row])
        np.testing.assert_allclose(out[row], row_out, rtol=1e-14)
        np.testing.assert_allclose(lse[row], row_lse, rtol=1e-14)


def test_masks_and_heads_that_do_not_fit_are_refused():
    q, k, v, allowed = random_case()
    with pytest.raises(ValueError, match="for q with a batch axis"):
        oracle.dense_attention(q[0], k[0], v[0], allowed)
    with pytest.raises(ValueError, match="3 heads cannot share 2 KV heads evenly"):
        oracle.dense_attention(q[:, :3], k, v, allowed)


def central_differences(loss, x, step=1e-5):
    """Differentiate loss() numerically: move one number of x at a time and back."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        value = x[index]
        x[index] = value + step
        above = loss()
        x[index] = value - step
        below = loss()
        x[index] = value
        gradient[index] = (above - below) / (2 * step)
    return gradient


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_gradients_are_the_central_differences(kv_heads, scale):
    q, k, v, allowed = random_case(kv_heads)
    dout = np.random.default_rng(RNG_SEED + 1).standard_normal((*q.shape[:-1], v.shape[-1]))

    def loss():
        return (oracle.dense_attention(q, k, v, allowed, scale)[0] * dout).sum()

    gradients = oracle.dense_gradients(q, k, v, allowed, dout, scale)
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.shape == x.shape
        np.testing.assert_allclose(gradient, central_differences(loss, x), rtol=1e-6, atol=1e-8)
    assert (gradients[0][0, :, 1] == 0).all()  # the query without keys


def test_gradients_of_plain_matrices():
    q, k, v, allowed = random_case(kv_heads=4)
    dout = np.random.default_rng(RNG_SEED + 1).standard_normal((*q.shape[:-1], v.shape[-1]))
    batched = oracle.dense_gradients(q, k, v, allowed, dout)
    plain = oracle.dense_gradients(q[1, 2], k[1, 2], v[1, 2], allowed[1], dout[1, 2])
    for whole, part in zip(batched, plain, strict=True):
        np.testing.assert_allclose(part, whole[1, 2], rtol=1e-13)

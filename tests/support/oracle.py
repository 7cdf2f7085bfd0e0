"""The oracle: dense float64 attention, its gradients and its masks, by the plain definitions.

Nothing here comes from the library. Every mask is spelled out pair by pair, the whole matrix of probabilities is kept,
and the backward pass is the textbook formula over that matrix. Masks are described by tuples:

    ("full",)  ("causal",)  ("sliding_window", left, right)  ("prefix", n)  ("documents", (length, ...))
    ("frame_causal", tokens_per_frame, start)  ("chunks", size, start)  ("blocks", ((start, stop), ...))
    ("and", a, b)  ("or", a, b)  ("per_row", (spec, ...))
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
MaskSpec = tuple[Any, ...]


def dense_mask(spec: MaskSpec, q_positions: npt.ArrayLike, kv_positions: npt.ArrayLike) -> Bools:
    """Return who may attend to whom: bool (q, kv), with a leading row axis if the spec has a per_row."""
    q, kv = np.meshgrid(np.asarray(q_positions, np.int64), np.asarray(kv_positions, np.int64), indexing="ij")
    return np.asarray(_may_attend(spec, q, kv), np.bool_)


def _may_attend(spec: MaskSpec, q: Ints, kv: Ints) -> Any:
    """The definitions, for arrays q and kv of one shape with the two positions of every pair."""
    everywhere = np.ones(q.shape, np.bool_)
    match spec:
        case ("full",):
            return everywhere
        case ("causal",):
            return kv <= q
        case ("sliding_window", left, right):
            not_too_old = everywhere if left is None else q - left <= kv
            not_too_new = everywhere if right is None else kv <= q + right
            return not_too_old & not_too_new
        case ("prefix", n):
            return (kv < n) | (kv <= q)
        case ("documents", lengths):
            document_of = np.array([number for number, length in enumerate(lengths) for _ in range(length)], np.int64)
            return document_of[q] == document_of[kv]
        case ("frame_causal", tokens_per_frame, start):
            own_or_earlier_frame = (kv - start) // tokens_per_frame <= (q - start) // tokens_per_frame
            return (kv < start) | ((q >= start) & own_or_earlier_frame)
        case ("chunks", size, start):
            return np.floor((q - start) / size) == np.floor((kv - start) / size)
        case ("blocks", spans):
            inside = [(start <= q) & (q < stop) & (start <= kv) & (kv < stop) for start, stop in spans]
            return np.logical_or.reduce(inside)
        case ("and", a, b):
            return _may_attend(a, q, kv) & _may_attend(b, q, kv)
        case ("or", a, b):
            return _may_attend(a, q, kv) | _may_attend(b, q, kv)
        case ("per_row", specs):
            return np.stack([_may_attend(row, q, kv) for row in specs])
    raise ValueError(f"no such mask: {spec}")


def dense_attention(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    allowed: npt.ArrayLike,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Output (..., heads, q, v_dim) and natural log-sum-exp (..., heads, q); a row without keys gives 0 and -inf.

    q is (..., heads, q, dim), k and v (..., kv_heads, kv, dim); heads that share a KV head are neighbours. A plain
    (seq, dim) works too. With a softcap c each score s is c · tanh(s / c). `allowed` is (q, kv), or (rows, q, kv) with
    one mask for each entry of the first batch axis.
    """
    q, k, v = _float64(q, k, v)
    group = _group_size(q, k)
    probs, lse = _probabilities(_capped_scores(q, _repeat_heads(k, group), scale, softcap), allowed)
    return probs @ _repeat_heads(v, group), lse


def dense_gradients(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    allowed: npt.ArrayLike,
    dout: npt.ArrayLike,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv): dS = P * (dP - rowsum(dP * P)) for out = softmax(S) v = P v.

    Where S = c · tanh(R / c), dR = dS / cosh²(R / c).
    """
    q, k, v, dout = _float64(q, k, v, dout)
    group = _group_size(q, k)
    k_all, v_all = _repeat_heads(k, group), _repeat_heads(v, group)
    probs, _ = _probabilities(_capped_scores(q, k_all, scale, softcap), allowed)
    dprobs = dout @ v_all.swapaxes(-1, -2)
    dscores = probs * (dprobs - (dprobs * probs).sum(-1, keepdims=True)) * _scale(q, scale)
    if softcap is not None:
        dscores = dscores / np.cosh(q @ k_all.swapaxes(-1, -2) * _scale(q, scale) / softcap) ** 2
    dk_all = dscores.swapaxes(-1, -2) @ q
    dv_all = probs.swapaxes(-1, -2) @ dout
    return dscores @ k_all, _sum_groups(dk_all, group), _sum_groups(dv_all, group)


def _capped_scores(q: Array, k: Array, scale: float | None, softcap: float | None) -> Array:
    scores = np.asarray(q @ k.swapaxes(-1, -2) * _scale(q, scale))
    return scores if softcap is None else softcap * np.tanh(scores / softcap)


def _probabilities(scores: Array, allowed: npt.ArrayLike) -> tuple[Array, Array]:
    """Return the matrix P (..., q, kv), exactly 0 where not allowed, and the log-sum-exp of each row."""
    scores = np.where(_align(allowed, scores.ndim), scores, -np.inf)
    peak = scores.max(-1, keepdims=True, initial=-np.inf)
    peak = np.where(np.isneginf(peak), 0.0, peak)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    sees_a_key = total > 0
    total = np.where(sees_a_key, total, 1.0)
    return weights / total, np.where(sees_a_key, peak + np.log(total), -np.inf)[..., 0]


def _align(allowed: npt.ArrayLike, ndim: int) -> Bools:
    """Reshape the mask to the axes of the scores: (q, kv) unchanged, rows before all other axes."""
    allowed = np.asarray(allowed, np.bool_)
    if allowed.ndim == 2:
        return allowed
    if allowed.ndim != 3 or ndim < 4:
        raise ValueError(f"allowed {allowed.shape} must be (q, kv), or (rows, q, kv) for q with a batch axis")
    rows, q_len, kv_len = allowed.shape
    return allowed.reshape(rows, *[1] * (ndim - 3), q_len, kv_len)


def _scale(q: Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _float64(*arrays: npt.ArrayLike) -> tuple[Array, ...]:
    return tuple(np.asarray(x, np.float64) for x in arrays)


def _group_size(q: Array, k: Array) -> int:
    """Return how many neighbouring query heads share one KV head."""
    if q.ndim == 2:
        return 1
    num_heads, num_kv_heads = int(q.shape[-3]), int(k.shape[-3])
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} KV heads evenly")
    return num_heads // num_kv_heads


def _repeat_heads(x: Array, group: int) -> Array:
    return x if group == 1 else np.repeat(x, group, axis=-3)


def _sum_groups(x: Array, group: int) -> Array:
    """Invert the repetition: each KV head sums the gradients of its query heads."""
    if group == 1:
        return x
    *batch, heads, seq, dim = x.shape
    return np.asarray(x.reshape(*batch, heads // group, group, seq, dim).sum(-3))

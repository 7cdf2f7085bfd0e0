"""What is the exact result? Plain attention over all pairs of tokens in float64.

It is the definition, softmax(q·kᵀ/√d)·v with hidden scores at -inf: no blocks, no running maximum, no merge. It shares
only `mask.allowed`, the definition of a mask, with the code that it checks.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringspan.mask import Mask
from ringspan.span import Positions

Array = npt.NDArray[np.floating]

TOLERANCE = 1e-5  # for float32 results; plain float32 attention has an error of about 1e-6
ROWS_AT_A_TIME = 512  # rows of scores, so that 8192 tokens take 32 MiB


@dataclass(frozen=True, slots=True)
class Check:
    """The largest difference of a result from the dense reference; None stands for NaN or infinity."""

    out_error: float | None
    lse_error: float | None
    is_verified: bool


def dense_attention(
    q: Array, k: Array, v: Array, mask: Mask, q_positions: Positions, kv_positions: Positions, dtype: npt.DTypeLike
) -> tuple[Array, Array]:
    """Compute out (heads, q, dim) and lse (heads, q) of q (heads, q, dim), k and v (kv_heads, kv, dim) in `dtype`."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    group = len(q) // len(k)
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], dtype)
    for start in range(0, len(q_positions), ROWS_AT_A_TIME):
        rows = slice(start, start + ROWS_AT_A_TIME)
        allowed = mask.allowed(q_positions[rows], kv_positions)
        for head in range(len(q)):
            scores = q[head, rows] @ k[head // group].T / math.sqrt(q.shape[-1])
            scores = np.where(allowed, scores, -np.inf)
            peak = scores.max(axis=-1, keepdims=True)
            peak[np.isneginf(peak)] = 0  # a row that sees no key: all weights are exp(-inf) = 0
            weights = np.exp(scores - peak)
            total = weights.sum(axis=-1, keepdims=True)
            sees_nothing = total == 0
            total[sees_nothing] = 1
            out[head, rows] = weights / total @ v[head // group]
            lse[head, rows] = np.where(sees_nothing, -np.inf, peak + np.log(total))[:, 0]
    return out, lse


def check(out: Array, lse: Array, true_out: Array, true_lse: Array) -> Check:
    """Compare a result with the dense result. Rows that see no key must have lse = -inf in both."""
    hidden = np.isneginf(true_lse)
    errors = _largest(out - true_out), _largest(lse[~hidden] - true_lse[~hidden])
    is_close = all(error is not None and error <= TOLERANCE for error in errors)
    return Check(*errors, is_verified=is_close and bool(np.isneginf(lse[hidden]).all()))


def _largest(difference: Array) -> float | None:
    largest = float(np.abs(difference).max(initial=0.0))
    return largest if math.isfinite(largest) else None

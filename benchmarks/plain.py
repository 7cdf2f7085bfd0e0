"""The baseline: causal attention of one head on one device, blockwise in NumPy, as written by hand.

It skips hidden blocks, masks only blocks on the diagonal and works in place. It has no ranks, masks, heads or NaN
handling. The best of a few block sizes is chosen on the machine at hand.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating]
BlockSize = tuple[int, int]

BLOCK_SIZES: tuple[BlockSize, ...] = ((128, 512), (256, 256), (256, 512), (512, 512), (512, 1024), (1024, 1024))


def attention(q: Array, k: Array, v: Array, block_size: BlockSize) -> tuple[Array, Array]:
    """Return out (seq, dim) and log-sum-exp (seq, 1) of q, k, v (seq, dim)."""
    seq_len, dim = q.shape
    out, lse = np.empty_like(v), np.empty((seq_len, 1), q.dtype)
    for top in range(0, seq_len, block_size[0]):
        rows = slice(top, min(top + block_size[0], seq_len))
        queries = q[rows] * q.dtype.type(dim**-0.5)
        peak = np.full((len(queries), 1), -np.inf, q.dtype)
        total = np.zeros_like(peak)
        acc = np.zeros_like(out[rows])
        for columns in _columns(rows, block_size[1]):
            scores = queries @ k[columns].T
            if columns.stop > top + 1:
                scores[_hidden(rows, columns)] = -np.inf
            new_peak = np.maximum(peak, scores.max(axis=1, keepdims=True))
            scores -= new_peak
            np.exp(scores, out=scores)
            decay = np.exp(peak - new_peak)
            total *= decay
            total += scores.sum(axis=1, keepdims=True)
            acc *= decay
            acc += scores @ v[columns]
            peak = new_peak
        out[rows] = acc / total
        lse[rows] = peak + np.log(total)
    return out, lse


def gradients(
    q: Array, k: Array, v: Array, out: Array, lse: Array, dout: Array, block_size: BlockSize
) -> tuple[Array, Array, Array]:
    """Return (dq, dk, dv); probabilities are recomputed from lse block by block."""
    scale = q.dtype.type(q.shape[1] ** -0.5)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    delta = (dout * out).sum(axis=1, keepdims=True)
    for top in range(0, len(q), block_size[0]):
        rows = slice(top, min(top + block_size[0], len(q)))
        queries = q[rows] * scale
        for columns in _columns(rows, block_size[1]):
            probs = queries @ k[columns].T
            probs -= lse[rows]
            if columns.stop > top + 1:
                probs[_hidden(rows, columns)] = -np.inf
            np.exp(probs, out=probs)
            dscores = dout[rows] @ v[columns].T
            dscores -= delta[rows]
            dscores *= probs
            dq[rows] += dscores @ k[columns]
            dk[columns] += dscores.T @ queries
            dv[columns] += probs.T @ dout[rows]
        dq[rows] *= scale
    return dq, dk, dv


def best_block_size(run: Callable[[BlockSize], object]) -> BlockSize:
    """Return the fastest of BLOCK_SIZES for this run, each timed three times in turn."""
    seconds = dict.fromkeys(BLOCK_SIZES, float("inf"))
    for _ in range(3):
        for block_size in BLOCK_SIZES:
            start = time.process_time()
            run(block_size)
            seconds[block_size] = min(seconds[block_size], time.process_time() - start)
    return min(BLOCK_SIZES, key=seconds.__getitem__)


def _columns(rows: slice, width: int) -> list[slice]:
    """Yield the blocks of keys that some of the rows see."""
    return [slice(left, min(left + width, rows.stop)) for left in range(0, rows.stop, width)]


def _hidden(rows: slice, columns: slice) -> npt.NDArray[np.bool_]:
    return np.arange(columns.start, columns.stop) > np.arange(rows.start, rows.stop)[:, None]

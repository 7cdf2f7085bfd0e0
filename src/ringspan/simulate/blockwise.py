"""How does the simulator compute attention of one piece in NumPy? With online softmax, block by block.

This is the arithmetic that the simulator gives to the executor. For any sequence length it allocates, for each head, a
few arrays of Q_ROWS × KV_ROWS scores and of Q_ROWS rows. A sum is a tuple of arrays (..., heads, seq, dim): (out, lse)
for "out", (dq,) for "dq", (dk, dv) for "dkv"; lse has a last dim of 1.

NaN and infinity are legal input: they reach only the rows that see them, without a warning.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.mask import Allowed
from ringspan.program.execute import Value
from ringspan.program.pieces import Piece, PieceKind
from ringspan.program.problem import Shape
from ringspan.schedule import ALL, Block

Array = npt.NDArray[np.floating]

# Small enough for the scores to stay in a core's cache, large enough to make the overhead of calls negligible.
Q_ROWS = 256
KV_ROWS = 512


class _Cell(NamedTuple):
    """One block of scores: its keys, and its part of the mask (None: all visible)."""

    kv: slice
    allowed: Allowed | None


class Blockwise:
    """Attention arithmetic in NumPy: sums in `dtype`, scores multiplied by `scale`, then capped by `softcap`."""

    def __init__(self, dtype: npt.DTypeLike, scale: float, softcap: float | None = None) -> None:
        self.dtype = np.dtype(dtype)
        self.scale = np.asarray(scale, self.dtype)
        self.softcap = None if softcap is None else np.asarray(softcap, self.dtype)

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        """Make an empty sum: out = 0 with lse = -inf, or zero gradients."""
        value = tuple(np.zeros(shape, self.dtype) for shape in shapes)
        if block.kind == "out":
            value[1].fill(-np.inf)
        return value

    def room(self, shapes: Sequence[Shape]) -> Value:
        """Allocate uninitialised arrays."""
        return tuple(np.empty(shape, self.dtype) for shape in shapes)

    @np.errstate(all="ignore")
    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place; partial outputs are weighted by their share of the softmax."""
        if block.kind != "out":
            for total, addend in zip(into, part, strict=True):
                total += addend
            return
        (out, lse), (part_out, part_lse) = into, part
        peak = _finite(np.maximum(lse, part_lse))
        weight, part_weight = np.exp(lse - peak), np.exp(part_lse - peak)
        total = weight + part_weight
        lse[...] = peak + np.log(total)
        total[total == 0] = 1
        out *= weight / total
        out += part_weight / total * part_out

    def merged(self, block: Block, parts: Sequence[Value]) -> Value:
        """Merge parts one after the other into a new sum."""
        first, *others = parts
        total = tuple(x.copy() for x in first)
        for part in others:
            self.merge(block, total, part)
        return total

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend the first keys of the queries; return (out, lse)."""
        rows = q[0].shape[:-1]
        out = self.new_sum(Block("out", ALL), ((*rows, kv[1].shape[-1]), (*rows, 1)))
        self.attend(piece, q, kv, out)
        return out

    @np.errstate(all="ignore")
    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool = False) -> None:  # noqa: ARG002
        """Attend the piece's keys and update the running (out, lse) of its queries."""
        for queries, keys, values, outs, lses in _batches(piece, *q, *kv, *out):
            group = queries.shape[-3] // keys.shape[-3]
            for rows, cells in _rows_of_cells(piece, group):
                block, *sums = (self._fold(x[..., rows, :], group) for x in (queries, outs, lses))
                block = block * self.scale
                running = _Running(*sums)
                for columns, allowed in cells:
                    k, v = (np.asarray(x[..., columns, :], self.dtype) for x in (keys, values))
                    running.take(self._capped(block @ k.swapaxes(-1, -2)), v, allowed)
                for total, result in zip((outs, lses), running.normalised(), strict=True):
                    view = total[..., rows, :]
                    view[...] = result.reshape(view.shape)

    @np.errstate(all="ignore")
    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Add the piece's share of dq, dk and dv, given the merged out and lse of its queries.

        With s = scale · q kᵀ: dv = pᵀ dout, ds = p · (dout vᵀ - delta), dq = scale · ds k, dk = dsᵀ (scale · q).
        With a softcap c, p = exp(c · tanh(s / c) - lse), and ds has the factor 1 - tanh²(s / c).
        """
        dq = dq or self.new_sum(Block("dq", ALL), (q_grad[0].shape,))
        dkv = dkv or self.new_sum(Block("dkv", ALL), tuple(x.shape for x in kv))
        for queries, douts, outs, lses, keys, values, dqs, dks, dvs in _batches(piece, *q_grad, *kv, *dq, *dkv):
            group = queries.shape[-3] // keys.shape[-3]
            for rows, cells in _rows_of_cells(piece, group):
                block, dout, out, lse = (self._fold(x[..., rows, :], group) for x in (queries, douts, outs, lses))
                block = block * self.scale
                delta = (dout * out).sum(axis=-1, keepdims=True)
                # A query with no score above -inf has lse = -inf; its probabilities are 0, not exp(inf).
                lse = np.where(np.isneginf(lse), np.inf, lse)
                block_dq = dqs[..., rows, :]
                for columns, allowed in cells:
                    k, v = (np.asarray(x[..., columns, :], self.dtype) for x in (keys, values))
                    probs = self._capped(block @ k.swapaxes(-1, -2))
                    slope = 1 if self.softcap is None else 1 - (probs / self.softcap) ** 2
                    np.exp(np.subtract(probs, lse, out=probs), out=probs)
                    dscores = dout @ v.swapaxes(-1, -2)
                    dscores -= delta
                    dscores *= probs * slope
                    if allowed is not None:
                        for hidden in (probs, dscores):
                            np.copyto(hidden, 0, where=~allowed)
                    seen_by = None if allowed is None else allowed.T
                    block_dq += self.scale * _product(dscores, k, allowed).reshape(block_dq.shape)
                    dks[..., columns, :] += _product(dscores.swapaxes(-1, -2), block, seen_by)
                    dvs[..., columns, :] += _product(probs.swapaxes(-1, -2), dout, seen_by)
        return dq, dkv

    def _capped(self, scores: Array) -> Array:
        return scores if self.softcap is None else self.softcap * np.tanh(scores / self.softcap)

    def _fold(self, x: Array, group: int) -> Array:
        """Reshape (..., heads, seq, dim) to (..., KV heads, group · seq, dim), so heads that share keys are rows."""
        *batch, heads, rows, dim = x.shape
        return np.asarray(x, self.dtype).reshape(*batch, heads // group, group * rows, dim)


class _Running:
    """The state of an online softmax: the largest score so far, the sum of weights relative to it, and their values."""

    def __init__(self, out: Array, lse: Array) -> None:
        self.peak = lse
        self.total = np.ones_like(lse)  # exp(lse - peak); where the peak is -inf it decays to 0
        self.out = out.copy()

    def take(self, scores: Array, v: Array, allowed: Allowed | None) -> None:
        if allowed is not None:
            np.copyto(scores, -np.inf, where=~allowed)
        peak = np.maximum(self.peak, scores.max(axis=-1, keepdims=True))
        base = _finite(peak)
        weights = np.exp(np.subtract(scores, base, out=scores), out=scores)
        decay = np.exp(self.peak - base)
        self.total = self.total * decay + weights.sum(axis=-1, keepdims=True)
        self.out *= decay
        self.out += _product(weights, v, allowed)
        self.peak = peak

    def normalised(self) -> tuple[Array, Array]:
        lse = _finite(self.peak) + np.log(self.total)
        return self.out / np.where(self.total == 0, 1, self.total), lse


def _product(weights: Array, x: Array, allowed: Allowed | None) -> Array:
    """Compute weights @ x so that NaN and infinity in x reach only the rows that see them (0 · NaN is NaN)."""
    if allowed is None or np.isfinite(x).all():
        return weights @ x
    is_broken = np.any(~np.isfinite(x), axis=(*range(x.ndim - 2), -1), keepdims=True)
    total = weights @ np.where(is_broken, 0, x)
    for row in np.flatnonzero(is_broken):
        total += np.where(allowed[:, row, None], weights[..., row, None] * x[..., row, None, :], 0)
    return total


def _finite(peak: Array) -> Array:
    """Replace -inf by 0 as the base to subtract: exp(-inf - 0) is 0, while exp(-inf - -inf) is NaN."""
    return np.where(np.isneginf(peak), 0, peak)


def _batches(piece: Piece, *arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield views of the arrays for each batch row of the piece, or for all rows at once."""
    if piece.rows is None:
        yield arrays
        return
    for row in piece.rows:
        yield tuple(x[row : row + 1] for x in arrays)


def _rows_of_cells(piece: Piece, group: int) -> Iterator[tuple[slice, Iterator[_Cell]]]:
    """Yield blocks of rows of the piece, each with the cells that the rows see."""
    height = piece.q.stop - piece.q.start
    for top in range(0, height, Q_ROWS):
        rows = range(top, min(top + Q_ROWS, height))
        yield slice(piece.q.start + rows.start, piece.q.start + rows.stop), _cells(piece, rows, group)


def _cells(piece: Piece, rows: range, group: int) -> Iterator[_Cell]:
    """Yield the cells of some rows, without those past the diagonal; masks are repeated for each head."""
    is_causal, is_anticausal = (piece.kind is kind for kind in (PieceKind.CAUSAL, PieceKind.ANTICAUSAL))
    reach = rows.stop if is_causal else piece.kv.stop - piece.kv.start
    for left in range(rows.start if is_anticausal else 0, reach, KV_ROWS):
        right = min(left + KV_ROWS, reach)
        allowed = None
        if is_causal and right > rows.start + 1:
            allowed = np.arange(left, right) <= np.asarray(rows)[:, None]
        elif is_anticausal and left < rows.stop - 1:
            allowed = np.arange(left, right) >= np.asarray(rows)[:, None]
        elif piece.allowed is not None:
            allowed = piece.allowed[rows.start : rows.stop, left:right]
        if allowed is not None:
            allowed = np.tile(allowed, (group, 1))
        yield _Cell(slice(piece.kv.start + left, piece.kv.start + right), allowed)

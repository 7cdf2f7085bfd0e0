"""Attention of one piece in NumPy: online softmax, block by block, exact to rounding.

This is the arithmetic the simulator gives to the executor. Nothing larger than one block of scores is ever made. A sum
is a tuple of arrays (..., heads, seq, dim): ("out": out, lse), ("dq": dq), ("dkv": dk, dv); lse has a last dim of 1.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.execute import Value
from ringspan.mask import Allowed
from ringspan.pieces import Piece, PieceKind
from ringspan.schedule import Block
from ringspan.tiles import Shape

Array = npt.NDArray[np.floating]

Q_ROWS = 512
KV_ROWS = 512


class _Cell(NamedTuple):
    """One block of scores: rows, columns, and the part of the mask that falls on it (None: all visible)."""

    q: slice
    kv: slice
    allowed: Allowed | None


class Blockwise:
    """NumPy sums in `dtype`, softmax scaled by `scale`."""

    def __init__(self, dtype: npt.DTypeLike, scale: float) -> None:
        self.dtype = np.dtype(dtype)
        self.scale = np.asarray(scale, self.dtype)

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        """Nothing summed yet: out = 0 with lse = -inf, or zero gradients."""
        value = tuple(np.zeros(shape, self.dtype) for shape in shapes)
        if block.kind == "out":
            value[1].fill(-np.inf)
        return value

    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place; partial attention is weighed by its share of the softmax."""
        if block.kind != "out":
            for total, addend in zip(into, part, strict=True):
                total += addend
            return
        (out, lse), (part_out, part_lse) = into, part
        peak = _finite(np.maximum(lse, part_lse))
        weight, part_weight = np.exp(lse - peak), np.exp(part_lse - peak)
        total = weight + part_weight
        share = np.divide(part_weight, total, out=np.zeros_like(total), where=total != 0)
        out += share * (part_out - out)
        with np.errstate(divide="ignore"):
            lse[...] = peak + np.log(total)

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value) -> None:
        """Forward: take the piece's keys into the running (out, lse) of its queries."""
        for (q_rows,), kv_rows, (out_rows, lse_rows) in _batches(piece, q, kv, out):
            keys, values = _by_group(kv_rows, 1)
            group = q_rows.shape[-3] // keys.shape[-4]
            (queries,), (sums, lses) = _by_group((q_rows,), group), _by_group((out_rows, lse_rows), group)
            for cells in _rows_of_cells(piece):
                rows = piece_rows(piece.q, cells[0].q)
                block = np.asarray(queries[..., rows, :], self.dtype) * self.scale
                state = _Running(sums[..., rows, :], lses[..., rows, :])
                for cell in cells:
                    columns = piece_rows(piece.kv, cell.kv)
                    state.take(block, keys[..., columns, :], values[..., columns, :], cell.allowed)
                sums[..., rows, :], lses[..., rows, :] = state.normalised()

    def attend_grad(self, piece: Piece, q_grad: Value, kv: Value, dq: Value, dkv: Value) -> None:
        """Backward: add the piece's share of dq, dk and dv, given the merged out and lse of its queries."""
        for q_rows, kv_rows, sums in _batches(piece, q_grad, kv, (*dq, *dkv)):
            keys, values = _by_group(kv_rows, 1)
            group = q_rows[0].shape[-3] // keys.shape[-4]
            queries, douts, outs, lses = _by_group(q_rows, group)
            (dqs,), (dks, dvs) = _by_group(sums[:1], group), _by_group(sums[1:], 1)
            for cells in _rows_of_cells(piece):
                rows = piece_rows(piece.q, cells[0].q)
                block, dout = (np.asarray(x[..., rows, :], self.dtype) for x in (queries, douts))
                delta = (dout * outs[..., rows, :]).sum(axis=-1, keepdims=True)
                lse = lses[..., rows, :]
                for cell in cells:
                    columns = piece_rows(piece.kv, cell.kv)
                    k, v = (np.asarray(x[..., columns, :], self.dtype) for x in (keys, values))
                    scores = self.scale * (block @ k.swapaxes(-1, -2))
                    if cell.allowed is not None:
                        scores = np.where(cell.allowed, scores, -np.inf)
                    # A query that sees no key has lse = -inf; its probabilities are 0, not exp(inf).
                    weights = np.exp(scores - np.where(np.isneginf(lse), np.inf, lse))
                    dscores = weights * (dout @ v.swapaxes(-1, -2) - delta) * self.scale
                    dqs[..., rows, :] += dscores @ k
                    dks[..., columns, :] += (dscores.swapaxes(-1, -2) @ block).sum(axis=-3, keepdims=True)
                    dvs[..., columns, :] += (weights.swapaxes(-1, -2) @ dout).sum(axis=-3, keepdims=True)


class _Running:
    """Online softmax of some queries: the largest score so far, the sum of weights relative to it, and their values."""

    def __init__(self, out: Array, lse: Array) -> None:
        self.peak = lse.copy()
        self.total = np.where(np.isneginf(lse), 0, 1).astype(lse.dtype)
        self.out = out.copy()

    def take(self, q: Array, k: Array, v: Array, allowed: Allowed | None) -> None:
        scores = q @ np.asarray(k, q.dtype).swapaxes(-1, -2)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        peak = np.maximum(self.peak, scores.max(axis=-1, keepdims=True))
        base = _finite(peak)
        np.exp(np.subtract(scores, base, out=scores), out=scores)
        decay = np.exp(self.peak - base)
        self.total = self.total * decay + scores.sum(axis=-1, keepdims=True)
        self.out *= decay
        self.out += _weighted(scores, np.asarray(v, q.dtype), allowed)
        self.peak = peak

    def normalised(self) -> tuple[Array, Array]:
        with np.errstate(divide="ignore"):
            lse = _finite(self.peak) + np.log(self.total)
        return np.divide(self.out, self.total, out=np.zeros_like(self.out), where=self.total != 0), lse


def _weighted(weights: Array, v: Array, allowed: Allowed | None) -> Array:
    """The product weights @ v, where a NaN or infinity in v reaches only the queries that see it (0 · NaN is NaN)."""
    if allowed is None or np.isfinite(v).all():
        return weights @ v
    broken = ~np.isfinite(v).min(axis=(*range(v.ndim - 2), -1))
    total = weights @ np.where(broken[:, None], 0, v)
    for column in np.flatnonzero(broken):
        seen = np.broadcast_to(allowed, weights.shape)[..., column, None]
        total += np.where(seen, weights[..., column, None] * v[..., column, None, :], 0)
    return total


def _finite(peak: Array) -> Array:
    """A base to subtract: exp(-inf - 0) is 0, while exp(-inf - -inf) is NaN."""
    return np.where(np.isneginf(peak), 0, peak)


def _batches(piece: Piece, *values: Value) -> Iterator[tuple[Value, ...]]:
    """Views of the values for each batch row the piece stands for, or of all of them at once."""
    if piece.rows is None:
        yield values
        return
    for row in piece.rows:
        yield tuple(tuple(x[row : row + 1] for x in value) for value in values)


def _by_group(value: Value, group: int) -> Value:
    """(..., heads, seq, dim) to (..., KV heads, group, seq, dim); a view, since only the head axis is split."""
    return tuple(x.reshape(*x.shape[:-3], x.shape[-3] // group, group, *x.shape[-2:]) for x in value)


def _rows_of_cells(piece: Piece) -> Iterator[list[_Cell]]:
    """The piece in blocks of scores, one list for each block of queries; invisible blocks are left out."""
    height, width = piece.q.stop - piece.q.start, piece.kv.stop - piece.kv.start
    is_causal = piece.kind is PieceKind.CAUSAL
    for top in range(0, height, Q_ROWS):
        bottom = min(top + Q_ROWS, height)
        reach = bottom if is_causal else width
        cells = []
        for left in range(0, reach, KV_ROWS):
            right = min(left + KV_ROWS, reach)
            allowed = piece.allowed[top:bottom, left:right] if piece.allowed is not None else None
            if is_causal and right > top + 1:
                allowed = np.arange(left, right) <= np.arange(top, bottom)[:, None]
            cells.append(_Cell(slice(top, bottom), slice(left, right), allowed))
        yield cells


def piece_rows(piece: slice, cell: slice) -> slice:
    """A cell's rows or columns as offsets into the tile."""
    return slice(piece.start + cell.start, piece.start + cell.stop)

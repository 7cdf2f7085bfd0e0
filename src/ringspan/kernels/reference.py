"""Attention by its definition, in plain torch: any device, any floating dtype, any head_dim.

It serves requests that the fused operators refuse, such as a softcap, and recomputes pieces in which NaN or infinity
made a fused operator wrong. Queries are taken a few rows at a time, so that the scores in memory stay small for long
pieces. Heads that share a KV head become rows of one matrix product, so K and V are never repeated.
"""

from collections.abc import Iterator

import torch

from ringspan.kernels.base import KernelGradients, KernelRequest, Merged
from ringspan.kernels.softmax import Partial, accumulator_dtype
from ringspan.program.pieces import Piece, PieceKind

MAX_SCORES = 2**21
"""Scores in one block of rows (8 MB in float32), unless a single row has more."""


class ReferenceKernel:
    """Computes in the accumulator dtype; NaN and infinity reach only the rows that see them.

    With a softcap c, a score s becomes c · tanh(s / c) before the mask and the softmax.
    """

    name = "reference"

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def refuses(self, request: KernelRequest) -> str | None:
        """Refuse dtypes that are not floating point, and reproducible mode."""
        if request.reproducible:
            return "gives bits that depend on the heads in a call and on the number of threads"
        return None if request.dtype.is_floating_point else "takes only floating-point dtypes"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        batch, heads, num_rows, _ = q.shape
        kv_heads = k.shape[1]
        dtype = accumulator_dtype(q.dtype)
        keys, values = k.to(dtype), v.to(dtype)
        out = torch.empty(batch, heads, num_rows, v.shape[-1], dtype=dtype, device=q.device)
        lse = torch.empty(batch, heads, num_rows, dtype=dtype, device=q.device)
        # (batch, KV heads, heads in a group, rows, …) are views, because only the head axis is split.
        queries, outs, lses = (torch.unflatten(x, 1, (kv_heads, -1)) for x in (q, out, lse))
        for rows, reach, visible in _row_blocks(piece, q, k):
            block = queries[..., rows, :].to(dtype) * scale
            part = _attend(block, keys[..., :reach, :], values[..., :reach, :], visible, self.softcap)
            outs[..., rows, :], lses[..., rows] = part
        return Partial(out, lse)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        """Compute the gradients of one piece in blocks of rows.

        With s = scale · q kᵀ and p = exp(s - lse): dv = pᵀ dout, ds = p · (dout vᵀ - delta), dq = scale · ds k,
        dk = dsᵀ (scale · q); delta = rowsum(dout · out). With a softcap c, p = exp(c · tanh(s / c) - lse), and ds has
        the factor 1 - tanh²(s / c).
        """
        kv_heads = k.shape[1]
        dtype = accumulator_dtype(q.dtype)
        keys, values = k.to(dtype), v.to(dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
        folded = [torch.unflatten(x, 1, (kv_heads, -1)) for x in (q, *merged[:2], merged.lse.unsqueeze(-1), dq)]
        for rows, reach, visible in _row_blocks(piece, q, k):
            block, dout, out, lse = (x[..., rows, :].to(dtype) for x in folded[:4])
            of_rows = Merged(dout, out, lse)
            of_keys = keys[..., :reach, :], values[..., :reach, :]
            part = _differentiate(block * scale, *of_keys, of_rows, visible, self.softcap)
            folded[4][..., rows, :] = part.dq * scale
            dk[..., :reach, :] += part.dk
            dv[..., :reach, :] += part.dv
        return KernelGradients(dq, dk, dv)


def _row_blocks(piece: Piece, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, int, torch.Tensor | None]]:
    """Yield blocks of rows: the rows, the number of keys they reach, and which of those keys are visible."""
    batch, heads, num_rows, _ = q.shape
    num_keys = k.shape[2]
    step = max(1, MAX_SCORES // max(1, batch * heads * num_keys))
    for top in range(0, num_rows, step):
        bottom = min(top + step, num_rows)
        reach = min(bottom, num_keys) if piece.kind is PieceKind.CAUSAL else num_keys
        yield slice(top, bottom), reach, _visible(piece, top, bottom, reach, q.device)


def _visible(piece: Piece, top: int, bottom: int, reach: int, device: torch.device) -> torch.Tensor | None:
    """Return which of the first `reach` keys rows top … bottom-1 see, bool (rows, keys); None if they see all."""
    if piece.kind is PieceKind.FULL:
        return None
    if piece.kind is PieceKind.CAUSAL:
        return torch.arange(reach, device=device) <= torch.arange(top, bottom, device=device)[:, None]
    if piece.kind is PieceKind.ANTICAUSAL:
        return torch.arange(reach, device=device) >= torch.arange(top, bottom, device=device)[:, None]
    assert piece.allowed is not None
    return torch.tensor(piece.allowed[top:bottom], device=device)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, softcap: float | None
) -> Partial:
    """Attend scaled queries (batch, KV heads, group, rows, dim) to k and v (batch, KV heads, keys, …)."""
    group_and_rows = q.shape[2:4]
    scores = q.flatten(2, 3) @ k.mT
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if visible is not None:
        visible = visible.repeat(group_and_rows[0], 1)
        scores.masked_fill_(~visible, -torch.inf)
    peak = scores.amax(-1, keepdim=True)
    # A row that sees no key has peak -inf. -inf - -inf would be NaN, while exp(-inf - 0) is 0.
    peak.masked_fill_(peak == -torch.inf, 0.0)
    weights = scores.sub_(peak).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _weighted(weights, v, visible) / total.masked_fill(total == 0, 1.0)
    lse = (peak + total.log()).squeeze(-1)
    return Partial(*(torch.unflatten(x, 2, group_and_rows) for x in (out, lse)))


def _differentiate(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    visible: torch.Tensor | None,
    softcap: float | None,
) -> KernelGradients:
    """Compute gradients of scaled queries (batch, KV heads, group, rows, dim), k and v (batch, KV heads, …)."""
    group_and_rows = q.shape[2:4]
    q, dout, out, lse = (x.flatten(2, 3) for x in (q, *merged))
    scores, slope = q @ k.mT, None
    if softcap is not None:
        scores.div_(softcap).tanh_()
        slope = 1 - scores * scores
        scores.mul_(softcap)
    weights = scores.sub_(lse).exp_()
    dscores = (dout @ v.mT).sub_((dout * out).sum(-1, keepdim=True)).mul_(weights)
    if slope is not None:
        dscores.mul_(slope)
    seen_by = None
    if visible is not None:
        visible = visible.repeat(group_and_rows[0], 1)
        seen_by = visible.mT
        weights.masked_fill_(~visible, 0.0)
        dscores.masked_fill_(~visible, 0.0)
    dq = torch.unflatten(_seen(dscores, k, visible), 2, group_and_rows)
    return KernelGradients(dq, _seen(dscores.mT, q, seen_by), _seen(weights.mT, dout, seen_by))


def _seen(weights: torch.Tensor, x: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Compute weights @ x so that NaN and infinity in x reach only the rows that see them (0 · NaN is NaN)."""
    if visible is None or bool((is_finite := x.isfinite()).all()):
        return weights @ x
    reached = visible.to(x.dtype) @ (~is_finite).to(x.dtype) > 0
    return torch.where(reached, weights @ x, weights @ x.masked_fill(~is_finite, 0.0))


def _weighted(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """Compute weights @ v so that NaN and infinity in v reach only the rows that see them (0 · NaN is NaN)."""
    if visible is None or bool((is_finite := v.isfinite()).all()):
        return weights @ v

    def reached(rows: torch.Tensor, values: torch.Tensor, result: float) -> torch.Tensor:
        """Return `result` where a visible key of a row has one of the values, else 0."""
        return torch.where(rows.to(v.dtype) @ values.to(v.dtype) > 0, result, 0.0)

    # As in the plain product: positive · ±inf = ±inf; every other product with NaN or infinity is NaN.
    total = weights @ v.masked_fill(~is_finite, 0.0)
    total += reached(weights > 0, v == torch.inf, torch.inf) + reached(weights > 0, v == -torch.inf, -torch.inf)
    return total + reached(visible, v.isnan(), torch.nan) + reached(visible & (weights == 0), v.isinf(), torch.nan)

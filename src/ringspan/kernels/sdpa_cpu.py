"""Attention of one piece by PyTorch's fused CPU operator, with its gaps closed.

What the operator gets wrong, it gets wrong silently, so everything it needs is seen to here:

- In half types it rounds weights and output. They are computed in float32 here, so that parts come back unrounded
  however many there are; on CPUs without bfloat16 instructions that is also faster.
- It reads the last dim of its tensors as contiguous, whatever their strides, and wants v as wide as q and k.
- A row whose scores are all -inf gets lse = 0 instead of -inf. So does a row whose NaN it overlooked.
- In a tile it multiplies masked values by 0, so NaN and infinity spread to rows that do not see them.
- It scales after it has masked, so a scale of 0 makes NaN of what is masked, and a negative one infinity.

The last three leave a trace in the result: an lse of exactly 0, or a NaN. Looking for it costs microseconds: under a
causal mask the last query sees all keys and the first key is seen by all queries, so with a scale above 0 whatever NaN
or infinity there is shows in the last row of out, or of dq, or in the first of dk. What shows a trace is computed again
by the reference. That is done for each batch row and KV head by itself, so that what comes out for one does not depend
on the others.

Under a causal mask the operator computes 256 queries at a time with runs of 512 keys, so for every other 256 queries it
computes 256 keys that none of them sees. The last of these squares is saved by giving the late keys, with the queries
that see them, a call of their own: a quarter of the work of 512 tokens, a twelfth of 1,024, a fortieth of 2,048.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from ringspan.kernels.base import Gradients, Merged, Request, with_unit_stride
from ringspan.kernels.reference import Reference
from ringspan.pieces import Piece, PieceKind
from ringspan.softmax import Partial, accumulator_dtype, merge_steadily

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FOLD_ROWS, FOLD_KEYS = 128, 256
"""A few rows against many keys: the heads of a group go through as rows of one, so K and V are read once, not once per
head. With fewer keys the copies this takes cost more than it saves; with more rows it saves little."""

_QUERY_RUN, _KEY_RUN = 256, 512  # of the operator, for enough queries
_CUT_LEAST, _CUT_MOST = 128, 4096
"""How many late keys are worth a call of their own, and out of how many."""

_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_REFERENCE = Reference()


class SdpaCpu:
    """The aten flash operator for CPUs."""

    name = "sdpa_cpu"

    def refuses(self, request: Request) -> str | None:
        """Other devices and types; any head_dim will do."""
        if request.device.type != "cpu":
            return "takes only tensors on the CPU"
        return None if request.dtype in DTYPES else "takes only float64, float32, bfloat16 and float16"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        """Attend one piece."""
        width = max(q.shape[-1], v.shape[-1])
        operands = _operand(q, width), _operand(k, width), _operand(v, width)
        cut = _cut(piece, k.shape[2])
        part = _attend(*operands, piece, scale) if cut is None else _attend_cut(cut, *operands, piece, scale)
        return part if v.shape[-1] == width else Partial(part.out[..., : v.shape[-1]], part.lse)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> Gradients:
        """A piece's share of the gradients."""
        width = max(q.shape[-1], v.shape[-1])
        operands = _operand(q, width), _operand(k, width), _operand(v, width)
        merged = Merged(_operand(merged.dout, width), _operand(merged.out, width), merged.lse)
        cut = _cut(piece, k.shape[2])
        part = (
            _differentiate(*operands, merged, piece, scale)
            if cut is None
            else _differentiate_cut(cut, *operands, merged, piece, scale)
        )
        return Gradients(part.dq[..., : q.shape[-1]], part.dk[..., : q.shape[-1]], part.dv[..., : v.shape[-1]])


def _operand(x: torch.Tensor, width: int) -> torch.Tensor:
    """A tensor as the operator wants it; what is so already passes untouched, since short pieces are quick.

    Zeros beside q and k add nothing to a score; zeros beside v make columns of the output that are cut off again.
    """
    dtype = accumulator_dtype(x.dtype)
    if x.dtype != dtype:
        x = x.to(dtype)
    return with_unit_stride(x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])))


def _cut(piece: Piece, num_keys: int) -> int | None:
    """Where the late keys begin, if they are worth a call of their own: see above."""
    num_late = (num_keys - _QUERY_RUN - 1) % _KEY_RUN + 1
    is_worth_it = _CUT_LEAST <= num_late <= _QUERY_RUN < num_keys <= _CUT_MOST
    return num_keys - num_late if piece.kind is PieceKind.CAUSAL and is_worth_it else None


def _attend_cut(cut: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
    part = _attend(q, k[:, :, :cut], v[:, :, :cut], piece, scale)
    late = _attend(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], piece, scale)
    # Steadily, since the reproducible mode's tiles are cut as well.
    merge_steadily(Partial(part.out[:, :, cut:], part.lse[:, :, cut:]), late)
    return part


def _differentiate_cut(
    cut: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
) -> Gradients:
    part = _differentiate(q, k[:, :, :cut], v[:, :, :cut], merged, piece, scale)
    of_late = Merged(*(x[:, :, cut:] for x in merged))
    late = _differentiate(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], of_late, piece, scale)
    part.dq[:, :, cut:].add_(late.dq)
    return Gradients(part.dq, torch.cat((part.dk, late.dk), dim=2), torch.cat((part.dv, late.dv), dim=2))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
    """By the operator, and what shows a trace again by the reference. Of a cut piece there are more rows than keys."""
    part = Partial(*_ATTEND[piece.kind](q, k, v, piece, scale))
    if _is_doubtful(part, piece, scale):
        for of_q, of_kv in _heads(q, k):
            one = Partial(part.out[of_q], part.lse[of_q])
            if _is_wrong(one, q[of_q], k[of_kv], piece, scale):
                _copy(_REFERENCE.forward(q[of_q], k[of_kv], v[of_kv], piece, scale), one)
    return part


def _differentiate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
) -> Gradients:
    dout, out, lse = merged
    is_causal = piece.kind is PieceKind.CAUSAL
    bias = _bias(piece, q.dtype) if piece.kind is PieceKind.MASKED else None
    part = Gradients(*_backward_operator(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale))
    if piece.kind is not PieceKind.FULL and not _is_finite(_traces(part, piece, scale)):
        for of_q, of_kv in _heads(q, k):
            one = Gradients(part.dq[of_q], part.dk[of_kv], part.dv[of_kv])
            if math.isnan(sum(x.sum() for x in one)):
                of_row = Merged(*(x[of_q] for x in merged))
                _copy(_REFERENCE.backward(q[of_q], k[of_kv], v[of_kv], of_row, piece, scale), one)
    return part


_Result = tuple[torch.Tensor, torch.Tensor]


def _attend_full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Piece, scale: float) -> _Result:
    batch, heads, num_rows, head_dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    if heads == kv_heads or num_rows > FOLD_ROWS or num_keys < FOLD_KEYS:
        result: _Result = _operator(q, k, v, 0.0, False, scale=scale)
        return result
    rows = q.reshape(batch, kv_heads, num_rows * heads // kv_heads, head_dim)
    out, lse = _operator(rows, k, v, 0.0, False, scale=scale)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def _attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: Piece, scale: float) -> _Result:
    result: _Result = _operator(q, k, v, 0.0, True, scale=scale)
    return result


def _attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> _Result:
    assert piece.allowed is not None
    out, lse = _operator(q, k, v, 0.0, False, attn_mask=_bias(piece, q.dtype), scale=scale)
    return out, lse.masked_fill_(torch.tensor(~piece.allowed.any(axis=1)), -torch.inf)


def _bias(piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, -inf where not."""
    assert piece.allowed is not None
    return torch.zeros(piece.allowed.shape, dtype=dtype).masked_fill_(torch.tensor(~piece.allowed), -torch.inf)


_ATTEND = {PieceKind.FULL: _attend_full, PieceKind.CAUSAL: _attend_causal, PieceKind.MASKED: _attend_masked}


def _is_doubtful(part: Partial, piece: Piece, scale: float) -> bool:
    """Whether the result may be wrong: see above. It may also be right, as an lse of 0 or a NaN in the input can be."""
    if torch.count_nonzero(part.lse).item() < part.lse.numel():
        return True
    if piece.kind is PieceKind.FULL:
        return False
    return not _is_finite([part.out.select(2, -1) if _shows_at_ends(piece, scale) else part.out])


def _is_wrong(part: Partial, q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float) -> bool:
    """Of what is doubtful: an lse of 0 is right where no score can be NaN or infinite."""
    if piece.kind is not PieceKind.FULL and math.isnan(part.out.sum()):
        return True
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1] * abs(scale)
    return not part.lse.all() and not largest < torch.finfo(part.lse.dtype).max


_Heads = tuple[slice, slice]


def _heads(q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[_Heads, _Heads]]:
    """Each batch row and KV head, with the query heads that share it."""
    group = q.shape[1] // k.shape[1]
    for row, head in itertools.product(range(k.shape[0]), range(k.shape[1])):
        here = slice(row, row + 1)
        yield (here, slice(head * group, (head + 1) * group)), (here, slice(head, head + 1))


def _traces(part: Gradients, piece: Piece, scale: float) -> Sequence[torch.Tensor]:
    """The gradients, or as few of them as must show a NaN or an infinity if there is any."""
    return (part.dq.select(2, -1), part.dk.select(2, 0)) if _shows_at_ends(piece, scale) else part


def _shows_at_ends(piece: Piece, scale: float) -> bool:
    """Whether the last query and the first key show what there is: see above."""
    return piece.kind is PieceKind.CAUSAL and scale > 0


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Never wrong about NaN and infinity; numbers so large that their sum is infinite are looked at once more."""
    return math.isfinite(sum(x.sum().item() for x in tensors))


def _copy(part: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    for x, y in zip(part, into, strict=True):
        y.copy_(x)

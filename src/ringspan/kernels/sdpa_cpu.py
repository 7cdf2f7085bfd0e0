"""How does PyTorch's fused CPU operator compute attention of one piece, correctly and fast?

The operator fails silently on some inputs. This module prepares the inputs or repairs the result:

- In half dtypes the operator rounds weights and output. Here half dtypes are computed in float32, so that partial
  results are unrounded. On CPUs without bfloat16 instructions float32 is also faster.
- It assumes that the last dim of its tensors is contiguous, and that v has the head_dim of q and k.
- A row whose scores are all -inf gets lse = 0 instead of -inf. So does a row with an undetected NaN.
- It multiplies masked values of a tile by 0, so NaN and infinity spread to rows that do not see them.
- It scales after masking, so with a scale of 0 masked scores become NaN, and with a negative scale infinity.

The last three leave a trace in the result: an lse of exactly 0, or a NaN. Finding the trace costs microseconds. Under a
causal mask the last query sees all keys and all queries see the first key, so with a positive scale every NaN or
infinity shows in the last row of out or dq, or in the first row of dk. The reference recomputes heads with a trace,
separately for each batch row and KV head, so that the result of one head does not depend on the others.

Keys are attended in runs, each in its own call, for two reasons:

- The operator reads all keys again for every 256 queries. Runs of a megabyte stay in the core's caches, which saves up
  to 5 % of the time of a head with several megabytes of keys.
- Under a causal mask the operator pairs 256 queries with 512 keys at a time, so every second pair includes 256 keys
  that no query sees. A run with an odd number of 256-key blocks, attended by all queries that see it, avoids the last
  such square. So the late keys of a short piece are a run of their own, which saves a quarter of the work at 512
  tokens, a twelfth at 1,024 and a fortieth at 2,048.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import pad

from ringspan.kernels.base import KernelGradients, KernelRequest, Merged, attend_turned, differentiate_turned
from ringspan.kernels.reference import ReferenceKernel
from ringspan.kernels.softmax import Partial, accumulator_dtype, merge_steadily
from ringspan.program.pieces import Piece, PieceKind

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

FOLD_ROWS, FOLD_KEYS = 128, 256
"""Up to this many rows against this many keys, the heads of a group become rows of one head, so that K and V are read
once, not once per head. With fewer keys the copies cost more than they save; with more rows the saving is small."""

_QUERY_BLOCK, _KEY_BLOCK = 256, 512  # block sizes inside the operator with _MANY_ROWS or more queries
_MANY_ROWS = 768
_RUN_BYTES = 2**20  # of the keys of a head
_LEAST_RUN = {PieceKind.FULL: 2 * _KEY_BLOCK, PieceKind.CAUSAL: _QUERY_BLOCK // 2}
_CACHED_BYTES = {PieceKind.FULL: 0, PieceKind.CAUSAL: 2 * 2**20}
"""A causal head with fewer bytes of keys gains nothing from runs, because only half of its keys are read again."""

_SLAB_BYTES = 4 * 2**20
"""Size of the partial output merged at once: that many heads stay in the caches until the merge."""

_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_REFERENCE = ReferenceKernel()


class SdpaCpu:
    """The aten flash operator for CPUs."""

    name = "sdpa_cpu"

    def refuses(self, request: KernelRequest) -> str | None:
        if request.device.type != "cpu":
            return "takes only tensors on the CPU"
        if request.softcap is not None:
            return "has no softcap"
        return None if request.dtype in DTYPES else "takes only float64, float32, bfloat16 and float16"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        if piece.kind is PieceKind.ANTICAUSAL:
            return attend_turned(self.forward, q, k, v, piece, scale)
        width = max(q.shape[-1], v.shape[-1])
        operands = _operand(q, width), _operand(k, width), _operand(v, width)
        part = _attend_runs(*operands, piece, scale)
        return Partial(_cut(part.out, v.shape[-1]), part.lse)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        if piece.kind is PieceKind.ANTICAUSAL:
            return differentiate_turned(self.backward, q, k, v, merged, piece, scale)
        width = max(q.shape[-1], v.shape[-1])
        operands = _operand(q, width), _operand(k, width), _operand(v, width)
        merged = Merged(_operand(merged.dout, width), _operand(merged.out, width), merged.lse)
        part = _differentiate_runs(*operands, merged, piece, scale)
        return KernelGradients(_cut(part.dq, q.shape[-1]), _cut(part.dk, q.shape[-1]), _cut(part.dv, v.shape[-1]))


def _operand(x: torch.Tensor, width: int) -> torch.Tensor:
    """Convert a tensor for the operator; return a tensor that fits already as it is, because short pieces are fast.

    Padding zeros in q and k add nothing to a score. Padding zeros in v make columns of the output that `_cut` removes.
    """
    dtype = accumulator_dtype(x.dtype)
    if x.dtype != dtype:
        x = x.to(dtype)
    if x.shape[-1] != width:
        x = pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _cut(x: torch.Tensor, width: int) -> torch.Tensor:
    """Remove the padding columns; the copy frees their memory, which a view would keep alive."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def _starts(piece: Piece, q: torch.Tensor, k: torch.Tensor) -> list[int]:
    """Return the first key of each run (see the module docstring)."""
    starts, num_keys = [0], k.shape[2]
    if piece.kind is PieceKind.MASKED:
        return starts
    if q.shape[2] >= _MANY_ROWS and k.element_size() * num_keys * k.shape[3] > _CACHED_BYTES[piece.kind]:
        run = _run_length(piece, k)
        starts += range(run, num_keys - _LEAST_RUN[piece.kind] + 1, run)
    return starts if piece.kind is PieceKind.FULL else starts + _late_start(starts[-1], num_keys)


def _run_length(piece: Piece, k: torch.Tensor) -> int:
    """Return the number of keys in a run: an odd number of query blocks under a causal mask."""
    num_blocks = max(1, _RUN_BYTES // (_KEY_BLOCK * k.element_size() * k.shape[3]))
    return num_blocks * _KEY_BLOCK + (_QUERY_BLOCK if piece.kind is PieceKind.CAUSAL else 0)


def _late_start(first: int, num_keys: int) -> list[int]:
    """Return where the late keys of the last causal run begin, if attending them in their own call saves a square."""
    num_late = (num_keys - first - _QUERY_BLOCK - 1) % _KEY_BLOCK + 1
    is_worth_it = _LEAST_RUN[PieceKind.CAUSAL] <= num_late <= _QUERY_BLOCK < num_keys - first
    return [num_keys - num_late] if is_worth_it else []


_Index = tuple[slice, slice, slice]


def _late_runs(starts: list[int], q: torch.Tensor, k: torch.Tensor, piece: Piece) -> Iterator[tuple[_Index, _Index]]:
    """Yield every run but the first with the queries that see it, a few heads at a time."""
    for start, stop in itertools.pairwise([*starts[1:], k.shape[2]]):
        first = start if piece.kind is PieceKind.CAUSAL else 0
        at_once = _SLAB_BYTES // (q.element_size() * (q.shape[2] - first) * q.shape[3])
        for of_q, of_kv in _heads(q, k, at_once):
            yield (*of_q, slice(first, None)), (*of_kv, slice(start, stop))


def _attend_runs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
    starts = _starts(piece, q, k)
    if len(starts) == 1:
        return _attend(q, k, v, piece, scale)
    part = _attend(q, k[:, :, : starts[1]], v[:, :, : starts[1]], piece, scale)
    for of_q, of_kv in _late_runs(starts, q, k, piece):
        late = _attend(q[of_q], k[of_kv], v[of_kv], piece, scale)
        # The tiles of the reproducible mode have late runs too, so the merge must keep a row's bits.
        merge_steadily(Partial(part.out[of_q], part.lse[of_q]), late)
        del late  # the next part reuses its memory, which is still in the caches
    return part


def _differentiate_runs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
) -> KernelGradients:
    starts = _starts(piece, q, k)
    if len(starts) == 1:
        return _differentiate(q, k, v, merged, piece, scale)
    part = _differentiate(q, k[:, :, : starts[1]], v[:, :, : starts[1]], merged, piece, scale)
    dq, dk, dv = part.dq, k.new_empty(k.shape), v.new_empty(v.shape)
    dk[:, :, : starts[1]], dv[:, :, : starts[1]] = part.dk, part.dv
    for of_q, of_kv in _late_runs(starts, q, k, piece):
        of_late = Merged(*(x[of_q] for x in merged))
        late = _differentiate(q[of_q], k[of_kv], v[of_kv], of_late, piece, scale)
        dq[of_q].add_(late.dq)
        dk[of_kv], dv[of_kv] = late.dk, late.dv
        del late
    return KernelGradients(dq, dk, dv)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
    """Attend with the operator; recompute heads with a trace. A causal run may have more rows than keys."""
    part = Partial(*_ATTEND[piece.kind](q, k, v, piece, scale))
    if _is_doubtful(part, piece, scale):
        for of_q, of_kv in _heads(q, k):
            one = Partial(part.out[of_q], part.lse[of_q])
            if _is_wrong(one, q[of_q], k[of_kv], piece, scale):
                _copy(_REFERENCE.forward(q[of_q], k[of_kv], v[of_kv], piece, scale), one)
    return part


def _differentiate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
) -> KernelGradients:
    dout, out, lse = merged
    is_causal = piece.kind is PieceKind.CAUSAL
    bias = _bias(piece, q.dtype) if piece.kind is PieceKind.MASKED else None
    part = KernelGradients(*_backward_operator(dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale))
    if piece.kind is not PieceKind.FULL and not _is_finite(_traces(part, piece, scale)):
        for of_q, of_kv in _heads(q, k):
            one = KernelGradients(part.dq[of_q], part.dk[of_kv], part.dv[of_kv])
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
    return out, lse.masked_fill_(torch.from_numpy(~piece.allowed.any(axis=1)), -torch.inf)


def _bias(piece: Piece, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where a key is visible and -inf where it is not."""
    assert piece.allowed is not None
    seen = torch.zeros(piece.allowed.shape, dtype=dtype, device="cpu")
    return seen.masked_fill_(torch.from_numpy(~piece.allowed), -torch.inf)


_ATTEND = {PieceKind.FULL: _attend_full, PieceKind.CAUSAL: _attend_causal, PieceKind.MASKED: _attend_masked}


def _is_doubtful(part: Partial, piece: Piece, scale: float) -> bool:
    """Whether the result has a trace (see the module docstring). A correct result can have one too."""
    if torch.count_nonzero(part.lse).item() < part.lse.numel():
        return True
    if piece.kind is PieceKind.FULL:
        return False
    return not _is_finite([part.out.select(2, -1) if _shows_at_ends(piece, scale) else part.out])


def _is_wrong(part: Partial, q: torch.Tensor, k: torch.Tensor, piece: Piece, scale: float) -> bool:
    """Whether a doubtful result is wrong: an lse of 0 is correct if no score can be NaN or infinite."""
    if piece.kind is not PieceKind.FULL and math.isnan(part.out.sum()):
        return True
    largest = q.abs().amax().double() * k.abs().amax().double() * q.shape[-1] * abs(scale)
    return not part.lse.all() and not largest < torch.finfo(part.lse.dtype).max


_Heads = tuple[slice, slice]


def _heads(q: torch.Tensor, k: torch.Tensor, at_once: int = 1) -> Iterator[tuple[_Heads, _Heads]]:
    """Yield groups of about `at_once` query heads with their KV heads; all heads at once if there are no more."""
    (batch, heads), kv_heads = q.shape[:2], k.shape[1]
    if at_once >= batch * heads:
        yield (slice(None), slice(None)), (slice(None), slice(None))
        return
    group = heads // kv_heads
    step = max(1, at_once // group)
    for row, head in itertools.product(range(batch), range(0, kv_heads, step)):
        here = slice(row, row + 1)
        yield (here, slice(head * group, (head + step) * group)), (here, slice(head, head + step))


def _traces(part: KernelGradients, piece: Piece, scale: float) -> Sequence[torch.Tensor]:
    """Return the smallest part of the gradients that shows every NaN and infinity."""
    return (part.dq.select(2, -1), part.dk.select(2, 0)) if _shows_at_ends(piece, scale) else part


def _shows_at_ends(piece: Piece, scale: float) -> bool:
    """Whether the last query and the first key show every NaN and infinity (see the module docstring)."""
    return piece.kind is PieceKind.CAUSAL and scale > 0


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the sum is finite. Finite numbers whose sum overflows give False, which only costs a recheck."""
    total = 0.0
    for x in tensors:
        total += x.sum().item()
    return math.isfinite(total)


def _copy(part: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
    for x, y in zip(part, into, strict=True):
        y.copy_(x)

"""How are pieces computed and summed, with tensors and a kernel?

`TorchArithmetic` is the runtime's `Arithmetic` for the executor. It calls the kernel on one slab of heads at a time, so
that partial results stay small beside the sums. Where a piece is the first of its sum, the kernel's result becomes the
sum, in the accumulator dtype.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ringspan.kernels.base import Kernel, KernelGradients, Merged
from ringspan.kernels.softmax import Partial, accumulator_dtype, merge_, merged
from ringspan.program.execute import Value
from ringspan.program.pieces import Piece, PieceKind
from ringspan.program.problem import Shape
from ringspan.runtime.scratch import Scratch
from ringspan.schedule import Block

_NOTHING = nullcontext()
_CPU_SLAB_BYTES, _GPU_SLAB_BYTES = 2 * 2**20, 2**28
"""Upper bound of one kernel result. A CPU gains nothing from larger calls; a GPU needs enough work in each call."""

_FIRST_SLABS = 4
"""On a CPU, half types are attended in this many slabs at once where nothing is merged yet, and up to this many slabs
of this rank's queries are kept in float32."""

_FEW_ROWS = 128
"""Below this many rows, converting K/V costs more than attending them, so keys are converted in cache-sized chunks."""


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Switch autocast off: sums have a dtype of their own. Entering a context costs time, so do it only if needed."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


def is_widened(q: torch.Tensor) -> bool:
    """True if kernels compute q in float32 although it is a half type, which CPU kernels do."""
    return q.device.type == "cpu" and q.dtype != accumulator_dtype(q.dtype)


class TorchArithmetic:
    """Sums of tensors; a kernel attends one piece at a time."""

    merge_parts = staticmethod(merge_)

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor, scratch: Scratch | None = None) -> None:
        self.kernel = kernel
        self.scale = scale
        self.dtype = accumulator_dtype(like.dtype)
        self.device = like.device
        self.is_widened = is_widened(like)
        self._scratch = Scratch() if scratch is None and self.is_widened else scratch
        self._own = like
        self._narrow: Value = ()
        self._wide: Value = ()
        self._queries, self._out = _LastRows(), _LastRows()

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        """Nothing summed yet: out = 0 with lse = -inf, or zero gradients."""
        value = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        if block.kind == "out":
            value[1].fill_(-torch.inf)
        return value

    def room(self, shapes: Sequence[Shape]) -> Value:
        """Uninitialised arrays."""
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)

    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place."""
        if block.kind == "out":
            self.merge_parts(Partial(into[0], into[1].squeeze(-1)), Partial(part[0], part[1].squeeze(-1)))
        else:
            for total, addend in zip(into, part, strict=True):
                total += addend

    def merged(self, block: Block, parts: Sequence[Value]) -> Value:
        """The sum of parts, added in their order."""
        if block.kind != "out":
            return tuple(sum(addends) for addends in zip(*parts, strict=True))
        return functools.reduce(merged, itertools.starmap(Partial, parts))

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Forward: attend a piece that covers all queries; the kernel's result becomes the running output."""
        if self.is_widened:
            q = self._widened(q)
        (queries,), (keys, values) = q, _rows(kv, piece.kv)
        if not _is_whole(queries, keys, values):
            value = self.room([(*queries.shape[:-1], dim) for dim in (values.shape[-1], 1)])
            self.attend(piece, q, kv, value, True)
            return value
        part = self._kernel_forward(piece, queries, keys, values)
        return part.out.to(self.dtype), part.lse.unsqueeze(-1)

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Forward: attend a piece and merge it into the running output of its queries."""
        if self.is_widened:
            q = self._widened(q)
            for run in key_runs(piece, self.device, *_rows(kv, piece.kv)):
                self._attend(run, q, kv, out, is_first and run.kv.start == piece.kv.start)
        else:
            self._attend(piece, q, kv, out, is_first)

    def _attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        (queries,), (keys, values) = self._queries.of(q, piece.q), _rows(kv, piece.kv)
        sums, column = self._out.of(out, piece.q)
        for of_q, of_kv in _slabs(piece, queries, keys, values, is_first):
            part = self._kernel_forward(piece, _at(of_q, queries), _at(of_kv, keys), _at(of_kv, values))
            total, lse = _at(of_q, sums), _at(of_q, column).squeeze(-1)
            if is_first:
                total.copy_(part.out)
                lse.copy_(part.lse)
            else:
                self.merge_parts(Partial(total, lse), part)
            del part  # so that the next part reuses its memory, which is in the cache

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Backward: add a piece's dq, dk and dv; a sum that is None starts as the kernel's result."""
        if self.is_widened:
            q_grad = self._widened(q_grad)
        queries, dout, out, lse = _rows(q_grad, piece.q)
        keys, values = _rows(kv, piece.kv)
        if dq is None and dkv is None and _is_whole(queries, keys, values):
            part = self._kernel_backward(piece, queries, keys, values, dout, out, lse)
            return (part.dq.to(self.dtype),), (part.dk.to(self.dtype), part.dv.to(self.dtype))
        begins_q, begins_kv = dq is None, dkv is None
        dq = dq or self.room([queries.shape])
        dkv = dkv or self.room([keys.shape, values.shape])
        (dqs,), (dks, dvs) = _rows(dq, piece.q), _rows(dkv, piece.kv)
        group = queries.shape[1] // keys.shape[1]
        for of_q, of_kv in _slabs(piece, queries, keys, values):
            inputs = _at(of_q, queries), _at(of_kv, keys), _at(of_kv, values)
            part = self._kernel_backward(piece, *inputs, _at(of_q, dout), _at(of_q, out), _at(of_q, lse))
            _add(_at(of_q, dqs), part.dq, begins_q)
            is_first_of_group = not of_q or of_q[1].start % group == 0
            for total, addend in ((dks, part.dk), (dvs, part.dv)):
                _add(_at(of_kv, total), addend, begins_kv and is_first_of_group)
            del part, addend
        return dq, dkv

    def _kernel_forward(self, piece: Piece, *inputs: torch.Tensor) -> Partial:
        q, k, v = self._operands(inputs) if self.is_widened else inputs
        return self.kernel.forward(q, k, v, piece, self.scale)

    def _kernel_backward(self, piece: Piece, *inputs: torch.Tensor) -> KernelGradients:
        q, k, v, dout, out, lse = self._operands(inputs) if self.is_widened else inputs
        return self.kernel.backward(q, k, v, Merged(dout, out, lse.squeeze(-1)), piece, self.scale)

    def _operands(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Half types copied to float32 memory that the next call reuses."""
        assert self._scratch is not None
        return self._scratch.operands(tensors)

    def _widened(self, q: Value) -> Value:
        """This rank's own queries in float32, if they are few: a ring attends them in every step.

        Queries of other ranks arrive in buffers that are reused, so their copies are not kept.
        """
        if q[0] is not self._own or not _is_kept(q[0]):
            return q
        if q is not self._narrow:
            assert self._scratch is not None
            self._narrow, self._wide = q, self._scratch.queries(q)
        return self._wide


def key_runs(piece: Piece, device: torch.device, *rows: torch.Tensor) -> Sequence[Piece]:
    """Cut a FULL piece of few queries into runs of keys that fit a slab once converted; return other pieces whole."""
    num_keys = piece.kv.stop - piece.kv.start
    converted_bytes = 4 * max(x[:, :, :1].numel() for x in rows)
    at_once = max(1, _slab_bytes(device) // max(1, converted_bytes))
    if piece.kind is not PieceKind.FULL or piece.q.stop - piece.q.start > _FEW_ROWS or num_keys <= at_once:
        return (piece,)
    starts = range(piece.kv.start, piece.kv.stop, at_once)
    return [piece._replace(kv=slice(start, min(start + at_once, piece.kv.stop))) for start in starts]


def _add(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> None:
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


_Index = tuple[slice, ...]


def _is_kept(q: torch.Tensor) -> bool:
    """Few enough queries to keep a float32 copy."""
    return 4 * q.numel() <= _FIRST_SLABS * _CPU_SLAB_BYTES


def _slab_bytes(device: torch.device) -> int:
    return _CPU_SLAB_BYTES if device.type == "cpu" else _GPU_SLAB_BYTES


def _heads_at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_first: bool) -> int:
    """How many heads, over all batch rows, make a kernel result of one slab and a copy of k of two."""
    slab = _slab_bytes(q.device)
    is_converted = k.dtype != accumulator_dtype(k.dtype)
    if is_converted and is_first and q.device.type == "cpu":
        slab *= _FIRST_SLABS
    at_once = slab // max(1, 4 * q.shape[2] * v.shape[3])
    if is_converted:  # a kernel may copy k, once for all heads that share it; half a zigzag has twice as many keys
        group = q.shape[1] // k.shape[1]
        at_once = min(at_once, group * max(1, 2 * slab // max(1, 4 * k.shape[2] * k.shape[3])))
    return at_once


def _is_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True if one kernel call may start a sum: its result is needed anyway, but its copies must stay small."""
    return k.dtype == accumulator_dtype(k.dtype) or _heads_at_once(q, k, v, True) >= q.shape[0] * q.shape[1]


_WHOLE: tuple[tuple[_Index, _Index], ...] = (((), ()),)


def _slabs(
    piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_first: bool = False
) -> Iterable[tuple[_Index, _Index]]:
    """Batch rows and heads of a piece, one slab at a time."""
    at_once = _heads_at_once(q, k, v, is_first)
    batch, heads, _, _ = q.shape
    return _WHOLE if piece.rows is None and at_once >= batch * heads else _parts(piece, q, k, at_once)


def _parts(piece: Piece, q: torch.Tensor, k: torch.Tensor, at_once: int) -> Iterator[tuple[_Index, _Index]]:
    """First the KV heads are taken apart, then the heads that share one, then the batch."""
    batch, heads, _, _ = q.shape
    group = heads // k.shape[1]
    num_heads = min(heads, max(1, at_once))
    num_heads = max(n for n in range(1, num_heads + 1) if n % group == 0 or group % n == 0)
    num_rows = max(1, at_once // heads) if piece.rows is None else 1
    for top in range(0, batch, num_rows) if piece.rows is None else piece.rows:
        row = slice(top, min(top + num_rows, batch))
        for first in range(0, heads, num_heads):
            stop = min(first + num_heads, heads)
            yield (row, slice(first, stop)), (row, slice(first // group, -(-stop // group)))


def _at(index: _Index, x: torch.Tensor) -> torch.Tensor:
    """A view, or x itself for all of it: even a view of everything costs time."""
    return x[index] if index else x


def _rows(value: Value, rows: slice) -> Value:
    """Rows of a block's tensors, as views."""
    return value if rows.stop - rows.start == value[0].shape[2] else tuple([x[:, :, rows] for x in value])


class _LastRows:
    """Caches the last views of a block's rows: a ring needs the same ones in every step."""

    def __init__(self) -> None:
        self._value: Value = ()
        self._rows = slice(0)
        self._views: Value = ()

    def of(self, value: Value, rows: slice) -> Value:
        """Views of those rows."""
        if value is not self._value or rows != self._rows:
            self._value, self._rows, self._views = value, rows, _rows(value, rows)
        return self._views

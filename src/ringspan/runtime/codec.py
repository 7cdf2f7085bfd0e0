"""How are keys and values attended that are stored or sent in another form than q's dtype, or lie in a cache?

A `Codec` says how K and V are encoded: another floating dtype, or one byte per element with scales (`quantize.py`). A
`KVSource` says where the rows of a kv block lie. An encoded block travels as it is, is forwarded unchanged, and its
owner attends it too, so all ranks use the same numbers. Rows are decoded as they are attended: one KV head at a time,
or, for a few queries, some keys at a time.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ringspan.kernels.base import Kernel
from ringspan.program.execute import Value
from ringspan.program.pieces import Piece
from ringspan.program.problem import Shape
from ringspan.runtime import quantize
from ringspan.runtime.arithmetic import TorchArithmetic, key_runs
from ringspan.runtime.quantize import SCALE_DTYPE, Format
from ringspan.runtime.scratch import Scratch
from ringspan.schedule import Block


class Codec(Protocol):
    """How keys and values are encoded: as tensors (…, tokens, dim) of these dtypes."""

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    def dims(self, head_dim: int, v_head_dim: int, /) -> tuple[int, ...]:
        """The last dim of each tensor."""

    def encode(self, k: torch.Tensor, v: torch.Tensor, /) -> Value: ...

    def decode(self, rows: Value, dtype: torch.dtype, /) -> Value:
        """K and v in `dtype`."""


class Cast(NamedTuple):
    """Keys and values in a floating dtype."""

    dtype: torch.dtype

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.dtype, self.dtype)

    def dims(self, head_dim: int, v_head_dim: int) -> tuple[int, ...]:
        return (head_dim, v_head_dim)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Value:
        return k.to(self.dtype), v.to(self.dtype)

    def decode(self, rows: Value, dtype: torch.dtype) -> Value:
        return tuple(x.to(dtype) for x in rows)


class Quantized(NamedTuple):
    """Keys and values in one byte per element, with a scale per head and token; the error is bounded."""

    form: Format

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (self.form.dtype, SCALE_DTYPE) * 2

    def dims(self, head_dim: int, v_head_dim: int) -> tuple[int, ...]:
        return (head_dim, 1, v_head_dim, 1)

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Value:
        return quantize.encode_kv(k, v, self.form)

    def decode(self, rows: Value, dtype: torch.dtype) -> Value:
        k, k_scales, v, v_scales = rows
        return tuple(quantize.decode(*x, dtype) for x in ((k, k_scales), (v, v_scales)))


class KVSource(Protocol):
    """Gives access to the rows of a kv block."""

    def rows(self, kv: Value, rows: slice, /) -> Value:
        """The tensors of some rows, as views."""


class TensorRows:
    """A kv block is the tensors themselves."""

    def rows(self, kv: Value, rows: slice) -> Value:
        return tuple(x.narrow(-2, rows.start, rows.stop - rows.start) for x in kv)


class CodecArithmetic:
    """Forward arithmetic over encoded rows: rows from a KVSource, decoded by a Codec, attended by TorchArithmetic."""

    def __init__(self, plain: TorchArithmetic, q_dtype: torch.dtype, codec: Codec, source: KVSource) -> None:
        self._plain = plain
        self._codec = codec
        self._source = source
        self._q_dtype = q_dtype
        self._decoded_dtype = plain.dtype if plain.is_widened else q_dtype

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        return self._plain.new_sum(block, shapes)

    def room(self, shapes: Sequence[Shape]) -> Value:
        return self._plain.room(shapes)

    def merge(self, block: Block, into: Value, part: Value) -> None:
        self._plain.merge(block, into, part)

    def merged(self, block: Block, parts: Sequence[Value]) -> Value:
        return self._plain.merged(block, parts)

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        rows, piece = self._source.rows(kv, piece.kv), _of_all_rows(piece)
        if self._is_decoded(rows):
            return self._plain.begin(piece, q, rows)
        *lead, _ = q[0].shape
        v = rows[1] if len(rows) == 2 else rows[2]
        value = self.room([(*lead, v.shape[-1]), (*lead, 1)])
        self._attend_encoded(piece, q, rows, value, True)
        return value

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        rows, piece = self._source.rows(kv, piece.kv), _of_all_rows(piece)
        attend = self._plain.attend if self._is_decoded(rows) else self._attend_encoded
        attend(piece, q, rows, out, is_first)

    def attend_grad(self, *_: object) -> tuple[Value, Value]:
        raise AssertionError("gradients through encoded K and V are refused before a call begins")

    def _is_decoded(self, rows: Value) -> bool:
        return len(rows) == 2 and rows[0].dtype == self._q_dtype

    def _attend_encoded(self, piece: Piece, q: Value, rows: Value, out: Value, is_first: bool) -> None:
        runs = key_runs(piece, q[0].device, *rows)
        if len(runs) > 1:
            for run in runs:
                some = self._decoded(tuple(x.narrow(-2, run.kv.start, run.kv.stop - run.kv.start) for x in rows))
                self._plain.attend(_of_all_rows(run), q, some, out, is_first and run.kv.start == 0)
            return
        num_kv_heads = rows[0].shape[1]
        group = q[0].shape[1] // num_kv_heads
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            self._plain.attend(
                piece,
                tuple(x[:, heads] for x in q),
                self._decoded(tuple(x[:, head : head + 1] for x in rows)),
                tuple(x[:, heads] for x in out),
                is_first,
            )

    def _decoded(self, rows: Value) -> Value:
        return self._codec.decode(rows, self._decoded_dtype)


def codec_arithmetic(
    codec: Codec,
    kernel: Kernel,
    scale: float,
    like: torch.Tensor,
    scratch: Scratch | None = None,
    source: KVSource | None = None,
) -> CodecArithmetic:
    """Arithmetic for queries such as `like` over keys and values of a codec; by default they are plain tensors."""
    plain = TorchArithmetic(kernel, scale, like, scratch)
    return CodecArithmetic(plain, like.dtype, codec, source or TensorRows())


def _of_all_rows(piece: Piece) -> Piece:
    """The piece with its key rows counted from 0, for rows that have been cut out."""
    return piece._replace(kv=slice(0, piece.kv.stop - piece.kv.start))

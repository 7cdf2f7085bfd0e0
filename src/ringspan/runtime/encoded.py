"""Attending and sending keys and values that are not in the type of the queries.

A kv block of four tensors is encoded (see `quantize.py`). It travels as it is, is forwarded unchanged, and its owner
attends it too, so that all ranks use the same numbers. Rows are decoded as they are attended, a KV head at a time, or
for a few queries some keys at a time.
"""

import torch

from ringspan.kernels.base import Kernel
from ringspan.program.bind import Message
from ringspan.program.execute import Value
from ringspan.program.pieces import Piece
from ringspan.runtime import quantize
from ringspan.runtime.arithmetic import TorchArithmetic, key_runs
from ringspan.runtime.scratch import Scratch
from ringspan.runtime.wire import Buffers, TransportWire
from ringspan.transports.base import Transport


class EncodedArithmetic(TorchArithmetic):
    """Converts keys and values where they are not in the type of the queries: to that, or to the one computed in."""

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor, scratch: Scratch | None = None) -> None:
        super().__init__(kernel, scale, like, scratch)
        self.q_dtype = like.dtype
        self._wanted_dtype = self.dtype if self._is_converted else like.dtype

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend a piece of all queries; what the kernel returns is the running output."""
        rows, piece = self.rows_of(kv, piece.kv), _of_all_rows(piece)
        if self._is_plain(rows):
            return super().begin(piece, q, rows)
        *lead, _ = q[0].shape
        v = rows[1] if len(rows) == 2 else rows[2]
        value = self.room([(*lead, v.shape[-1]), (*lead, 1)])
        self._attend_decoded(piece, q, rows, value, True)
        return value

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Attend a piece and merge it into the running output of its queries."""
        rows, piece = self.rows_of(kv, piece.kv), _of_all_rows(piece)
        attend = super().attend if self._is_plain(rows) else self._attend_decoded
        attend(piece, q, rows, out, is_first)

    def rows_of(self, kv: Value, rows: slice) -> Value:
        """The keys and values of a piece."""
        return tuple(x.narrow(-2, rows.start, rows.stop - rows.start) for x in kv)

    def _is_plain(self, rows: Value) -> bool:
        return len(rows) == 2 and rows[0].dtype == self.q_dtype

    def _attend_decoded(self, piece: Piece, q: Value, rows: Value, out: Value, is_first: bool) -> None:
        runs = key_runs(piece, self.device, *rows)
        if len(runs) > 1:
            for run in runs:
                some = self._decoded(self.rows_of(rows, run.kv))
                super().attend(_of_all_rows(run), q, some, out, is_first and run.kv.start == 0)
            return
        num_kv_heads = rows[0].shape[1]
        group = q[0].shape[1] // num_kv_heads
        for head in range(num_kv_heads):
            heads = slice(head * group, (head + 1) * group)
            super().attend(
                piece,
                tuple(x[:, heads] for x in q),
                self._decoded(tuple(x[:, head : head + 1] for x in rows)),
                tuple(x[:, heads] for x in out),
                is_first,
            )

    def _decoded(self, rows: Value) -> Value:
        if len(rows) == 2:
            return tuple(x.to(self._wanted_dtype) for x in rows)
        k, k_scales, v, v_scales = rows
        return tuple(quantize.decode(*x, self._wanted_dtype) for x in ((k, k_scales), (v, v_scales)))


class EncodedWire(TransportWire):
    """Carries kv blocks in types of their own."""

    def __init__(
        self,
        transport: Transport,
        buffers: Buffers,
        like: torch.Tensor,
        timeout_s: float,
        kv_dtypes: tuple[torch.dtype, ...],
    ) -> None:
        super().__init__(transport, buffers, like, timeout_s)
        self.kv_dtypes = kv_dtypes

    def _buffers(self, message: Message) -> Value:
        if message.transfer.block.kind != "kv":
            return super()._buffers(message)
        return self.buffers.take(message.shapes, self.kv_dtypes, self.device)


def _of_all_rows(piece: Piece) -> Piece:
    """The piece as one of its own rows alone."""
    return piece._replace(kv=slice(0, piece.kv.stop - piece.kv.start))

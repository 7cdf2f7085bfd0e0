"""How does a program of blocks read a cache, whose rows lie in several places and may be encoded?

To the executor a rank's keys and values are one block. `CachedRows` stands for it: attending takes views of the rows
where they lie, and only what is sent is put together. Rows of another type than the queries, or encoded ones, are
converted head by head as they are attended, so the whole is never there at once.
"""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from ringspan import quantize
from ringspan.execute import Value
from ringspan.inference.storage import Rows
from ringspan.kernels.base import Kernel
from ringspan.pieces import Piece
from ringspan.runtime import Buffers, TorchArithmetic, TransportWire
from ringspan.tiles import Message, Sizes
from ringspan.transports.base import Transport


class CachedRows:
    """This rank's keys and values in a turn, for one layer; `packed` is set if they are at hand in one piece."""

    def __init__(self, views: Sequence[Rows], packed: Rows | None) -> None:
        self.views = views
        self.starts: list[int] = []
        end = 0
        for view in views:
            self.starts.append(end)
            end += view[0].shape[2]
        self._packed = packed

    def rows(self, rows: slice) -> Rows:
        """Some rows, which all lie in one of the views."""
        i = bisect_right(self.starts, rows.start) - 1
        view, first = self.views[i], rows.start - self.starts[i]
        length = rows.stop - rows.start
        if length == view[0].shape[2]:
            return view
        assert first + length <= view[0].shape[2]
        return tuple(x.narrow(2, first, length) for x in view)

    def packed(self) -> Rows:
        """All rows in one piece, copied once."""
        if self._packed is None:
            self._packed = tuple(_joined(tensors) for tensors in zip(*self.views, strict=True))
        return self._packed


class TurnArithmetic(TorchArithmetic):
    """Attends rows of a cache as well as rows that came in a message, both possibly encoded."""

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor) -> None:
        super().__init__(kernel, scale, like)
        self.q_dtype = like.dtype

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Convert the piece's rows if need be, a KV head at a time, and attend them."""
        length = piece.kv.stop - piece.kv.start
        if isinstance(kv[0], CachedRows):
            rows = kv[0].rows(piece.kv)
        else:
            rows = tuple(x.narrow(-2, piece.kv.start, length) for x in kv)
        piece = piece._replace(kv=slice(0, length))
        if len(rows) == 2 and rows[0].dtype == self.q_dtype:
            super().attend(piece, q, rows, out, is_first)
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

    def _decoded(self, rows: Rows) -> Rows:
        if len(rows) == 2:
            return tuple(x.to(self.q_dtype) for x in rows)
        k, k_scales, v, v_scales = rows
        return quantize.decode(k, k_scales, self.q_dtype), quantize.decode(v, v_scales, self.q_dtype)


class TurnWire(TransportWire):
    """Messages of a turn: keys and values travel in the type they are stored in."""

    def __init__(
        self,
        transport: Transport,
        buffers: Buffers,
        problem: Sizes,
        like: torch.Tensor,
        timeout_s: float,
        kv_dtypes: tuple[torch.dtype, ...],
    ) -> None:
        super().__init__(transport, buffers, problem, like, timeout_s)
        self.kv_dtypes = kv_dtypes

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step; what lies in the cache is put together first."""
        packed = [
            (message, value[0].packed() if isinstance(value[0], CachedRows) else value) for message, value in sends
        ]
        super().post(step, [(message, value) for message, value in packed], receives)

    def _buffers(self, message: Message) -> Value:
        if message.transfer.block.kind != "kv":
            return super()._buffers(message)
        pairs = zip(message.shapes, self.kv_dtypes, strict=True)
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in pairs)

    def release(self, value: Value, /) -> None:
        """Keep buffers of plain tensors for the next block."""
        if len({x.dtype for x in value}) == 1:
            super().release(value)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)

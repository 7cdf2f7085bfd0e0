"""How does a program of blocks read a cache, whose rows lie in several places and may be encoded?

To the executor a rank's keys and values are one block. `CachedRows` stands for it: attending takes views of the rows
where they lie, and only what is sent is put together. Rows of another type than the queries, or encoded ones, are
converted head by head as they are attended, so the whole is never there at once.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from ringspan import quantize
from ringspan.execute import Value
from ringspan.inference.storage import Rows
from ringspan.kernels.base import Kernel
from ringspan.pieces import Piece
from ringspan.runtime import Buffers, TorchArithmetic, TransportWire
from ringspan.schedule import Transfer
from ringspan.tiles import BoundProgram, Exchange, Message, Sizes
from ringspan.transports.base import Transport

SHORT_BYTES = 2**18


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

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend a piece of all queries; what the kernel returns is the running output."""
        rows, piece = self._rows_of(piece, kv)
        if self._is_plain(rows):
            return super().begin(piece, q, rows)
        *lead, _ = q[0].shape
        out = torch.empty(*lead, rows[-1 if len(rows) == 2 else 2].shape[-1], dtype=self.dtype, device=self.device)
        value = (out, out.new_empty(*lead, 1))
        self._attend_decoded(piece, q, rows, value, True)
        return value

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Convert the piece's rows if need be and attend them."""
        rows, piece = self._rows_of(piece, kv)
        attend = super().attend if self._is_plain(rows) else self._attend_decoded
        attend(piece, q, rows, out, is_first)

    def _rows_of(self, piece: Piece, kv: Value) -> tuple[Rows, Piece]:
        """The keys and values of a piece, and the piece as one of these rows alone."""
        length = piece.kv.stop - piece.kv.start
        if isinstance(kv[0], CachedRows):
            rows = kv[0].rows(piece.kv)
        else:
            rows = tuple(x.narrow(-2, piece.kv.start, length) for x in kv)
        return rows, piece._replace(kv=slice(0, length))

    def _is_plain(self, rows: Rows) -> bool:
        return len(rows) == 2 and rows[0].dtype == self.q_dtype

    def _attend_decoded(self, piece: Piece, q: Value, rows: Rows, out: Value, is_first: bool) -> None:
        """A KV head at a time."""
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
    """Messages of a turn: keys and values as they are stored, and short partial results in one message.

    `agree` is called before the first of them.
    """

    def __init__(
        self,
        transport: Transport,
        buffers: Buffers,
        problem: Sizes,
        like: torch.Tensor,
        kv_dtypes: tuple[torch.dtype, ...],
        agree: Callable[[], None],
    ) -> None:
        super().__init__(transport, buffers, problem, like, transport.timeout_s)
        self.kv_dtypes = kv_dtypes
        self.agree = agree
        self._expected: set[int] = set()

    def expect(self, program: BoundProgram) -> None:
        """Start the receives of a program's only exchange before it computes: gloo is slow to find a late buffer."""
        exchanges = [instruction for instruction in program if isinstance(instruction, Exchange)]
        busy = [exchange for exchange in exchanges if exchange.sends or exchange.receives]
        if len(busy) == 1:
            self.post(busy[0].step, [], busy[0].receives)
            self._expected.add(busy[0].step)

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step; what lies in the cache is put together first."""
        if step in self._expected:
            receives = ()
        if sends or receives:
            self.agree()
            super().post(step, [(message, _outgoing(message, value)) for message, value in sends], receives)

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for a block."""
        value = super().receive(step, transfer)
        if transfer.block.kind == "out" and len(value) == 1:
            return value[0][..., :-1], value[0][..., -1:]
        return value

    def release(self, value: Value, /) -> None:
        """Keep buffers for the next block; parts of a message are no buffers."""
        if all(x.is_contiguous() for x in value):
            super().release(value)

    def _buffers(self, message: Message) -> Value:
        if _is_short(message):
            *rows, dim = message.shapes[0]
            return super()._buffers(message._replace(shapes=((*rows, dim + 1),)))
        if message.transfer.block.kind != "kv":
            return super()._buffers(message)
        return self.buffers.take(message.shapes, self.kv_dtypes, self.device)


def _outgoing(message: Message, value: Value) -> Value:
    if isinstance(value[0], CachedRows):
        return value[0].packed()
    return (torch.cat(value, -1),) if _is_short(message) else value


def _is_short(message: Message) -> bool:
    """A partial result that takes longer to announce than to copy: out and lse go side by side."""
    return message.transfer.block.kind == "out" and message.nbytes <= SHORT_BYTES


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)

"""How does a program of blocks read a cache, whose rows lie in several places and may be encoded?

To the executor a rank's keys and values are one block. `CachedRows` stands for it: attending takes views of the rows
where they lie, and only what is sent is put together. Rows of another type than the queries, or encoded ones, are
converted head by head as they are attended, so the whole is never there at once.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from ringspan.cache.storage import Rows
from ringspan.program.bind import BoundProgram, Exchange, Message
from ringspan.program.execute import Value
from ringspan.runtime.encoded import EncodedArithmetic, EncodedWire
from ringspan.runtime.wire import Buffers
from ringspan.schedule import Transfer
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


class TurnArithmetic(EncodedArithmetic):
    """Attends rows of a cache where they lie."""

    def rows_of(self, kv: Value, rows: slice) -> Value:
        """The keys and values of a piece."""
        return kv[0].rows(rows) if isinstance(kv[0], CachedRows) else super().rows_of(kv, rows)


class TurnWire(EncodedWire):
    """Messages of a turn: keys and values as they are stored, and short partial results in one message.

    `agree` is called before the first of them.
    """

    def __init__(
        self,
        transport: Transport,
        buffers: Buffers,
        like: torch.Tensor,
        kv_dtypes: tuple[torch.dtype, ...],
        agree: Callable[[], None],
    ) -> None:
        super().__init__(transport, buffers, like, transport.timeout_s, kv_dtypes)
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
            return torch.split(value[0], [value[0].shape[-1] - 1, 1], -1)
        return value

    def release(self, value: Value, /) -> None:
        """Keep buffers for the next block; parts of a message are no buffers."""
        if all(x.is_contiguous() for x in value):
            super().release(value)

    def _buffers(self, message: Message) -> Value:
        if _is_short(message):
            *rows, dim = message.shapes[0]
            return super()._buffers(message._replace(shapes=((*rows, dim + 1),)))
        return super()._buffers(message)


def _outgoing(message: Message, value: Value) -> Value:
    if isinstance(value[0], CachedRows):
        return value[0].packed()
    return (torch.cat(value, -1),) if _is_short(message) else value


def _is_short(message: Message) -> bool:
    """A partial result that takes longer to announce than to copy: out and lse go side by side."""
    return message.transfer.block.kind == "out" and message.nbytes <= SHORT_BYTES


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)

"""How does a program of blocks read a cache, and how do the blocks of a turn travel?

For the executor, a rank's keys and values are one block. `CachedRows` stands for it: attending takes views of the rows
in the cache's storage, and rows are copied together only to be sent.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence

import torch

from ringspan.cache._storage import Rows
from ringspan.program.bind import BoundProgram, Exchange, Message
from ringspan.program.execute import Value
from ringspan.runtime.codec import TensorRows
from ringspan.runtime.wire import TransportWire
from ringspan.schedule import Transfer

SHORT_BYTES = 2**18


class CachedRows:
    """This rank's keys and values of one layer in a turn; `packed` is given if they exist in one piece already."""

    def __init__(self, views: Sequence[Rows], packed: Rows | None) -> None:
        self.views = views
        self.starts: list[int] = []
        end = 0
        for view in views:
            self.starts.append(end)
            end += view[0].shape[2]
        self._packed = packed

    def rows(self, rows: slice) -> Rows:
        """Some rows; all of them lie in one view, since pieces are cut where views begin."""
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


class CacheSource:
    """Rows of this rank's block come from the cache, rows of other ranks' blocks from the tensors they sent."""

    def __init__(self) -> None:
        self._tensors = TensorRows()

    def rows(self, kv: Value, rows: slice) -> Value:
        return kv[0].rows(rows) if isinstance(kv[0], CachedRows) else self._tensors.rows(kv, rows)


class TurnWire:
    """Messages of a turn over a TransportWire: cached rows are packed, and a short out travels with its lse.

    `agree` is called before the first message.
    """

    def __init__(self, inner: TransportWire, agree: Callable[[], None]) -> None:
        self.agree = agree
        self._inner = inner
        self._expected: set[int] = set()

    def expect(self, program: BoundProgram) -> None:
        """Post the receives of a program's only exchange before it computes: gloo is slow to match a late receive."""
        exchanges = [instruction for instruction in program if isinstance(instruction, Exchange)]
        busy = [exchange for exchange in exchanges if exchange.sends or exchange.receives]
        if len(busy) == 1:
            self.post(busy[0].step, [], busy[0].receives)
            self._expected.add(busy[0].step)

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message]) -> None:
        if step in self._expected:
            receives = ()
        if sends or receives:
            self.agree()
            outgoing = [(message, _outgoing(message, value)) for message, value in sends]
            self._inner.post(step, outgoing, list(map(_as_one, receives)))

    def receive(self, step: int, transfer: Transfer) -> Value:
        value = self._inner.receive(step, transfer)
        if transfer.block.kind == "out" and len(value) == 1:
            return torch.split(value[0], [value[0].shape[-1] - 1, 1], -1)
        return value

    def sent(self, step: int, transfer: Transfer) -> None:
        self._inner.sent(step, transfer)

    def release(self, value: Value) -> None:
        """Keep buffers for the next block; the two parts of a split message are not buffers."""
        if all(x.is_contiguous() for x in value):
            self._inner.release(value)


def _as_one(message: Message) -> Message:
    if not _is_short(message):
        return message
    *rows, dim = message.shapes[0]
    return message._replace(shapes=((*rows, dim + 1),))


def _outgoing(message: Message, value: Value) -> Value:
    if isinstance(value[0], CachedRows):
        return value[0].packed()
    return (torch.cat(value, -1),) if _is_short(message) else value


def _is_short(message: Message) -> bool:
    """A partial result that costs less to copy than to announce twice: out and lse travel side by side."""
    return message.transfer.block.kind == "out" and message.nbytes <= SHORT_BYTES


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=2)

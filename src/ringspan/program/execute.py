"""How does one rank run its bound program? What simulator and runtime share.

The executor keeps named values: inputs it holds and its parts of sums. It knows blocks, head ranges and where a
contribution lands; it does not know arrays or messages. An `Arithmetic` computes (NumPy, or a kernel on tensors), a
`Wire` carries (a list, or a transport). It yields at every exchange, so that the simulator can hold all ranks in
lockstep while the runtime just goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ringspan.mask import Coverage
from ringspan.program.bind import BoundProgram, Compute, Exchange, Message, Shape, Sizes, Tile
from ringspan.program.pieces import Piece
from ringspan.schedule import ALL, AllMerged, Arrived, Block, Drop, Sent, Transfer

Value = tuple[Any, ...]
"""The arrays of a block, each (..., heads, seq, dim)."""


class Arithmetic(Protocol):
    """What must be known about arrays."""

    def new_sum(self, block: Block, shapes: tuple[Shape, ...], /) -> Value:
        """A sum of nothing."""

    def room(self, shapes: Sequence[Shape], /) -> Value:
        """Arrays that will be overwritten."""

    def merge(self, block: Block, into: Value, part: Value, /) -> None:
        """Add a part to a sum in place."""

    def merged(self, block: Block, parts: Sequence[Value], /) -> Value:
        """The sum of some parts, in arrays of its own."""

    def begin(self, piece: Piece, q: Value, kv: Value, /) -> Value:
        """The output of all queries after their first keys."""

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool, /) -> None:
        """Take a piece's keys into the running output of its queries; the first may overwrite it."""

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None, /
    ) -> tuple[Value, Value]:
        """The gradients with a piece's share added in place; one that is None begins with it, all of its rows."""


class Wire(Protocol):
    """What must be known about messages."""

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start all messages of a step."""

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for a message posted in that step."""

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Wait until a message has left."""

    def release(self, value: Value, /) -> None:
        """A received value is no longer needed; its buffers may be used again."""


class Event(NamedTuple):
    """One thing a rank did. Simulated and measured runs record the same events in the same order."""

    rank: int
    step: int
    action: Literal["send", "receive", "merge", "attend", "drop"]
    blocks: tuple[Block, ...]
    peer: int | None = None
    nbytes: int = 0
    pairs: int = 0
    coverage: Coverage | None = None


class RankState:
    """What one rank holds while it runs."""

    def __init__(self, rank: int, problem: Sizes, inputs: dict[Block, Value], arithmetic: Arithmetic) -> None:
        self.rank = rank
        self.problem = problem
        self.inputs = inputs
        self.arithmetic = arithmetic
        self.sums: dict[Block, Value] = {}
        self.leaving: dict[Block, Value] = {}  # parts on their way to an AllMerge

    def input(self, block: Block) -> Value:
        """A held input, or the heads of one."""
        value = self.inputs.get(block)
        return view_heads(self.inputs[block.whole], block.heads) if value is None else value

    def sum(self, block: Block) -> Value:
        """This rank's part of a sum, begun if need be; at home it is a view of the whole."""
        if block.owner in (self.rank, ALL):
            return view_heads(self._begun(block.whole), block.heads)
        return self._begun(block)

    def add(self, step: int, transfer: Transfer, part: Value) -> bool:  # noqa: ARG002
        """Merge an arrived part into this rank's; False if it was kept as this rank's, since there was none yet."""
        block = transfer.block
        if block.owner != self.rank and block not in self.sums:
            self.sums[block] = part
            return False
        self.arithmetic.merge(block, self.sum(block), part)
        return True

    def take(self, step: int, transfer: Transfer) -> Value:  # noqa: ARG002
        """What a message carries: a copy of an input's name, or all of a sum's part, which is then begun anew."""
        block = transfer.block
        if not block.is_sum:
            return self.input(block)
        return self.sums.pop(block) if block.owner != ALL else self.leave(block)

    def leave(self, block: Block) -> Value:
        """This rank's part of what all ranks are about to merge."""
        if block not in self.leaving:
            self.leaving[block] = self.sums.pop(block) if block in self.sums else self.new_sum(block)
        return self.leaving[block]

    def attend(self, tile: Tile) -> None:
        """Compute a tile and add it to its sums."""
        q, kv = self.input(tile.q), self.input(tile.kv)
        if tile.q.kind == "q":
            self._attend(tile, q, kv)
        else:
            self._differentiate(tile, q, kv)

    def _attend(self, tile: Tile, q: Value, kv: Value) -> None:
        (block,), (begins,), pieces, firsts = tile.sums, tile.begins, tile.pieces, tile.firsts
        if begins:
            self.sums[block] = self.arithmetic.begin(pieces[0], q, kv)
            if len(pieces) == 1:
                return
            pieces, firsts = pieces[1:], firsts[1:]
        out = self.sum(block)
        for piece, is_first in zip(pieces, firsts, strict=True):
            self.arithmetic.attend(piece, q, kv, out, is_first)

    def _differentiate(self, tile: Tile, q_grad: Value, kv: Value) -> None:
        dq, dkv = (None if begins else self.sum(block) for block, begins in zip(tile.sums, tile.begins, strict=True))
        for piece in tile.pieces:
            dq, dkv = self.arithmetic.attend_grad(piece, q_grad, kv, dq, dkv)
        for block, value, begins in zip(tile.sums, (dq, dkv), tile.begins, strict=True):
            if begins:
                assert value is not None
                self.sums[block] = value

    def new_sum(self, block: Block) -> Value:
        """A sum of nothing, of the block's size."""
        return self.arithmetic.new_sum(block, self.problem.block_shapes(block))

    def _begun(self, block: Block) -> Value:
        if block not in self.sums:
            self.sums[block] = self.new_sum(block)
        return self.sums[block]


def execute(
    program: BoundProgram, state: RankState, wire: Wire, record: Callable[[Event], None] | None = None
) -> Iterator[int]:
    """Run a program on a rank's state. Yields the step after each exchange has been posted."""
    rank = state.rank
    step = 0
    for instruction in program:
        match instruction:
            case Exchange():
                step, sends, receives = instruction
                if record is not None:
                    for transfer, _, nbytes in sends:
                        record(Event(rank, step, "send", (transfer.block,), transfer.dst, nbytes))
                wire.post(step, [(message, state.take(step, message.transfer)) for message in sends], receives)
                yield step
            case Compute():
                step, tiles = instruction
                for tile in tiles:
                    if record is not None:
                        blocks = (tile.q, tile.kv)
                        record(Event(rank, step, "attend", blocks, pairs=tile.pairs, coverage=tile.coverage))
                    state.attend(tile)
            case Arrived():
                posted, transfer = instruction
                value = wire.receive(posted, transfer)
                block = transfer.block
                if record is not None:
                    record(Event(rank, step, "merge" if block.is_sum else "receive", (block,), transfer.src))
                if not block.is_sum:
                    state.inputs[block] = value
                elif state.add(posted, transfer, value):
                    wire.release(value)
            case AllMerged():
                posted, block = instruction
                _merge_all(posted, block, state, wire)
                if record is not None:
                    record(Event(rank, step, "merge", (block,)))
            case Sent():
                wire.sent(*instruction)
            case Drop():
                (block,) = instruction
                wire.release(state.inputs.pop(block))
                if record is not None:
                    record(Event(rank, step, "drop", (block,)))


def view_heads(value: Value, heads: range | None) -> Value:
    """Some heads of a block's arrays, as views."""
    return value if heads is None else tuple(x[..., heads.start : heads.stop, :, :] for x in value)


def _merge_all(posted: int, block: Block, state: RankState, wire: Wire) -> None:
    """All ranks' parts in rank order, so that every rank has the same bits; then what was added here since."""
    own = state.leave(block)
    del state.leaving[block]
    parts = [
        own if peer == state.rank else wire.receive(posted, Transfer(block, peer, state.rank))
        for peer in range(state.problem.world_size)
    ]
    total = state.arithmetic.merged(block, parts)
    for part in parts[: state.rank] + parts[state.rank + 1 :]:
        wire.release(part)
    if block in state.sums:
        state.arithmetic.merge(block, total, state.sums[block])
    state.sums[block] = total

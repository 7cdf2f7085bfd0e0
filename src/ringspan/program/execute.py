"""How does one rank run its bound program? The simulator and the runtime share this executor.

The executor keeps named values: the inputs a rank holds and its parts of sums. It knows blocks, head ranges and which
sum a contribution is added to; it does not know array libraries or messages. An `Arithmetic` computes (NumPy, or a
kernel on tensors) and a `Wire` carries messages (a dictionary, or a transport). It yields at every exchange, so the
simulator can run all ranks in lockstep.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from ringspan.mask import Coverage
from ringspan.program.bind import BoundProgram, Compute, Exchange, Message, Tile
from ringspan.program.pieces import Piece
from ringspan.program.problem import Shape
from ringspan.schedule import ALL, SUMS, AllMerged, Arrived, Block, Drop, Sent, Transfer

Value = tuple[Any, ...]
"""The arrays of a block, each (..., heads, seq, dim)."""


class Arithmetic(Protocol):
    """Operations on arrays; NumPy and torch implement it."""

    def new_sum(self, block: Block, shapes: tuple[Shape, ...], /) -> Value:
        """An empty sum."""

    def room(self, shapes: Sequence[Shape], /) -> Value:
        """Uninitialised arrays."""

    def merge(self, block: Block, into: Value, part: Value, /) -> None:
        """Add a part to a sum in place."""

    def merged(self, block: Block, parts: Sequence[Value], /) -> Value:
        """The sum of parts, in new arrays."""

    def begin(self, piece: Piece, q: Value, kv: Value, /) -> Value:
        """The output of all queries over the first keys they see."""

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool, /) -> None:
        """Merge a piece into the running output of its queries; the first piece may overwrite it."""

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None, /
    ) -> tuple[Value, Value]:
        """Add a piece's gradients in place; one that is None starts with this piece, which covers all its rows."""


class Wire(Protocol):
    """Messages; a network of the simulator or a transport implements it."""

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start all messages of a step."""

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for a message posted in that step."""

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Wait until a message has left."""

    def release(self, value: Value, /) -> None:
        """The buffers of a received value may be reused."""


class Event(NamedTuple):
    """One action of a rank. Simulated and measured runs record the same events in the same order."""

    rank: int
    step: int
    action: Literal["send", "receive", "merge", "attend", "drop"]
    blocks: tuple[Block, ...]
    peer: int | None = None
    nbytes: int = 0
    pairs: int = 0
    coverage: Coverage | None = None


class BlockSizes(NamedTuple):
    """The sizes of blocks that running a program needs; `block_shapes` caches its results."""

    world_size: int
    block_shapes: Callable[[Block], tuple[Shape, ...]]


class RankState:
    """The inputs and sums that one rank holds while it runs a program."""

    def __init__(self, rank: int, sizes: BlockSizes, inputs: dict[Block, Value], arithmetic: Arithmetic) -> None:
        self.rank = rank
        self.sizes = sizes
        self.inputs = inputs
        self.arithmetic = arithmetic
        self.sums: dict[Block, Value] = {}
        self.leaving: dict[Block, Value] = {}  # parts on their way to an AllMerge

    def input(self, block: Block) -> Value:
        """A held input, or the heads of one."""
        value = self.inputs.get(block)
        return view_heads(self.inputs[block.whole], block.heads) if value is None else value

    def sum(self, block: Block) -> Value:
        """This rank's part of a sum, created if needed; for a sum this rank owns, a view of it."""
        is_view = block.heads is not None and block.owner in (self.rank, ALL)
        held = block.whole if is_view else block
        if held not in self.sums:
            self.sums[held] = self.new_sum(held)
        return view_heads(self.sums[held], block.heads) if is_view else self.sums[held]

    def add(self, step: int, transfer: Transfer, part: Value) -> bool:  # noqa: ARG002
        """Merge an arrived part into this rank's; False if this rank had none and keeps the arrived arrays."""
        block = transfer.block
        if block.owner != self.rank and block not in self.sums:
            self.sums[block] = part
            return False
        self.arithmetic.merge(block, self.sum(block), part)
        return True

    def take(self, step: int, transfer: Transfer) -> Value:  # noqa: ARG002
        """The value a message carries: an input, or this rank's part of a sum, which this rank then no longer has."""
        block = transfer.block
        if block.kind not in SUMS:
            return self.input(block)
        return self.sums.pop(block) if block.owner != ALL else self.leave(block)

    def leave(self, block: Block) -> Value:
        """This rank's part of a sum that all ranks are about to merge."""
        if block not in self.leaving:
            self.leaving[block] = self.sums.pop(block) if block in self.sums else self.new_sum(block)
        return self.leaving[block]

    def attend(self, tile: Any) -> None:
        """Compute a tile, as this mode binds tiles, and add it to its sums."""
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
        (of_dq, of_dkv), (begins_dq, begins_dkv) = tile.sums, tile.begins
        dq = None if begins_dq else self.sum(of_dq)
        dkv = None if begins_dkv else self.sum(of_dkv)
        for piece in tile.pieces:
            dq, dkv = self.arithmetic.attend_grad(piece, q_grad, kv, dq, dkv)
        assert dq is not None
        assert dkv is not None
        if begins_dq:
            self.sums[of_dq] = dq
        if begins_dkv:
            self.sums[of_dkv] = dkv

    def new_sum(self, block: Block) -> Value:
        """An empty sum of the block's size."""
        return self.arithmetic.new_sum(block, self.sizes.block_shapes(block))


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
                outgoing = []
                for message in sends:
                    transfer, _, nbytes = message
                    if record is not None:
                        record(Event(rank, step, "send", (transfer.block,), transfer.dst, nbytes))
                    outgoing.append((message, state.take(step, transfer)))
                wire.post(step, outgoing, receives)
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
                    record(Event(rank, step, "merge" if block.kind in SUMS else "receive", (block,), transfer.src))
                if block.kind not in SUMS:
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
    """Merge all ranks' parts in rank order, so all ranks get the same bits; then add this rank's later parts."""
    own = state.leave(block)
    del state.leaving[block]
    parts = [
        own if peer == state.rank else wire.receive(posted, Transfer(block, peer, state.rank))
        for peer in range(state.sizes.world_size)
    ]
    total = state.arithmetic.merged(block, parts)
    for part in parts[: state.rank] + parts[state.rank + 1 :]:
        wire.release(part)
    if block in state.sums:
        state.arithmetic.merge(block, total, state.sums[block])
    state.sums[block] = total

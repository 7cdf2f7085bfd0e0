"""How does one rank run attention for real: with tensors, a kernel and a transport?

The bound program and the executor are those of the simulator. This file adds what they leave open: tensors for arrays,
a kernel for the arithmetic, messages for the wire, and buffers that are used again. What a signature needs is prepared
once and cached, so that a repeated call only walks its program.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch

from ringspan.algorithms import Direction, Mesh, Side, build_schedule
from ringspan.errors import TransportError
from ringspan.execute import Arithmetic, Event, RankState, Value, Wire, execute
from ringspan.grid import Growth, bind_grid
from ringspan.kernels.base import Gradients, Kernel, Merged
from ringspan.layout import Layout
from ringspan.nodes import TreeState
from ringspan.pieces import Piece
from ringspan.schedule import ALL, Block, Schedule, Transfer, compile_rank, validate, visible_blocks
from ringspan.softmax import Partial, accumulator_dtype, merge_
from ringspan.tiles import BoundProgram, LocalRows, Message, Problem, Shape, bind, local_rows
from ringspan.transports.base import Handle, Receive, Send, Transport

_KEPT_CALLS = 2
_NOTHING = nullcontext()
_SLAB_BYTES = {"cpu": 2 * 2**20, "cuda": 2**28}
"""What a kernel may return at once. A part is as large as the output of its piece; a CPU gains nothing from doing all
of it in one call, while a GPU wants enough work in each."""


class Prepared(NamedTuple):
    """All that one signature needs on one rank; `growth` where sums are trees."""

    problem: Problem
    schedule: Schedule
    program: BoundProgram
    growth: Growth | None = None

    def state(self, rank: int, inputs: dict[Block, Value], arithmetic: Arithmetic) -> RankState:
        """What the rank holds when it begins."""
        if self.growth is None:
            return RankState(rank, self.problem, inputs, arithmetic)
        return TreeState(rank, self.problem, inputs, arithmetic, self.growth)


@lru_cache(maxsize=256)
def prepare(
    problem: Problem,
    rank: int,
    algorithm: str,
    mesh: Mesh | None,
    direction: Direction | None,
    backward: Side | None = None,
    at_once: int | None = None,
) -> Prepared:
    """Build, prove, compile and bind the schedule of a signature.

    With `at_once` sums are trees over the tiles of the grid, and a kernel call takes up to so many tiles of queries.
    """
    visible = visible_blocks(problem.mask, problem.layout, problem.kv_layout)
    schedule = build_schedule(
        algorithm,
        visible,
        heads=problem.shapes.heads,
        mesh=mesh,
        direction=direction,
        backward=backward,
        route="follow" if at_once is None else "straight",
    )
    validate(schedule, visible)
    if at_once is not None:
        return Prepared(problem, schedule, *bind_grid(schedule, rank, problem, at_once))
    return Prepared(problem, schedule, bind(compile_rank(schedule, rank), problem))


def run_forward(
    prepared: Prepared,
    q: torch.Tensor,
    *kv: torch.Tensor,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Partial:
    """This rank's out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq), in the accumulator type.

    `kv` is k and v, or the four tensors that stand for them if they are encoded.
    """
    inputs = {Block("q", rank): (q,)} | _kv_inputs(prepared.problem.kv_layout, rank, *kv)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    out, lse = state.sum(Block("out", rank))
    return Partial(out, lse.squeeze(-1))


def run_backward(
    prepared: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    *,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Gradients:
    """This rank's dq, dk and dv, in the accumulator type; those of replicated keys are its own share of the sum."""
    dout, out, lse = merged
    queries = (q, dout, out, lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
    layout = prepared.problem.kv_layout
    inputs = {Block("q_grad", rank): queries} | _kv_inputs(layout, rank, k, v)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    (dq,) = state.sum(Block("dq", rank))
    dkv = state.sum(Block("dkv", rank))
    if layout.replicated:
        dkv = _join(local_rows(layout, rank), dkv, state.sum(Block("dkv", ALL)))
    return Gradients(dq, *dkv)


def _kv_inputs(layout: Layout, rank: int, *kv: torch.Tensor) -> dict[Block, Value]:
    if not layout.replicated:
        return {Block("kv", rank): kv}
    own, replicated = local_rows(layout, rank)
    return {
        Block("kv", rank): tuple(x[..., own, :] for x in kv),
        Block("kv", ALL): tuple(x[..., replicated, :] for x in kv),
    }


def _join(rows: LocalRows, own: Value, replicated: Value) -> Value:
    """A rank's shard of a block of its own and the one that all ranks hold."""

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(*x.shape[:-2], x.shape[-2] + y.shape[-2], x.shape[-1])
        whole[..., rows.own, :], whole[..., rows.replicated, :] = x, y
        return whole

    return tuple(map(joined, own, replicated))


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Sums are kept in a type of our choice. Where there is no autocast nothing is entered, which takes its time."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING


class TorchArithmetic:
    """Sums of tensors; a kernel attends one piece at a time."""

    merge_parts = staticmethod(merge_)

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor) -> None:
        self.kernel = kernel
        self.scale = scale
        self.dtype = accumulator_dtype(like.dtype)
        self.device = like.device
        self._queries, self._out = _LastRows(), _LastRows()

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        """Nothing summed yet: out = 0 with lse = -inf, or zero gradients."""
        value = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        if block.kind == "out":
            value[1].fill_(-torch.inf)
        return value

    def room(self, shapes: Sequence[Shape]) -> Value:
        """What will be overwritten."""
        return tuple(torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes)

    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place."""
        if block.kind == "out":
            self.merge_parts(Partial(into[0], into[1].squeeze(-1)), Partial(part[0], part[1].squeeze(-1)))
        else:
            for total, addend in zip(into, part, strict=True):
                total += addend

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Forward: attend a piece of all queries; what the kernel returns is the running output."""
        (queries,), (keys, values) = q, _rows(kv, piece.kv)
        if not _is_whole(queries, keys, values):
            value = self.room([(*queries.shape[:-1], dim) for dim in (values.shape[-1], 1)])
            self.attend(piece, q, kv, value, True)
            return value
        part = self.kernel.forward(queries, keys, values, piece, self.scale)
        return part.out, part.lse.unsqueeze(-1)

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Forward: attend a piece and merge it into the running output of its queries."""
        (queries,), (keys, values) = self._queries.of(q, piece.q), _rows(kv, piece.kv)
        sums, column = self._out.of(out, piece.q)
        for of_q, of_kv in _slabs(piece, queries, keys, values):
            operands = _at(of_q, queries), _at(of_kv, keys), _at(of_kv, values)
            part = self.kernel.forward(*operands, piece, self.scale)
            total, lse = _at(of_q, sums), _at(of_q, column).squeeze(-1)
            if is_first:
                total.copy_(part.out)
                lse.copy_(part.lse)
            else:
                self.merge_parts(Partial(total, lse), part)

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Backward: add a piece's share of dq, dk and dv; where it begins a sum, what the kernel returns is the sum."""
        queries, dout, out, lse = _rows(q_grad, piece.q)
        keys, values = _rows(kv, piece.kv)
        if dq is None and dkv is None and _is_whole(queries, keys, values):
            part = self.kernel.backward(queries, keys, values, Merged(dout, out, lse.squeeze(-1)), piece, self.scale)
            return (part.dq,), (part.dk, part.dv)
        begins_q, begins_kv = dq is None, dkv is None
        dq = dq or self.room([queries.shape])
        dkv = dkv or self.room([keys.shape, values.shape])
        (dqs,), (dks, dvs) = _rows(dq, piece.q), _rows(dkv, piece.kv)
        group = queries.shape[1] // keys.shape[1]
        for of_q, of_kv in _slabs(piece, queries, keys, values):
            operands = _at(of_q, queries), _at(of_kv, keys), _at(of_kv, values)
            merged = Merged(_at(of_q, dout), _at(of_q, out), _at(of_q, lse).squeeze(-1))
            part = self.kernel.backward(*operands, merged, piece, self.scale)
            _add(_at(of_q, dqs), part.dq, begins_q)
            is_first_of_group = not of_q or of_q[1].start % group == 0
            for total, addend in ((dks, part.dk), (dvs, part.dv)):
                _add(_at(of_kv, total), addend, begins_kv and is_first_of_group)
        return dq, dkv


def _add(total: torch.Tensor, part: torch.Tensor, is_first: bool) -> None:
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


_Index = tuple[slice, ...]


def _heads_at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """Of how many heads, counted over all batch rows, a kernel's result or its copy of k is within a slab."""
    slab = _SLAB_BYTES[q.device.type]
    at_once = slab // max(1, 4 * q.shape[2] * v.shape[3])
    if q.dtype != accumulator_dtype(q.dtype):  # a kernel may copy k, once for all heads that share it
        group = q.shape[1] // k.shape[1]
        at_once = min(at_once, group * max(1, slab // max(1, 4 * k.shape[2] * k.shape[3])))
    return at_once


def _is_whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether one call is best for what has no sum yet: its result is needed anyway, but copies it makes are not."""
    return q.dtype == accumulator_dtype(q.dtype) or _heads_at_once(q, k, v) >= q.shape[0] * q.shape[1]


_WHOLE: tuple[tuple[_Index, _Index], ...] = (((), ()),)


def _slabs(piece: Piece, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterable[tuple[_Index, _Index]]:
    """The batch rows and heads of a piece, a slab at a time; nothing to take apart is one slab."""
    at_once = _heads_at_once(q, k, v)
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
    """A view; all of it as it is, since even a view of everything takes its time."""
    return x[index] if index else x


def _rows(value: Value, rows: slice) -> Value:
    """Some rows of a block's tensors, as views; all of them as they are."""
    return value if rows.stop - rows.start == value[0].shape[2] else tuple([x[:, :, rows] for x in value])


class _LastRows:
    """Some rows of a block, kept until others are asked for: a ring wants the same ones of its own step after step."""

    def __init__(self) -> None:
        self._value: Value = ()
        self._rows = slice(0)
        self._views: Value = ()

    def of(self, value: Value, rows: slice) -> Value:
        """Views of those rows."""
        if value is not self._value or rows != self._rows:
            self._value, self._rows, self._views = value, rows, _rows(value, rows)
        return self._views


class Buffers:
    """Receive buffers that outlive a call: a ring needs two, and asking for new ones costs more than filling them."""

    def __init__(self) -> None:
        self._shelves: defaultdict[tuple[object, ...], _Shelf] = defaultdict(_Shelf)
        self._num_calls = 0

    def take(self, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> Value:
        """Contiguous tensors of these shapes and types, with any contents."""
        shelf = self._shelves[shapes, dtypes, device]
        shelf.last_used = self._num_calls
        shelf.num_taken += 1
        if shelf.spare:
            return shelf.spare.pop()
        return tuple(
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
        )

    def put(self, value: Value) -> None:
        """Give tensors back, or others in their place; there are never more than were taken."""
        shelf = self._shelves[tuple([x.shape for x in value]), tuple([x.dtype for x in value]), value[0].device]
        if shelf.num_taken:
            shelf.num_taken -= 1
            shelf.spare.append(value)

    def trim(self) -> None:
        """A call is over: free the buffers that the last few calls had no use for."""
        self._num_calls += 1
        oldest = self._num_calls - _KEPT_CALLS
        for key in [key for key, shelf in self._shelves.items() if shelf.last_used < oldest]:
            del self._shelves[key]


class _Shelf:
    """Buffers of one kind."""

    __slots__ = ("last_used", "num_taken", "spare")

    def __init__(self) -> None:
        self.spare: list[Value] = []
        self.num_taken = 0
        self.last_used = 0


class TransportWire:
    """The blocks of one call as messages, one for each tensor: packing K and V into one would cost a copy of both."""

    def __init__(self, transport: Transport, buffers: Buffers, like: torch.Tensor, timeout_s: float) -> None:
        self.transport = transport
        self.buffers = buffers
        self.dtype = like.dtype
        self.device = like.device
        self.timeout_s = timeout_s
        self._incoming: dict[tuple[int, Transfer], tuple[Sequence[Handle], Value]] = {}
        self._outgoing: dict[tuple[int, Transfer], tuple[Sequence[Handle], Value]] = {}

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step."""
        if not sends and not receives:
            return
        outgoing = [(message.transfer, tuple([x.contiguous() for x in value])) for message, value in sends]
        incoming = [(message.transfer, self._buffers(message)) for message in receives]
        try:
            posted = self.transport.exchange(
                [Send(transfer.dst, x) for transfer, value in outgoing for x in value],
                [Receive(transfer.src, buffer) for transfer, value in incoming for buffer in value],
            )
        except TransportError as error:
            blocks = ", ".join(str(message.transfer) for message, _ in sends)
            raise self._failed(step, f"sending {blocks}" if sends else "receiving", error) from None
        for pending, messages, handles in (
            (self._outgoing, outgoing, posted.sends),
            (self._incoming, incoming, posted.receives),
        ):
            first = 0
            for transfer, value in messages:
                pending[step, transfer] = handles[first : first + len(value)], value
                first += len(value)

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for all tensors of a block."""
        handles, value = self._incoming.pop((step, transfer))
        self._wait(handles, step, transfer, value)
        return value

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Wait until all tensors of a block have left. A sum that has left is nobody's any more."""
        handles, value = self._outgoing.pop((step, transfer))
        self._wait(handles, step, transfer, value)
        block = transfer.block
        if block.is_sum and block.owner != ALL and all(x.untyped_storage().nbytes() == x.nbytes for x in value):
            self.buffers.put(value)

    def release(self, value: Value, /) -> None:
        """Keep the buffers of a block for the next one."""
        self.buffers.put(value)

    def _buffers(self, message: Message) -> Value:
        block, wide = message.transfer.block, accumulator_dtype(self.dtype)
        dtypes = (wide if block.is_sum else self.dtype,) * len(message.shapes)
        if block.kind == "q_grad":
            dtypes = (*dtypes[:-1], wide)  # the lse
        return self.buffers.take(message.shapes, dtypes, self.device)

    def _wait(self, handles: Sequence[Handle], step: int, transfer: Transfer, value: Value) -> None:
        try:
            for handle in handles:
                handle.wait(self.timeout_s)
        except TransportError as error:
            block, src, dst = transfer
            is_sender = src == self.transport.rank
            what = f"sending {block} to rank {dst}" if is_sender else f"waiting for {block} from rank {src}"
            nbytes = sum(x.nbytes for x in value)
            raise self._failed(step, f"{what} ({nbytes} bytes)", error) from None

    def _failed(self, step: int, what: str, error: TransportError) -> TransportError:
        return TransportError(f"rank {self.transport.rank}, step {step}, {what}: {error}")

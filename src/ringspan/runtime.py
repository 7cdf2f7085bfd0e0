"""How does one rank run attention for real: with tensors, a kernel and a transport?

The bound program and the executor are those of the simulator. This file adds what they leave open: tensors for arrays,
a kernel for the arithmetic, messages for the wire, and buffers that are used again. What a signature needs is prepared
once and cached, so that a repeated call only walks its program.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ringspan.algorithms import Direction, Mesh, build_schedule
from ringspan.errors import TransportError
from ringspan.execute import Arithmetic, Event, RankState, Value, Wire, execute
from ringspan.kernels.base import Kernel
from ringspan.layout import Layout
from ringspan.pieces import Piece
from ringspan.schedule import ALL, Block, Schedule, Transfer, compile_rank, validate, visible_blocks
from ringspan.softmax import Partial, accumulator_dtype, merge_
from ringspan.tiles import BoundProgram, Message, Problem, Shape, Sizes, bind, local_rows
from ringspan.transports.base import Handle, Receive, Send, Transport

_KEPT_CALLS = 2
_SLAB_BYTES = 2 * 2**20  # what a kernel may return at once; a part is as large as the output of its piece


class Prepared(NamedTuple):
    """All that one signature needs on one rank."""

    problem: Problem
    schedule: Schedule
    program: BoundProgram


@lru_cache(maxsize=256)
def prepare(problem: Problem, rank: int, algorithm: str, mesh: Mesh | None, direction: Direction | None) -> Prepared:
    """Build, prove, compile and bind the schedule of a signature."""
    visible = visible_blocks(problem.mask, problem.layout, problem.kv_layout)
    schedule = build_schedule(algorithm, visible, heads=problem.shapes.heads, mesh=mesh, direction=direction)
    validate(schedule, visible)
    return Prepared(problem, schedule, bind(compile_rank(schedule, rank), problem))


def run_forward(
    prepared: Prepared,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Partial:
    """This rank's out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq), in the accumulator type."""
    inputs = {Block("q", rank): (q,)} | _kv_inputs(prepared.problem.kv_layout, rank, k, v)
    state = RankState(rank, prepared.problem, inputs, backward=False, arithmetic=arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    out, lse = state.sums[Block("out", rank)]
    return Partial(out, lse.squeeze(-1))


def _kv_inputs(layout: Layout, rank: int, k: torch.Tensor, v: torch.Tensor) -> dict[Block, Value]:
    if not layout.replicated:
        return {Block("kv", rank): (k, v)}
    own, replicated = local_rows(layout, rank)
    return {
        Block("kv", rank): (k[..., own, :], v[..., own, :]),
        Block("kv", ALL): (k[..., replicated, :], v[..., replicated, :]),
    }


class TorchArithmetic:
    """Sums of tensors; a kernel attends one piece at a time."""

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor) -> None:
        self.kernel = kernel
        self.scale = scale
        self.dtype = accumulator_dtype(like.dtype)
        self.device = like.device

    def new_sum(self, block: Block, shapes: tuple[Shape, ...]) -> Value:
        """Nothing summed yet: out = 0 with lse = -inf, or zero gradients."""
        value = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        if block.kind == "out":
            value[1].fill_(-torch.inf)
        return value

    def merge(self, block: Block, into: Value, part: Value) -> None:
        """Add a part to a sum in place."""
        if block.kind == "out":
            merge_(Partial(into[0], into[1].squeeze(-1)), Partial(part[0], part[1].squeeze(-1)))
        else:
            for total, addend in zip(into, part, strict=True):
                total += addend

    def attend(self, piece: Piece, q: Value, kv: Value, out: Value, is_first: bool) -> None:
        """Forward: attend a piece and merge it into the running output of its queries."""
        (queries,), (keys, values), sums = _rows(q, piece.q), _rows(kv, piece.kv), _rows(out, piece.q)
        if piece.rows is None:
            for q_heads, kv_heads in _slabs(queries, keys, values):
                part = self.kernel.forward(queries[q_heads], keys[kv_heads], values[kv_heads], piece, self.scale)
                self._take(tuple(x[q_heads] for x in sums), part, is_first)
            return
        for row in piece.rows:
            queries_of, keys_of, values_of, *sums_of = (x[row : row + 1] for x in (queries, keys, values, *sums))
            self._take(tuple(sums_of), self.kernel.forward(queries_of, keys_of, values_of, piece, self.scale), False)

    def _take(self, sums: Value, part: Partial, is_first: bool) -> None:
        out, lse = sums
        if is_first:
            out.copy_(part.out)
            lse.copy_(part.lse.unsqueeze(-1))
        else:
            merge_(Partial(out, lse.squeeze(-1)), part)

    def attend_grad(self, *_: object) -> None:
        """Backward is not built yet; the public call refuses it before anything runs."""
        raise AssertionError("the runtime has no backward yet")


_Index = tuple[slice, ...]


def _slabs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Iterator[tuple[_Index, _Index]]:
    """Query heads and their KV heads, as many at a time as keep a kernel's result, or its copy of k, within a slab."""
    batch, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    largest = max(1, batch * max(group * rows * v.shape[3], k.shape[2] * k.shape[3]) * 4)
    at_once = max(1, min(kv_heads, _SLAB_BYTES // largest))
    if at_once == kv_heads:
        yield (), ()
        return
    for first in range(0, kv_heads, at_once):
        stop = min(first + at_once, kv_heads)
        yield (slice(None), slice(first * group, stop * group)), (slice(None), slice(first, stop))


def _rows(value: Value, rows: slice) -> Value:
    """Some rows of a block's tensors, as views; all of them as they are."""
    length = rows.stop - rows.start
    return value if length == value[0].shape[-2] else tuple(x.narrow(-2, rows.start, length) for x in value)


class Buffers:
    """Receive buffers that outlive a call: a ring needs two, and asking for new ones costs more than filling them."""

    def __init__(self) -> None:
        self._spare: defaultdict[tuple[object, ...], list[Value]] = defaultdict(list)
        self._last_used: dict[tuple[object, ...], int] = {}
        self._num_calls = 0

    def take(self, shapes: tuple[Shape, ...], dtype: torch.dtype, device: torch.device) -> Value:
        """Contiguous tensors of these shapes, with any contents."""
        key = (*shapes, dtype, device)
        self._last_used[key] = self._num_calls
        spare = self._spare[key]
        return spare.pop() if spare else tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)

    def put(self, value: Value) -> None:
        """Give tensors back."""
        self._spare[*(x.shape for x in value), value[0].dtype, value[0].device].append(value)

    def trim(self) -> None:
        """A call is over: free the buffers that the last few calls had no use for."""
        self._num_calls += 1
        for key in [key for key, used in self._last_used.items() if used < self._num_calls - _KEPT_CALLS]:
            del self._last_used[key]
            self._spare.pop(key, None)


class TransportWire:
    """The blocks of one call as messages, one for each tensor: packing K and V into one would cost a copy of both."""

    def __init__(
        self, transport: Transport, buffers: Buffers, problem: Sizes, like: torch.Tensor, timeout_s: float
    ) -> None:
        self.transport = transport
        self.buffers = buffers
        self.problem = problem
        self.dtype = like.dtype
        self.device = like.device
        self.timeout_s = timeout_s
        self._incoming: dict[tuple[int, Transfer], tuple[Sequence[Handle], Value]] = {}
        self._outgoing: dict[tuple[int, Transfer], Sequence[Handle]] = {}

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step."""
        if not sends and not receives:
            return
        outgoing = [(message.transfer, [x.contiguous() for x in value]) for message, value in sends]
        incoming = [(message.transfer, self._buffers(message)) for message in receives]
        try:
            posted = self.transport.exchange(
                [Send(transfer.dst, x) for transfer, value in outgoing for x in value],
                [Receive(transfer.src, buffer) for transfer, value in incoming for buffer in value],
            )
        except TransportError as error:
            blocks = ", ".join(str(message.transfer) for message, _ in sends)
            raise self._failed(step, f"sending {blocks}" if sends else "receiving", error) from None
        send_handles, receive_handles = iter(posted.sends), iter(posted.receives)
        for transfer, tensors in outgoing:
            self._outgoing[step, transfer] = [next(send_handles) for _ in tensors]
        for transfer, value in incoming:
            self._incoming[step, transfer] = ([next(receive_handles) for _ in value], value)

    def receive(self, step: int, transfer: Transfer, /) -> Value:
        """Wait for all tensors of a block."""
        handles, value = self._incoming.pop((step, transfer))
        self._wait(handles, step, transfer, f"waiting for {transfer.block} from rank {transfer.src}")
        return value

    def sent(self, step: int, transfer: Transfer, /) -> None:
        """Wait until all tensors of a block have left."""
        self._wait(
            self._outgoing.pop((step, transfer)), step, transfer, f"sending {transfer.block} to rank {transfer.dst}"
        )

    def release(self, value: Value, /) -> None:
        """Keep the buffers of a block for the next one."""
        self.buffers.put(value)

    def _buffers(self, message: Message) -> Value:
        dtype = accumulator_dtype(self.dtype) if message.transfer.block.is_sum else self.dtype
        return self.buffers.take(message.shapes, dtype, self.device)

    def _wait(self, handles: Sequence[Handle], step: int, transfer: Transfer, what: str) -> None:
        try:
            for handle in handles:
                handle.wait(self.timeout_s)
        except TransportError as error:
            nbytes = self.problem.block_bytes(transfer.block)
            raise self._failed(step, f"{what} ({nbytes} bytes)", error) from None

    def _failed(self, step: int, what: str, error: TransportError) -> TransportError:
        return TransportError(f"rank {self.transport.rank}, step {step}, {what}: {error}")

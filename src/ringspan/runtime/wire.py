"""How do the blocks of a call travel as messages, and in which buffers do they arrive?

`TransportWire` is the runtime's `Wire` for the executor; `Buffers` keeps receive buffers from call to call.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from operator import attrgetter

import torch

from ringspan.errors import TransportError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.program.bind import Message
from ringspan.program.execute import Value
from ringspan.program.problem import Shape
from ringspan.schedule import ALL, SUMS, Transfer
from ringspan.transports.base import MessageHandle, Receive, Send, Transport

_KEPT_CALLS = 2
_SHAPE_AND_DTYPE = attrgetter("shape", "dtype")


class Buffers:
    """Receive buffers that outlive a call: allocating new ones would cost more than filling them."""

    def __init__(self) -> None:
        self._shelves: defaultdict[tuple[object, ...], _Shelf] = defaultdict(_Shelf)
        self._num_calls = 0

    def take(self, shapes: tuple[Shape, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> Value:
        """Contiguous, uninitialised tensors of these shapes and dtypes."""
        shelf = self._shelves[tuple(zip(shapes, dtypes, strict=True)), device]
        shelf.last_used = self._num_calls
        shelf.num_taken += 1
        if shelf.spare:
            return shelf.spare.pop()
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            return tuple(
                torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)
            )

    def put(self, value: Value) -> None:
        """Return tensors of the same shapes and dtypes as were taken; no more are kept than were taken."""
        shelf = self._shelves[tuple(map(_SHAPE_AND_DTYPE, value)), value[0].device]
        if shelf.num_taken:
            shelf.num_taken -= 1
            shelf.spare.append(value)

    def trim(self) -> None:
        """Called at the end of a call: free the buffers that the last few calls did not use."""
        self._num_calls += 1
        oldest = self._num_calls - _KEPT_CALLS
        for key, shelf in list(self._shelves.items()):
            if shelf.last_used < oldest:
                del self._shelves[key]


class _Shelf:
    """Spare buffers of one combination of shapes, dtypes and device."""

    __slots__ = ("last_used", "num_taken", "spare")

    def __init__(self) -> None:
        self.spare: list[Value] = []
        self.num_taken = 0
        self.last_used = 0


class TransportWire:
    """The blocks of one call as messages, one per tensor: packing K and V into one message would copy both.

    `kv_dtypes` are the dtypes of the tensors of a kv block, if they are not those of q.
    """

    def __init__(
        self,
        transport: Transport,
        buffers: Buffers,
        like: torch.Tensor,
        timeout_s: float | None,
        kv_dtypes: tuple[torch.dtype, ...] | None = None,
    ) -> None:
        self.transport = transport
        self.buffers = buffers
        self.dtype = like.dtype
        self.device = like.device
        self.timeout_s = timeout_s
        self.kv_dtypes = kv_dtypes
        self._incoming: dict[tuple[int, Transfer], tuple[Sequence[MessageHandle], Value]] = {}
        self._outgoing: dict[tuple[int, Transfer], tuple[Sequence[MessageHandle], Value]] = {}

    def post(self, step: int, sends: Sequence[tuple[Message, Value]], receives: Sequence[Message], /) -> None:
        """Start the messages of a step."""
        if not sends and not receives:
            return
        outgoing, to_send = [], list[Send]()
        for message, value in sends:
            contiguous = tuple(map(torch.Tensor.contiguous, value))
            outgoing.append((message.transfer, contiguous))
            to_send.extend(map(partial(Send, message.transfer.dst), contiguous))
        incoming, to_receive = [], list[Receive]()
        for message in receives:
            buffers = self._buffers(message)
            incoming.append((message.transfer, buffers))
            to_receive.extend(map(partial(Receive, message.transfer.src), buffers))
        try:
            posted = self.transport.exchange(to_send, to_receive)
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
        """Wait until all tensors of a block have left. The memory of a sum that has left becomes a receive buffer."""
        handles, value = self._outgoing.pop((step, transfer))
        self._wait(handles, step, transfer, value)
        block = transfer.block
        if block.kind in SUMS and block.owner != ALL and all(x.untyped_storage().nbytes() == x.nbytes for x in value):
            self.buffers.put(value)

    def release(self, value: Value, /) -> None:
        """Keep the buffers of a block for the next one."""
        self.buffers.put(value)

    def _buffers(self, message: Message) -> Value:
        block, wide = message.transfer.block, accumulator_dtype(self.dtype)
        dtypes = (wide if block.kind in SUMS else self.dtype,) * len(message.shapes)
        if block.kind == "q_grad":
            dtypes = (*dtypes[:-1], wide)  # the lse
        elif block.kind == "kv" and self.kv_dtypes is not None:
            dtypes = self.kv_dtypes
        return self.buffers.take(message.shapes, dtypes, self.device)

    def _wait(self, handles: Sequence[MessageHandle], step: int, transfer: Transfer, value: Value) -> None:
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

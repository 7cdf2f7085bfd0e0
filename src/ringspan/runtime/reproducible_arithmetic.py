"""How are tensors summed so that the bits depend neither on the rest of the call nor on the number of threads?

The kernel computes each head and block of rows by itself, so the result of a cell does not depend on its neighbours.
Three things would, and this file prevents them:

- Vectorised exp and logaddexp round differently in the remainder of a loop than in its body. They are applied to
  contiguous numbers without a remainder, and to no more at a time than one thread takes (`merge_steadily`).
- The matrix library cuts a product into as many parts as there are threads, which changes its bits. So each kernel call
  runs with one thread, and several threads take different heads (`on_single_threads`).
- On some CPUs a matrix product rounds differently if a row does not begin at a vector boundary. So every head and every
  row begins at a multiple of ALIGNMENT bytes: other tensors are copied, and head_dim is padded with zeros, which add
  nothing (`_Aligned`).

One call for several tiles of queries is faster. Its rows usually have the same bits as in single calls, but no library
promises this, so it is tried on this machine first (`tiles_at_once`).
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, KernelGradients, KernelRequest, Merged
from ringspan.kernels.softmax import Partial, accumulator_dtype, merge_steadily
from ringspan.program.execute import Value
from ringspan.program.pieces import Piece, PieceKind
from ringspan.program.reproducible.tree import TILE
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.scratch import Scratch

ALIGNMENT = 64
"""Bytes: the longest vector of a CPU, and the alignment of torch's own tensors."""


class SteadyArithmetic(TorchArithmetic):
    """The arithmetic of the reproducible mode."""

    merge_parts = staticmethod(merge_steadily)

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor, scratch: Scratch | None = None) -> None:
        super().__init__(_Aligned(kernel), scale, like, scratch)
        # Runs of keys would be cut by a rank's number of heads, and the bits would depend on it.
        self.is_widened = False

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend a piece of all queries; return a contiguous lse, as merges need it."""
        out, lse = super().begin(piece, q, kv)
        return out, lse.contiguous()

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Backward: the piece that begins its sums is computed by one kernel call for all heads.

        The kernel adds up dk and dv over the heads that share a KV head. Slabs of fewer heads would change the bits,
        and the number of slabs depends on the number of heads that a rank has.
        """
        if dq is not None or dkv is not None:
            return super().attend_grad(piece, q_grad, kv, dq, dkv)
        q, *merged = q_grad
        dq_part, *dkv_part = (x.to(self.dtype) for x in self._kernel_backward(piece, q, *kv, *merged))
        return (dq_part,), tuple(dkv_part)


AT_ONCE = 4
"""The CPU operator takes larger blocks from 768 rows on; more than 2,048 rows gain nothing."""


@lru_cache(maxsize=64)
def tiles_at_once(name: str, request: KernelRequest) -> int:
    """Return how many tiles of queries one call may attend without changing a bit on this machine."""
    kernel = _Aligned(choose_kernel(name, request))
    dtype = accumulator_dtype(request.dtype)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, 2, rows, dim, dtype=dtype, generator=generator, device="cpu")
        for rows, dim in ((AT_ONCE * TILE, request.head_dim), (TILE, request.head_dim), (TILE, request.v_head_dim))
    )
    scale = request.head_dim**-0.5

    def attend(rows: slice) -> Partial:
        piece = Piece(slice(0, rows.stop - rows.start), slice(0, TILE), PieceKind.FULL, None, None)
        return kernel.forward(q[:, :, rows], k, v, piece, scale)

    with _ONE_THREAD():
        one_by_one = [attend(slice(i * TILE, (i + 1) * TILE)) for i in range(AT_ONCE)]
        for number in range(2, AT_ONCE + 1):
            together = attend(slice(0, number * TILE))
            for parts, whole in zip(zip(*one_by_one[:number], strict=True), together, strict=True):
                if not torch.equal(torch.cat(parts, 2), whole):
                    return 1
    return AT_ONCE


class _Around:
    """A kernel that calls another one with changed operands."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def refuses(self, request: KernelRequest) -> str | None:
        return self.kernel.refuses(request)


class _Aligned(_Around):
    """A kernel whose operands have the same alignment on every rank."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        out, lse = self.kernel.forward(_aligned(q), _aligned(k), _aligned(v), piece, scale)
        return Partial(out[..., : v.shape[-1]], lse)

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        dout, out, lse = merged
        merged = Merged(_aligned(dout), _aligned(out), lse)
        gradients = self.kernel.backward(_aligned(q), _aligned(k), _aligned(v), merged, piece, scale)
        return KernelGradients(*(dx[..., : x.shape[-1]] for dx, x in zip(gradients, (q, k, v), strict=True)))


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Align the start of every row; a tensor that the kernel converts is copied by the conversion."""
    dtype = accumulator_dtype(x.dtype)
    if x.device.type != "cpu":
        return x
    if missing := -x.shape[-1] % (ALIGNMENT // dtype.itemsize):
        return pad(x, (0, missing))
    if x.dtype != dtype:
        return x
    starts = x.data_ptr(), *(dtype.itemsize * stride for stride in x.stride()[:-1])
    return x.clone(memory_format=torch.contiguous_format) if any(it % ALIGNMENT for it in starts) else x


class _OneThread:
    """A context in which PyTorch and its matrix library use one thread.

    Some versions of PyTorch set the library's number for the whole process. So if several ranks are threads of one
    process, the last one to leave restores the number; a thread that leaves earlier stays at one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._outside = 1

    @contextmanager
    def __call__(self) -> Iterator[int]:
        """Yield the number of threads that were in use."""
        with self._lock:
            num_threads = torch.get_num_threads()
            if not self._num_inside:
                self._outside = num_threads
            self._num_inside += 1
            torch.set_num_threads(1)
        try:
            yield num_threads
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    torch.set_num_threads(self._outside)


_ONE_THREAD = _OneThread()


class Threads(NamedTuple):
    """A number of threads, and a `map` over them without autograd."""

    number: int
    map: Callable[..., Iterator[Any]]


@contextmanager
def single_threads(device: torch.device) -> Iterator[Threads]:
    """Yield threads that each compute with the bits of a single thread; one thread for devices other than the CPU."""
    with _ONE_THREAD() as num_threads:
        if num_threads == 1 or device.type != "cpu":
            yield Threads(1, map)
            return
        # OpenMP and MKL keep a number of threads for each thread. A new thread starts with the default, all cores,
        # and a matrix product would use them and split its sums; so every thread sets it to one.
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Whether gradients are recorded is a setting of each thread.
            yield Threads(num_threads, lambda compute, *items: pool.map(torch.no_grad()(compute), *items))


@contextmanager
def on_single_threads(kernel: Kernel, device: torch.device) -> Iterator[Kernel]:
    """Yield a kernel that uses all threads and gives the bits of one thread."""
    with single_threads(device) as threads:
        yield kernel if threads.number == 1 else _SharedOut(kernel, threads)


class _SharedOut(_Around):
    """A kernel that attends a part of the batch rows or KV heads on each thread."""

    def __init__(self, kernel: Kernel, threads: Threads) -> None:
        super().__init__(kernel)
        self.threads = threads

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
            return self.kernel.forward(q, k, v, piece, scale)

        return Partial(*self._share_out(attend, q, k, v))

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, merged: Merged, piece: Piece, scale: float
    ) -> KernelGradients:
        def differentiate(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *merged: torch.Tensor) -> KernelGradients:
            return self.kernel.backward(q, k, v, Merged(*merged), piece, scale)

        return KernelGradients(*self._share_out(differentiate, q, k, v, *merged))

    def _share_out(
        self, compute: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Apply `compute` to parts of the KV heads, or of the batch if it is larger, and concatenate the results."""
        batch, kv_heads = tensors[1].shape[:2]
        dim, size = (0, batch) if batch > kv_heads else (1, kv_heads)
        num_parts = min(self.threads.number, size)
        if num_parts < 2:
            return compute(*tensors)
        cuts = [size * i // num_parts for i in range(num_parts + 1)]
        parts = self.threads.map(
            compute, *([_part(x, dim, size, *cut) for cut in itertools.pairwise(cuts)] for x in tensors)
        )
        return tuple(torch.cat(of_parts, dim) for of_parts in zip(*parts, strict=True))


def _part(x: torch.Tensor, dim: int, size: int, first: int, last: int) -> torch.Tensor:
    """Return the groups `first` to `last` of `size` equal groups of rows or heads."""
    group = x.shape[dim] // size
    return x.narrow(dim, first * group, (last - first) * group)

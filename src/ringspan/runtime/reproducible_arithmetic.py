"""Sums of tensors whose bits do not depend on what else is in a call, nor on the number of threads.

The kernel computes each head and block of rows by itself, so a cell comes out the same whatever stands beside it. Three
things do not, and are seen to here:

- Vectorised exp and logaddexp give other bits in the remainder of a loop than in its body. They are applied to
  contiguous numbers without a remainder, no more at a time than one thread takes (`merge_steadily`).
- A matrix product in the kernel is cut into as many parts as there are threads, even where one thread computes all of
  them, and has other bits then. So the kernel is called as if there were one thread, and several threads share out the
  heads (`on_single_threads`).
- On some CPUs a matrix product has other bits where a row begins in the midst of a vector. So every head and every row
  begins at a multiple of ALIGNMENT bytes: what does not is copied, and a head_dim that makes it impossible is filled up
  with zeros, which add nothing (`_Aligned`).

One call for several tiles of queries is faster, and rows come out the same however many there are; but no library says
so, and therefore that is tried first (`tiles_at_once`).
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
"""Bytes: no vector of a CPU is longer, and torch's own tensors begin so."""


class SteadyArithmetic(TorchArithmetic):
    """The arithmetic of the reproducible mode."""

    merge_parts = staticmethod(merge_steadily)

    def __init__(self, kernel: Kernel, scale: float, like: torch.Tensor, scratch: Scratch | None = None) -> None:
        super().__init__(_Aligned(kernel), scale, like, scratch)
        self.is_widened = (
            False  # the length of key runs depends on the number of heads of a rank, and so would the bits
        )

    def begin(self, piece: Piece, q: Value, kv: Value) -> Value:
        """Attend a piece of all queries; the lse in order, as every merge wants it."""
        out, lse = super().begin(piece, q, kv)
        return out, lse.contiguous()

    def attend_grad(
        self, piece: Piece, q_grad: Value, kv: Value, dq: Value | None, dkv: Value | None
    ) -> tuple[Value, Value]:
        """Backward: what begins its sums is one call, however many heads there are.

        The kernel adds up dk and dv over the heads that share a KV head. In slabs of fewer heads they have other bits,
        and whether there are such would depend on the number of heads that a rank has.
        """
        if dq is not None or dkv is not None:
            return super().attend_grad(piece, q_grad, kv, dq, dkv)
        q, *merged = q_grad
        dq_part, *dkv_part = (x.to(self.dtype) for x in self._kernel_backward(piece, q, *kv, *merged))
        return (dq_part,), tuple(dkv_part)


AT_ONCE = 4
"""From 768 rows on the CPU operator takes larger blocks; with more than 2,048 there is nothing more to gain."""


@lru_cache(maxsize=64)
def tiles_at_once(name: str, request: KernelRequest) -> int:
    """How many tiles of queries one call may attend: several, if on this machine that gives the bits of one by one."""
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
    """A kernel that is called in another way."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    def refuses(self, request: KernelRequest) -> str | None:
        return self.kernel.refuses(request)


class _Aligned(_Around):
    """A kernel whose operands lie in memory as they would on any rank."""

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
    """What a kernel converts to another type it copies anyway, but no dim of it becomes longer."""
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
    """While a thread is inside, PyTorch and its matrix library use one thread for it.

    Some versions of PyTorch set the library's number for the whole process, so ranks that are threads of one process go
    in and out together: the last one sets the number back. A thread that leaves earlier stays at one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._outside = 1

    @contextmanager
    def __call__(self) -> Iterator[int]:
        """Gives the number of threads this one had."""
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
    """So many threads, and a `map` over them, without autograd."""

    number: int
    map: Callable[..., Iterator[Any]]


@contextmanager
def single_threads(device: torch.device) -> Iterator[Threads]:
    """Threads that compute what they are given with the bits of a single one; other devices want just this one."""
    with _ONE_THREAD() as num_threads:
        if num_threads == 1 or device.type != "cpu":
            yield Threads(1, map)
            return
        # OpenMP and MKL keep a number for each thread. A new thread has the default, all cores, until PyTorch asks for
        # it, and a matrix product does not ask: it would be shared out, with its sums split.
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            # Each thread records gradients unless it is told not to.
            yield Threads(num_threads, lambda compute, *items: pool.map(torch.no_grad()(compute), *items))


@contextmanager
def on_single_threads(kernel: Kernel, device: torch.device) -> Iterator[Kernel]:
    """The kernel with the bits it has on one thread, on as many as there are."""
    with single_threads(device) as threads:
        yield kernel if threads.number == 1 else _SharedOut(kernel, threads)


class _SharedOut(_Around):
    """A kernel that attends some of the batch rows or KV heads on each thread."""

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
        """What `compute` makes of all of the tensors, by parts of their heads, or of the batch if it has more rows."""
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
    """Those from first to last of the `size` equal groups of rows or heads."""
    group = x.shape[dim] // size
    return x.narrow(dim, first * group, (last - first) * group)

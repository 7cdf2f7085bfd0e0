"""Where are half types converted to float32, without allocating memory in every call?

CPU kernels compute half types in float32. Memory that a call frees goes back to the system, and page faults make
filling fresh pages up to five times as slow as converting. So a session keeps the memory of its copies from call to
call, as long as calls need it.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_MOST_KEPT = 4 * 2**20
"""Numbers in one room (16 MB). Larger copies have so much work per number that page faults hardly show."""

_KEPT_CALLS = 2
_ALIGNMENT = 16  # numbers: 64 bytes, the alignment of torch's own tensors


class Scratch:
    """Memory for the copies of one call at a time."""

    def __init__(self) -> None:
        self._queries, self._operands = _CopyMemory(), _CopyMemory()

    def queries(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors in float32; valid until the next `queries`."""
        return self._queries.widened(tensors)

    def operands(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The tensors in float32; valid until the next `operands`."""
        return self._operands.widened(tensors)

    def end_call(self) -> None:
        """Free memory that the last few calls did not use."""
        self._queries.end_call()
        self._operands.end_call()


class ScratchPool:
    """The scratch memory of a session.

    Threads may attend at the same time on a single rank; each then has its own scratch, and the last one is kept.
    """

    def __init__(self) -> None:
        self._spare: deque[Scratch] = deque(maxlen=1)

    @contextmanager
    def lend(self) -> Iterator[Scratch]:
        """Lend a scratch for one call; a call that fails does not return it."""
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = Scratch()
        yield scratch
        scratch.end_call()
        self._spare.append(scratch)


class _CopyMemory:
    """Memory for some tensors at once."""

    def __init__(self) -> None:
        self._memory = _new_memory(0)
        self._needed = 0
        self._last_needed: deque[int] = deque(maxlen=_KEPT_CALLS)

    def widened(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copy half types to float32, with the order of dims in memory unchanged."""
        sizes = [0 if x.dtype == torch.float32 else -(-x.numel() // _ALIGNMENT) * _ALIGNMENT for x in tensors]
        *starts, needed = itertools.accumulate(sizes, initial=0)
        if needed > _MOST_KEPT:
            return tuple([x.to(torch.float32) for x in tensors])
        memory = self._of_size(needed)
        return tuple([_widened(x, memory, start) for x, start in zip(tensors, starts, strict=True)])

    def end_call(self) -> None:
        self._last_needed.append(self._needed)
        self._needed = 0
        if self._memory.numel() > max(self._last_needed):
            self._memory = _new_memory(0)

    def _of_size(self, needed: int) -> torch.Tensor:
        self._needed = max(self._needed, needed)
        if self._memory.numel() < needed:
            with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
                self._memory = _new_memory(needed)
        return self._memory


def _new_memory(numbers: int) -> torch.Tensor:
    """float32 on the CPU, whatever torch's defaults are."""
    return torch.empty(numbers, dtype=torch.float32, device="cpu")


def _widened(x: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    if x.dtype == torch.float32:
        return x
    like = x if x.is_contiguous() else torch.empty_like(x, device="meta")
    return memory.as_strided(x.shape, like.stride(), start).copy_(x)

"""How much memory did a call need at its peak, above what was there before?

On a GPU the allocator counts. On Linux the kernel does: its high-water mark of the process is reset first. Elsewhere
the high-water mark since the process began has to do, which may be that of something earlier.

`LiveStorages` counts tensors instead, to the byte and for one thread, at the price of a slower call.
"""

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

_PROC = Path("/proc/self")


class Peak(NamedTuple):
    """Memory of the process or device, in bytes."""

    peak_bytes: int
    above_bytes: int


def measure_peak(device: torch.device, call: Callable[[], T]) -> tuple[T, Peak]:
    """Run a call; returns its value and its peak memory."""
    before = _reset(device)
    value = call()
    peak = _high_water_mark(device)
    return value, Peak(peak, peak - before)


def _reset(device: torch.device) -> int:
    """Reset the peak; returns what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if (_PROC / "clear_refs").exists():
        (_PROC / "clear_refs").write_text("5")
        return _status("VmRSS")
    return _high_water_mark(device)


def _high_water_mark(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if (_PROC / "status").exists():
        return _status("VmHWM")
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", (_PROC / "status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


class LiveStorages(TorchDispatchMode):
    """Counts bytes of live storages that operations of this thread made: now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._seen.add(storage._cdata)  # made before the count began, or counted already
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += nbytes
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, nbytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.now -= nbytes


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for x in tree_leaves(values):
        if isinstance(x, torch.Tensor):
            yield getattr(x, "elem", x).untyped_storage()  # the result of a collective wraps its tensor until a wait

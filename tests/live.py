"""How many bytes of tensors are alive? Counted by storages, in one thread."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of the storages made by operations of this thread that are still alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self._seen.add(x.untyped_storage()._cdata)  # made elsewhere, or counted already
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
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

"""How is a mask of all pairs never built, if a block makes it of a mask of keys?

Some blocks repeat a mask of keys for every query and take `mask & mask.transpose`: for each layer a tensor as large as
all scores. Here the repeated mask is a view, and the product of two such views is one too, of which it is remembered
whose product it is. Only attention may ask for that. Whatever else takes the product gets the real one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_LOOKS = ("__get__",)  # of a property, such as shape
_AND = (torch.Tensor.__and__, torch.Tensor.logical_and, torch.bitwise_and, torch.logical_and)
_UNCHANGED = (torch.Tensor.bool, torch.Tensor.size, torch.Tensor.dim)


class OuterMask(NamedTuple):
    """A query sees a key if both are True: (batch, 1, q, 1) and (batch, 1, 1, keys)."""

    queries: torch.Tensor
    keys: torch.Tensor


class OuterMasks:
    """The outer products of one forward that were not computed."""

    def __init__(self) -> None:
        self._products: dict[int, tuple[torch.Tensor, OuterMask]] = {}  # by id; the tensor keeps its id

    def clear(self) -> None:
        """Remove all products."""
        self._products.clear()

    def find(self, mask: torch.Tensor | None) -> OuterMask | None:
        """The factors of a mask."""
        found = self._products.get(id(mask))
        return None if found is None else found[1]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch without building masks of all pairs."""
        if function is torch.Tensor.repeat and _is_mask(args[0]) and not kwargs:
            view = _repeat(args[0], args[1:])
            if view is not None:
                return view
        if function in _AND and len(args) == 2 and not kwargs and all(map(_is_mask, args)):
            product = self._multiply(*args)
            if product is not None:
                return product
        if self._products and function not in _UNCHANGED and getattr(function, "__name__", "") not in _LOOKS:
            args = tuple(map(self._built, args))
            kwargs = {name: self._built(x) for name, x in kwargs.items()}
        return function(*args, **kwargs)

    def _multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
        for keys, queries in ((a, b), (b, a)):
            if a.shape == b.shape and not keys.stride(2) and not queries.stride(3) and queries.stride(2):
                outer = OuterMask(queries[..., :1], keys[..., :1, :])
                product = outer.keys.expand(a.shape)
                self._products[id(product)] = (product, outer)
                return product
        return None

    def _built(self, x: Any) -> Any:
        outer = self.find(x) if isinstance(x, torch.Tensor) else None
        return x if outer is None else outer.queries & outer.keys


def _is_mask(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool and x.ndim == 4


def _repeat(mask: torch.Tensor, times: tuple[Any, ...]) -> torch.Tensor | None:
    """A view if a mask of keys is repeated for each query, else None."""
    if len(times) == 4 and mask.shape[2] == 1 and times[:2] == (1, 1) and times[3] == 1:
        return mask.expand(-1, -1, times[2], -1)
    return None

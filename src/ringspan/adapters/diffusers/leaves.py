"""How are nested arguments taken apart, into tensors and numbers with a path each, and put together again?"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch


class Leaf(NamedTuple):
    """A value that is not a container, with its path, such as "image_rotary_emb[0]"."""

    path: str
    value: Any


class SizePlace(NamedTuple):
    """One number of a call: a dim of the tensor at a path, or the int at that path (dim None)."""

    path: str
    dim: int | None


def flatten(value: Any, path: str = "") -> Iterator[Leaf]:
    """All leaves, in order."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from flatten(part, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from flatten(part, f"{path}[{number}]")
    else:
        yield Leaf(path, value)


def map_leaves(change: Callable[[Leaf], Any], value: Any, path: str = "") -> Any:
    """The same containers with every leaf replaced."""
    if isinstance(value, Mapping):
        parts = {name: map_leaves(change, x, f"{path}.{name}" if path else str(name)) for name, x in value.items()}
        return parts if type(value) is dict else type(value)(**parts)
    if isinstance(value, (list, tuple)):
        items = [map_leaves(change, x, f"{path}[{number}]") for number, x in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(Leaf(path, value))


def is_count(value: object) -> bool:
    """Whether the value is an int that could be a count."""
    return isinstance(value, int) and not isinstance(value, bool)


def numbers_of(value: Any) -> dict[SizePlace, int]:
    """The sizes of all tensors and all ints."""
    found: dict[SizePlace, int] = {}
    for path, leaf in flatten(value):
        if isinstance(leaf, torch.Tensor):
            found |= {SizePlace(path, dim): size for dim, size in enumerate(leaf.shape)}
        elif is_count(leaf):
            found[SizePlace(path, None)] = leaf
    return found


def copy_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with tensors of their own, which a model may write to."""

    def copy(leaf: Leaf) -> Any:
        return leaf.value.clone() if isinstance(leaf.value, torch.Tensor) else leaf.value

    return {name: map_leaves(copy, x, name) for name, x in arguments.items()}


def resize(arguments: dict[str, Any], sizes: Mapping[SizePlace, int]) -> dict[str, Any]:
    """A copy with other sizes: rows are removed, or repeated from the first one on."""

    def change(leaf: Leaf) -> Any:
        if not isinstance(leaf.value, torch.Tensor):
            return sizes.get(SizePlace(leaf.path, None), leaf.value)
        x = leaf.value
        for dim, size in enumerate(x.shape):
            wanted = sizes.get(SizePlace(leaf.path, dim), size)
            if wanted != size:
                x = x.index_select(dim, torch.arange(wanted, device=x.device) % size)
        return x

    return {name: map_leaves(change, x, name) for name, x in arguments.items()}

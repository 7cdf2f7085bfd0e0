"""What does a dry call of a model show? Which blocks are called, with which sizes, and what each of them attends.

Attention is left out: its place is taken by zeros that depend on their query and on nothing else. Between blocks, the
trace follows what is made of the blocks' outputs, since those are shards in a forward on ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ringspan.adapters.diffusers.leaves import SizePlace, flatten, numbers_of
from ringspan.adapters.diffusers.wiring import SdpaCall
from ringspan.errors import UnsupportedError

Origin = tuple[int, str]  # the number of a call of a block, and the path of one of its outputs


class AttendedSizes(NamedTuple):
    """The sizes of a call of attention."""

    num_q: int
    num_keys: int
    mask: tuple[int, ...] | None


@dataclass(slots=True)
class BlockCall:
    """The sizes a block was called with and what it returned."""

    name: str
    inputs: dict[SizePlace, int]
    ndims: dict[str, int]  # of floating-point tensors
    origins: dict[str, frozenset[Origin]]
    attended: list[AttendedSizes] = field(default_factory=list)
    outputs: dict[SizePlace, int] = field(default_factory=dict)


class Trace:
    """A running dry call, and afterwards its record."""

    def __init__(self) -> None:
        self.calls: list[BlockCall] = []
        self.output_sizes: tuple[int, ...] = ()
        self.output_origins: frozenset[Origin] = frozenset()  # of what the model returns
        self._inside: BlockCall | None = None
        self._origins: dict[int, tuple[torch.Tensor, frozenset[Origin]]] = {}  # by id; the tensor keeps its id

    @property
    def form(self) -> list[tuple[Any, ...]]:
        """The parts that two calls of one plan share."""
        return [(call.name, tuple(call.inputs), tuple(call.outputs), len(call.attended)) for call in self.calls]

    @property
    def sizes(self) -> tuple[tuple[tuple[SizePlace, int], ...], ...]:
        return tuple(tuple(call.inputs.items()) for call in self.calls)

    @property
    def lengths(self) -> set[int]:
        """The sizes of tensors that blocks get."""
        return {size for call in self.calls for place, size in call.inputs.items() if place.dim is not None}

    def enter(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Record the arguments of a block."""
        if self._inside is not None:
            raise UnsupportedError(f"{name} is called by {self._inside.name}: blocks are called by the model itself")
        tensors = {path: x for path, x in flatten(arguments) if isinstance(x, torch.Tensor)}
        ndims = {path: x.ndim for path, x in tensors.items() if x.is_floating_point()}
        origins = {path: self._origin(x) for path, x in tensors.items()}
        self._inside = BlockCall(name, numbers_of(arguments), ndims, origins)
        self.calls.append(self._inside)
        return arguments

    def end(self, output: Any) -> None:
        """Note what the model returns."""
        self.output_sizes = tuple(numbers_of({"output": output}).values())
        self.output_origins = frozenset[Origin]().union(*(self._origin(x) for x in _tensors(output)))

    def leave(self, name: str, output: Any) -> Any:  # noqa: ARG002
        """Record the outputs of a block."""
        assert self._inside is not None
        self._inside.outputs = numbers_of({"output": output})
        self._inside = None
        for path, x in flatten({"output": output}):
            if isinstance(x, torch.Tensor):
                self._mark(x, frozenset([(len(self.calls) - 1, path)]))
        return output

    def attend(self, asked: SdpaCall) -> torch.Tensor:
        """Record a call of attention and return a placeholder."""
        if self._inside is not None:
            mask = None if asked.attn_mask is None else tuple(asked.attn_mask.shape)
            self._inside.attended.append(AttendedSizes(asked.query.shape[-2], asked.key.shape[-2], mask))
        return without_attention(asked)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the tensors that are computed from blocks' outputs."""
        result = function(*args, **kwargs)
        if self._inside is None and self._origins:
            given = frozenset[Origin]().union(*(self._origin(x) for x in _tensors((args, kwargs))))
            for x in _tensors(result) if given else ():
                self._mark(x, given | self._origin(x))
        return result

    def _origin(self, x: torch.Tensor) -> frozenset[Origin]:
        return self._origins.get(id(x), (x, frozenset[Origin]()))[1]

    def _mark(self, x: torch.Tensor, origins: frozenset[Origin]) -> None:
        self._origins[id(x)] = (x, origins)


def without_attention(asked: SdpaCall) -> torch.Tensor:
    """Zeros in the shape of attention's output, or NaN where a query is NaN; refuses what attention would."""
    q, k, v, mask = asked.query, asked.key, asked.value, asked.attn_mask
    scores = (*q.shape[:-1], k.shape[-2])
    np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"attention of {tuple(q.shape)} to {tuple(k.shape)}, {tuple(v.shape)}")
    if mask is not None and np.broadcast_shapes(mask.shape, scores) != scores:
        raise ValueError(f"a mask of {tuple(mask.shape)} for {scores}")
    return (q[..., :1] * 0).expand(*q.shape[:-1], v.shape[-1]).contiguous()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    return (x for _, x in flatten(value) if isinstance(x, torch.Tensor))

"""Which ranks take part in a call of this package, and do all of them make the same call?

Gradients carry the identity of their layer, because ranks might differentiate equal layers in different orders. The
forward pass of a layer sends no message, so a layer is identified by its weights and by its place: the last call of all
ranks before it, and its number since then. Only layers whose weights need gradients are numbered, so a rank may run
others, and any layer under torch.no_grad(), any number of times. Numbers restart after every call of all ranks, so that
a rank that ran a layer more often (its own checkpoint, a caught error) is soon in step again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable

from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.program.reproducible.grid import Strip
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.checks import check_tensor, check_world_size
from ringspan.runtime.contract import Contract, Place, Signature
from ringspan.runtime.modes import Tiling, sum_over_tiles, tile_layout
from ringspan.runtime.session import Session, session_of

_CHUNK = 1 << 20  # elements whose bits are summed at once
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by element size; sums are exact


class Weight(NamedTuple):
    """The identity of a weight; all ranks must have the same."""

    shape: tuple[int, ...]
    sum_of_bits: torch.Tensor

    def __str__(self) -> str:
        return f"{self.shape} #{int(self.sum_of_bits)}"


class GradientLayer(NamedTuple):
    """The identity of the layer that gradients belong to."""

    number: int
    place: Place
    weights: tuple[Weight, ...]


class Ranks(NamedTuple):
    """One call as this rank sees it: its rank, tiles, group and deadline."""

    session: Session
    tiling: Tiling
    deadline_s: float | None
    layer: GradientLayer | None
    """Set if a weight needs gradients."""

    @property
    def rank(self) -> int:
        return self.session.transport.rank

    @property
    def tiles(self) -> tuple[Strip, ...]:
        return self.tiling.strips[self.rank]

    @contextmanager
    def agreed(self, what: str, **fields: object) -> Iterator[None]:
        """Agree that all ranks make the same call, and for a gradient that it belongs to the same layer."""
        fields = {"call": what, **fields, "layout": self.tiling.fingerprint}
        place = None
        if self.layer is not None:
            number, place, weights = self.layer
            fields |= {"weights": ", ".join(map(str, weights)), "layer": number}
        with self.session.call(self.deadline_s) as call:
            call.agree(Signature.of(fields), place)
            yield

    def sum_over_tiles(self, what: str, parts: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Sum over the tiles of all ranks, after they agree on the call and on the length and dtype of the parts.

        `what` is the name of the call in errors.
        """
        with self.agreed(what, length=len(like), dtype=like.dtype):
            return sum_over_tiles(self.session.transport, self.tiling, parts, like, self.deadline_s)


def open_ranks(
    layout: Layout,
    group: Any,
    timeout_s: float | None,
    check: Callable[[int], None],
    weights: Sequence[torch.Tensor | None] = (),
) -> Ranks:
    """Check the arguments of a call and open it; if they are refused, tell the other ranks why.

    Args:
        layout: The layout of the call.
        group: The group of the call.
        timeout_s: The deadline of a wait.
        check: Raises if the tensors do not fit a shard of that many tokens.
        weights: The weights whose gradients are summed over the ranks, if they need gradients.
    """
    session = session_of(group)
    with session.call(timeout_s) as call:
        check_world_size(layout, session.transport.world_size)
        tiling = tile_layout(layout)
        check(layout.shard_len(session.transport.rank))
    given = [x for x in weights if x is not None]
    wants_grad = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    is_told = wants_grad and session.transport.world_size > 1
    return Ranks(session, tiling, call.deadline_s, _next_layer(session.contract, given) if is_told else None)


def _next_layer(contract: Contract, weights: Sequence[torch.Tensor]) -> GradientLayer:
    contract.num_layers += 1
    return GradientLayer(contract.num_layers, Place("after call", contract.num_calls), tuple(map(_weight, weights)))


def _weight(x: torch.Tensor) -> Weight:
    """Identify a weight by the integer sum of its bits, which is independent of order and cheap next to a product."""
    bits = x.detach().reshape(-1).view(_WHOLE_NUMBERS[x.itemsize])
    return Weight(tuple(x.shape), torch.stack([part.sum() for part in torch.split(bits, _CHUNK)]).sum())


def check_tokens(name: str, x: torch.Tensor, shard_len: int) -> None:
    """Check that x is (batch, seq, …) with this rank's tokens."""
    check_tensor(name, x)
    if x.ndim < 2 or x.shape[1] != shard_len or x.shape[0] < 1:
        raise ShapeError(
            f"{name} is (batch, seq, …) with a batch of 1 or more, and the layout gives this rank "
            f"{shard_len} positions along dim 1",
            argument=f"{name}.shape",
            value=tuple(x.shape),
        )


def check_weights(x: torch.Tensor, **weights: torch.Tensor | None) -> None:
    """Check that weights are floating point and have the dtype and device of x."""
    for name, weight in weights.items():
        if weight is None:
            continue
        check_tensor(name, weight)
        if weight.dtype != x.dtype or weight.device != x.device or not x.is_floating_point():
            raise ShapeError(
                f"x is {x.dtype} on {x.device}, {name} is {weight.dtype} on {weight.device}: both need one "
                "floating-point dtype and device",
                remedy="convert one of them (autocast does not)",
            )


_Gradients = TypeVar("_Gradients")


def differentiable_once(
    backward: Callable[[Any, torch.Tensor], _Gradients],
) -> Callable[[Any, torch.Tensor], _Gradients]:
    """Make a backward pass that refuses a second derivative and that ignores autocast around `backward()`."""

    def run(ctx: Any, dout: torch.Tensor) -> _Gradients:
        with without_autocast(dout.device.type):
            return backward(ctx, dout)

    return once_differentiable(run)

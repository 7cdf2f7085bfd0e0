"""Who takes part in a call of this package, and do all of them make the same one?

The gradients of a layer say which one they belong to, as ranks might differentiate like layers in different orders. Its
forward sends nothing, so a layer is told by where that stood, after which call of all ranks and as which layer since,
and by its weights. Only layers whose weights want gradients count: a rank may run others, and any under
torch.no_grad(), as often as it likes. They are counted anew after every call, so that a rank that ran one more often,
as a checkpoint of its own does or an error that was caught, is soon in step with the others again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ringspan.layout import Layout
from ringspan.program.reproducible.bind import Strip
from ringspan.runtime.checks import check_world_size
from ringspan.runtime.contract import Contract, Place, Signature
from ringspan.runtime.session import Session, session_of
from ringspan.runtime.tile_sums import Tiling, sum_over_tiles, tile_layout

_CHUNK = 1 << 20  # numbers whose bits are summed at once
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by size; their sums are exact


class Weight(NamedTuple):
    """What tells a weight from others: ranks must have the same."""

    shape: tuple[int, ...]
    sum_of_bits: torch.Tensor

    def __str__(self) -> str:
        return f"{self.shape} #{int(self.sum_of_bits)}"


class Layer(NamedTuple):
    """Whose gradients these are, where ranks might differentiate like layers in different orders."""

    number: int
    place: Place
    weights: tuple[Weight, ...]


class Ranks(NamedTuple):
    """This rank's side of one call: who it is, which tiles it has, whom it talks to and how long it waits."""

    session: Session
    tiling: Tiling
    deadline_s: float
    layer: Layer | None
    """If there are weights that want gradients."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.transport.rank

    @property
    def tiles(self) -> tuple[Strip, ...]:
        """The tiles of this rank."""
        return self.tiling.strips[self.rank]

    @contextmanager
    def agreed(self, what: str, **fields: object) -> Iterator[None]:
        """All ranks are in the same call; if it is a layer's gradient, in that of the same layer."""
        fields = {"call": what, **fields, "layout": self.tiling.fingerprint}
        place = None
        if self.layer is not None:
            number, place, weights = self.layer
            fields |= {"weights": ", ".join(map(str, weights)), "layer": number}
        with self.session.call(self.deadline_s) as call:
            call.agree(Signature.of(fields), place)
            yield

    def sum_over_tiles(self, what: str, parts: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The sum over the tiles of all ranks, once they agree on the call and on the length and dtype of the parts.

        `what` is the call, as it is named if another rank makes another one.
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
    """The ranks of a call whose arguments are in order; else the others are told why it is refused.

    Args:
        layout: Of the call.
        group: Of the call.
        timeout_s: Of the call.
        check: Raises if the tensors do not fit a shard of so many tokens.
        weights: Those whose gradients are summed over the ranks, if they are wanted.
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


def _next_layer(contract: Contract, weights: Sequence[torch.Tensor]) -> Layer:
    contract.num_layers += 1
    return Layer(contract.num_layers, Place("after call", contract.num_calls), tuple(map(_weight, weights)))


def _weight(x: torch.Tensor) -> Weight:
    """A sum of whole numbers is the same in any order, and quick beside a product with them."""
    bits = x.detach().reshape(-1).view(_WHOLE_NUMBERS[x.itemsize])
    return Weight(tuple(x.shape), torch.stack([part.sum() for part in torch.split(bits, _CHUNK)]).sum())

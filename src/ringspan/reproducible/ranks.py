"""Who takes part in a call of this package, and do all of them make the same one?"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ringspan.arguments import check_timeout, check_world_size
from ringspan.contract import Signature
from ringspan.grid import Strip
from ringspan.layout import Layout
from ringspan.session import Session, session_of
from ringspan.tile_sums import Tiling, sum_over_tiles, tile_layout


class Ranks(NamedTuple):
    """This rank's side of one call: who it is, which tiles it has, whom it talks to and how long it waits."""

    session: Session
    tiling: Tiling
    deadline_s: float

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.transport.rank

    @property
    def tiles(self) -> tuple[Strip, ...]:
        """The tiles of this rank."""
        return self.tiling.strips[self.rank]

    def agree(self, what: str, **fields: object) -> None:
        """All ranks are in the same call."""
        signature = Signature.of({"call": what, **fields, "layout": self.tiling.fingerprint})
        self.session.contract.agree(signature, self.deadline_s)

    def sum_over_tiles(self, what: str, parts: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """The sum over the tiles of all ranks, once they agree on the call and on the length and dtype of the parts.

        `what` is the call, as it is named if another rank makes another one.
        """
        self.agree(what, length=len(like), dtype=like.dtype)
        return sum_over_tiles(self.session.transport, self.tiling, parts, like, self.deadline_s)


def open_ranks(layout: Layout, group: Any, timeout_s: float | None, check: Callable[[int], None]) -> Ranks:
    """The ranks of a call whose arguments are in order; else the others are told why it is refused.

    Args:
        layout: Of the call.
        group: Of the call.
        timeout_s: Of the call.
        check: Raises if the tensors do not fit a shard of so many tokens.
    """
    session = session_of(group)
    with session.contract.telling_refusals():
        deadline_s = check_timeout(timeout_s, session.transport.timeout_s)
        check_world_size(layout, session.transport.world_size)
        tiling = tile_layout(layout)
        check(layout.shard_len(session.transport.rank))
    return Ranks(session, tiling, deadline_s)

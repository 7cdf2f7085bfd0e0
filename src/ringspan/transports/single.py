"""A single rank: it sends nothing and agrees with itself."""

import math
from collections.abc import Sequence

from ringspan.transports.base import Posted, Receive, Send


class Alone:
    """The group of a process without one."""


ALONE = Alone()


class Single:
    """The transport of a group of one."""

    rank = 0
    world_size = 1
    timeout_s = math.inf

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """A program for one rank has no messages."""
        assert not sends
        assert not receives
        return Posted([], [])

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:  # noqa: ARG002
        """The payload itself."""
        return [payload]

    def abort(self, reason: str) -> None:
        """There are no other ranks to tell."""

    def close(self) -> None:
        """Nothing to let go of."""

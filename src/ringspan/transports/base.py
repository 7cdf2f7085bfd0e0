"""What a transport is: messages between the ranks of one group.

Sizes are agreed before anything is received (see `contract.py`), so a transport moves tensors into buffers of the right
size and nothing else. It sees all messages of a step at once and may pick the cheapest call for them. Messages between
two ranks arrive in the order in which they were sent.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Send(NamedTuple):
    """A contiguous tensor; it must not be written to until the send is done."""

    dst: int
    tensor: torch.Tensor


class Receive(NamedTuple):
    """A contiguous buffer of exactly the size that will arrive."""

    src: int
    buffer: torch.Tensor


class MessageHandle(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when the message is through; TransportError if the peer is gone, has failed or is late.

        None is the transport's own deadline, which may allow for a peer that is known to be busy.
        """


class Posted(NamedTuple):
    """Handles for the messages of one exchange, in the order they were given."""

    sends: Sequence[MessageHandle]
    receives: Sequence[MessageHandle]


class Transport(Protocol):
    """One rank's end of a group."""

    @property
    def rank(self) -> int:
        """This rank's number in the group."""

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def timeout_s(self) -> float:
        """The deadline of a wait without progress, where the caller gives none."""

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        """Start all messages of a step; returns at once."""

    def all_gather_bytes(self, payload: bytes, timeout_s: float | None) -> list[bytes]:
        """Every rank's payload, in rank order. All ranks must call it, with payloads of one length."""

    def abort(self, reason: str) -> None:
        """Tell every rank of the group why this one gives up, and make their waits end with that reason."""

    def close(self) -> None:
        """Let go of threads and buffers; the group itself belongs to the caller."""

"""From every rank to every rank, and all of it here before anything goes on: what sums and gathers are made of."""

from collections.abc import Sequence

import torch

from ringspan.errors import TransportError
from ringspan.transports.base import MessageHandle, Receive, Send, Transport


def all_to_all(
    transport: Transport, sends: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], deadline_s: float | None
) -> list[torch.Tensor]:
    """Send the r-th tensor to rank r and receive one of the r-th shape from it."""
    received = [part if peer == transport.rank else part.new_empty(shapes[peer]) for peer, part in enumerate(sends)]
    peers = [peer for peer in range(transport.world_size) if peer != transport.rank]
    outgoing = [Send(peer, sends[peer]) for peer in peers if sends[peer].numel()]
    incoming = [Receive(peer, received[peer]) for peer in peers if received[peer].numel()]
    posted = transport.exchange(outgoing, incoming)
    for (peer, _), handle in zip(incoming, posted.receives, strict=True):
        _wait(transport, f"waiting for rank {peer}", handle, deadline_s)
    for (peer, _), handle in zip(outgoing, posted.sends, strict=True):
        _wait(transport, f"sending to rank {peer}", handle, deadline_s)
    return received


def _wait(transport: Transport, what: str, handle: MessageHandle, deadline_s: float | None) -> None:
    try:
        handle.wait(deadline_s)
    except TransportError as error:
        raise TransportError(f"rank {transport.rank}, {what}: {error}") from None

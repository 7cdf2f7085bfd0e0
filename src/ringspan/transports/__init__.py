"""Messages between ranks, whatever carries them."""

from ringspan.transports.groups import Transport, find_group, open_transport

__all__ = [
    "Transport",
    "find_group",
    "open_transport",
]

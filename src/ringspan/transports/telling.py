"""A rank that fails in the middle of a call tells the others, which would wait for it in vain.

Whatever ends it, Ctrl-C too: other ranks read from its memory, so it closes its links to them before that memory is
used for anything else.
"""

from ringspan.errors import TransportError
from ringspan.transports.base import Transport


class telling:  # noqa: N801
    """Around what a rank does once all ranks have agreed on a call."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        if error is not None and not isinstance(error, TransportError):  # of which the others know
            self.transport.abort(f"rank {self.transport.rank} failed: {str(error) or type(error).__name__}")

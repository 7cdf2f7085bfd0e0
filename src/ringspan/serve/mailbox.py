"""How do requests reach rank 0? A thread adds messages to a queue; rank 0 reads them between two commands."""

import queue

from ringspan.serve.frames import Frame


class Mailbox:
    """Messages of the front to rank 0."""

    def __init__(self) -> None:
        self._messages: queue.Queue[Frame] = queue.Queue()
        self._cancelled: set[int] = set()

    def put(self, message: Frame) -> None:
        """Add a message that arrived."""
        if message["kind"] == "cancel":
            self._cancelled.add(message["number"])
        else:
            self._messages.put(message)

    def get(self, timeout_s: float) -> Frame | None:
        """The next message that is not a cancellation."""
        try:
            return self._messages.get(block=timeout_s > 0, timeout=timeout_s or None)
        except queue.Empty:
            return None

    def is_cancelled(self, number: int) -> bool:
        """Whether the request was cancelled."""
        return number in self._cancelled

    def forget(self, number: int) -> None:
        """Remove the cancellation of a request that ended."""
        self._cancelled.discard(number)

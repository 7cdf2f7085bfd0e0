"""Has a wait gone on for too long?

Only time without progress counts. While the awaited rank is known to be alive and busy with other work (loading data,
compiling), a separate, longer limit applies.
"""

import time
from collections.abc import Callable


class WaitClock:
    """The deadline of one wait: `stall_s` without progress end it, or `limit_s` if the awaited rank is busy."""

    def __init__(self, stall_s: float, limit_s: float) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._counts_since = self._last_at = time.monotonic()
        self._bytes_done = 0
        self._is_noted = False

    @property
    def left_s(self) -> float:
        """Seconds that the wait may take before the next `look`."""
        ends_at = min(self._counts_since + self._stall_s, self._last_at + self._limit_s)
        return max(ends_at - time.monotonic(), 0.0)

    def look(self, bytes_done: int, is_busy: Callable[[], bool]) -> float | None:
        """The limit that has passed, in seconds; None if the wait may go on."""
        now = time.monotonic()
        if bytes_done > self._bytes_done:
            self._bytes_done, self._counts_since, self._last_at = bytes_done, now, now
        elif self._limit_s > self._stall_s and is_busy():
            self._counts_since = now
        if now - self._last_at >= self._limit_s:
            return self._limit_s
        return self._stall_s if now - self._counts_since >= self._stall_s else None

    def is_worth_a_note(self) -> bool:
        """Whether the wait would have ended by now if the awaited rank were not busy; True only once."""
        if self._is_noted or time.monotonic() - self._last_at < self._stall_s:
            return False
        self._is_noted = True
        return True

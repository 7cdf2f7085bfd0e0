"""How does the front know that a rank lives and is not caught in a command?"""

import time
from collections.abc import Callable

from ringspan.serve.frames import Frame

BEAT_S = 0.5


class Pulse:
    """Sends beats, unless one command takes too long."""

    def __init__(self, tell: Callable[[Frame], None], limit_s: float) -> None:
        self._tell = tell
        self._limit_s = limit_s
        self.busy_since: float | None = None

    def beat(self) -> None:
        """Send beats; runs in a thread."""
        while True:
            since = self.busy_since
            if since is None or time.monotonic() - since < self._limit_s:
                self._tell({"kind": "beat"})
            time.sleep(BEAT_S)

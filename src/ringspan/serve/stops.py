"""Where does a stop string end an answer that comes in pieces?"""

from collections.abc import Sequence


class StopFinder:
    """Ends a text before a stop string, and holds back text that may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_found = False

    def add(self, text: str) -> str:
        """Add text; return the text that can be sent."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_found = True
            text, self._held = self._held[: min(found)], ""
            return text
        cut = len(self._held) - self._overlap()
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def rest(self) -> str:
        """Return the held-back text at the end of the answer."""
        text, self._held = self._held, ""
        return text

    def _overlap(self) -> int:
        """The longest end of the held text with which a stop string begins."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stops), default=0))
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

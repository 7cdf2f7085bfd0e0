"""How is a run of positions described? Masks and layouts are both built from spans.

A span has a step, so that every P-th token is one span rather than thousands. It is canonical: `stop` is one past the
last position, so two spans with the same positions are equal.
"""

import operator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringspan.errors import LayoutError

Positions = npt.NDArray[np.int64]


MOST_POSITIONS = 2**62
"""Upper bound of positions: sums of two of them fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class Span:
    """The positions start, start + step, start + 2·step, … below stop."""

    start: int
    stop: int
    step: int = 1

    def __post_init__(self) -> None:
        for name in ("start", "stop", "step"):
            value = getattr(self, name)
            if type(value) is not int:
                object.__setattr__(self, name, _whole(name, value))
        if self.start < 0 or self.step < 1:
            raise LayoutError(
                f"Span(start={self.start}, stop={self.stop}, step={self.step}): positions ascend from 0 or more",
                remedy="use start >= 0 and step >= 1",
            )
        length = max(0, -(-(self.stop - self.start) // self.step))
        object.__setattr__(self, "stop", self.start + (length - 1) * self.step + 1 if length else self.start)
        if self.stop > MOST_POSITIONS:
            raise LayoutError(f"Span(start={self.start}, stop={self.stop}): positions are below 2**62")
        if length <= 1:
            object.__setattr__(self, "step", 1)

    def __len__(self) -> int:
        return -(-(self.stop - self.start) // self.step)

    @property
    def last(self) -> int:
        """The last position; the span must not be empty."""
        return self.stop - 1

    def positions(self) -> Positions:
        """All positions, ascending."""
        return np.arange(self.start, self.stop, self.step, dtype=np.int64)

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}" + (f":{self.step}" if self.step > 1 else "")


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError("positions are whole numbers", argument=name, value=value, remedy="give an int") from None

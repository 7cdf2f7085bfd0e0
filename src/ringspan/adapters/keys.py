"""Masks of padding: which keys does every query see, and do the rows of a batch differ?"""

from dataclasses import dataclass

import numpy as np

from ringspan.mask import Allowed, Band, Mask, full, per_row
from ringspan.span import Positions


@dataclass(frozen=True, slots=True, repr=False)
class Keys(Mask):
    """Every query sees the keys from `first` on and before `stop`."""

    first: int
    stop: int

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        return np.broadcast_to((self.first <= kv) & (kv < self.stop), (q.size, kv.size))

    def band(self, q: Positions) -> Band:
        """The same keys for every query."""
        return Band(np.full_like(q, self.first), np.full_like(q, self.stop))

    def __repr__(self) -> str:
        return f"keys({self.first}, {self.stop})"


def by_row(rows: list[Mask]) -> Mask | None:
    """One mask for all rows, if it is the same for all; None if nothing is masked."""
    if all(row == full() for row in rows):
        return None
    return rows[0] if all(row == rows[0] for row in rows) else per_row(rows)

"""Masks that were read from tensors: which keys does each query see, and do the rows of a batch differ?"""

import hashlib
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


@dataclass(frozen=True, slots=True, repr=False)
class Intervals(Mask):
    """Each query sees one interval of keys; int64 arrays as bytes, whose values never decrease."""

    first: bytes
    stop: bytes

    @property
    def num_positions(self) -> int:
        return len(self.first) // 8

    def _allowed(self, q: Positions, kv: Positions) -> Allowed:
        band = self.band(q)
        visible: Allowed = (band.lo <= kv) & (kv < band.hi)
        return visible

    def band(self, q: Positions) -> Band:
        """The interval of each query."""
        return Band(np.frombuffer(self.first, np.int64)[q], np.frombuffer(self.stop, np.int64)[q])

    def __repr__(self) -> str:
        return f"intervals({hashlib.blake2b(self.first + self.stop, digest_size=8).hexdigest()})"


def by_row(rows: list[Mask]) -> Mask | None:
    """One mask for all rows, if it is the same for all; None if nothing is masked."""
    if all(row == full() for row in rows):
        return None
    return rows[0] if all(row == rows[0] for row in rows) else per_row(rows)

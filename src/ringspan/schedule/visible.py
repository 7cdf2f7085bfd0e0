"""Which blocks see which blocks?

Builders take this matrix and nothing else about positions. It is small, many calls share it, and its hash is the hash
of a bytes object, which Python caches, so it is a cheap key for cached schedules.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.arguments import WHOLE, check_arguments, instance_of, optional
from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.schedule.actions import ALL, Attend, Block

Matrix = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Visible:
    """`matrix[q, kv]` says whether any query of rank q sees any key of rank kv; column P is the replicated keys."""

    world_size: int
    payload: bytes

    @classmethod
    def of(cls, matrix: npt.ArrayLike) -> "Visible":
        """Make it from an array of shape (P, P) or, with a column for replicated keys, (P, P + 1)."""
        given = np.asarray(matrix, dtype=np.bool_)
        world_size = given.shape[0] if given.ndim == 2 else 0
        if not world_size or given.shape[1] - world_size not in (0, 1):
            raise ShapeError(
                "expected a row and a column for each of P ranks, and optionally a column for replicated keys",
                argument="matrix.shape",
                value=given.shape,
                remedy="give (P, P) or (P, P + 1)",
            )
        padded = np.zeros((world_size, world_size + 1), dtype=np.bool_)
        padded[:, : given.shape[1]] = given
        return cls(world_size, padded.tobytes())

    @property
    def matrix(self) -> Matrix:
        """The (P, P + 1) array, read-only."""
        return np.frombuffer(self.payload, dtype=np.bool_).reshape(self.world_size, self.world_size + 1)

    def sees(self, q: int, kv: int) -> bool:
        """Whether block q sees any token of block kv; either may be ALL."""
        for name, owner in (("q", q), ("kv", kv)):
            check_arguments(**{name: (WHOLE, owner)})
            if not ALL <= owner < self.world_size:
                raise ShapeError(f"a rank below {self.world_size}, or ALL", argument=name, value=owner)
        return bool(_bits(self).rows[q] >> self._bit(kv) & 1)

    def prune(self, attend: Attend) -> Attend | None:
        """Return the attend without blocks that have no visible pair in it; None if no block is left."""
        bits = _bits(self)
        q_bits, kv_bits = self._set(attend.qs), self._set(attend.kvs)
        qs = tuple(q for q in attend.qs if bits.rows[q.owner] & kv_bits)
        kvs = tuple(kv for kv in attend.kvs if bits.columns[kv.owner] & q_bits)
        return Attend(qs, kvs) if qs else None

    def contributions(self, attend: Attend) -> Iterator[tuple[Block, int]]:
        """Yield each sum that the attend adds to, with the set of added owners.

        The added owners are kv owners for out and dq, and q owners for dkv.
        A set of owners is the bits of an int (bit P is ALL), so that the P × P pairs of one attend cost P operations.
        """
        bits = _bits(self)
        q_bits, kv_bits = self._set(attend.qs), self._set(attend.kvs)
        backward = attend.qs[0].kind == "q_grad"
        for q in attend.qs:
            if seen := bits.rows[q.owner] & kv_bits:
                yield Block("dq" if backward else "out", q.owner, q.heads), seen
        if backward:
            for kv in attend.kvs:
                if seen := bits.columns[kv.owner] & q_bits:
                    yield Block("dkv", kv.owner, kv.heads), seen

    def seen_by(self, block: Block) -> int:
        """Return the set of owners that a sum must contain in the end, in the form of `contributions`."""
        bits = _bits(self)
        if block.kind == "dkv":
            return bits.columns[block.owner] & ~(1 << self.world_size)
        return bits.rows[block.owner]

    def owners(self, bits: int) -> list[int]:
        """Return the members of a set of owners."""
        return [ALL if i == self.world_size else i for i in range(self.world_size + 1) if bits >> i & 1]

    def _set(self, blocks: tuple[Block, ...]) -> int:
        return sum(1 << self._bit(block.owner) for block in blocks)

    def _bit(self, owner: int) -> int:
        return owner % (self.world_size + 1)


class _Bits(NamedTuple):
    """The matrix as sets by row (kv owners that each q sees) and by column. ALL is -1 and indexes the last entry."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]


@lru_cache(maxsize=256)
def _bits(visible: Visible) -> _Bits:
    matrix = np.vstack([visible.matrix, visible.matrix.any(axis=0)])
    rows, columns = (
        tuple(int.from_bytes(row.tobytes(), "little") for row in np.packbits(side, axis=1, bitorder="little"))
        for side in (matrix, matrix.T)
    )
    return _Bits(rows, columns)


def visible_blocks(mask: Mask, layout: Layout, kv_layout: Layout | None = None) -> Visible:
    """Compute which ranks' queries see which ranks' keys.

    Args:
        mask: Who may attend to whom.
        layout: Who holds which query.
        kv_layout: Who holds which key; by default `layout`.
    """
    is_layout = instance_of(Layout, "rs.zigzag(seq_len, world_size)")
    check_arguments(
        mask=(instance_of(Mask, "rs.causal()"), mask),
        layout=(is_layout, layout),
        kv_layout=(optional(is_layout), kv_layout),
    )
    return _visible_blocks(mask, layout, layout if kv_layout is None else kv_layout)


@lru_cache(maxsize=256)
def _visible_blocks(mask: Mask, layout: Layout, kv_layout: Layout) -> Visible:
    return Visible.of(layout.count_pairs(mask, kv_layout) > 0)


A_VISIBLE = instance_of(Visible, "that of rs.schedule.visible_blocks")

"""What does a tile consist of in the reproducible mode? Cells of the grid, and where their results join the trees."""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.mask import Coverage
from ringspan.program.pieces import Piece
from ringspan.schedule import Block


class Sibling(NamedTuple):
    """A held node that a new one is joined with, and on which side it stands."""

    slot: int
    is_left: bool


class Rise(NamedTuple):
    """The way up of a new node: it is joined with these siblings in turn, and the result is kept in a slot."""

    siblings: tuple[Sibling, ...]
    slot: int


class Cell(NamedTuple):
    """One tile of queries against one tile of keys: rows of the two blocks, and pieces relative to them.

    Each cell adds one leaf to each of its sums; `rises` says where: in the forward pass that of out, in the backward
    pass those of dq and dkv. A forward cell may be several whole tiles of queries, and then has as many rises.
    """

    q: slice
    kv: slice
    pieces: tuple[Piece, ...]
    rises: tuple[Rise, ...]


class GridTile(NamedTuple):
    """A q block × kv block tile cut into cells of the grid."""

    q: Block
    kv: Block
    cells: tuple[Cell, ...]
    coverage: Coverage
    pairs: int
    sums: tuple[Block, ...]

    def all_pieces(self) -> Iterator[Piece]:
        """Every kernel call of the tile, in rows of the two blocks."""
        for cell in self.cells:
            for piece in cell.pieces:
                yield piece._replace(q=_shifted(piece.q, cell.q.start), kv=_shifted(piece.kv, cell.kv.start))


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)

"""Does a layout lie on the grid of tiles, and which rows of a rank's shard are which tile?

A sum has the same bits on any number of ranks only if its parts are the same, so in reproducible mode no tile may be
cut: all of its positions are on one rank.
"""

import functools
from typing import NamedTuple

import numpy as np

from ringspan.errors import LayoutError
from ringspan.layout import Layout
from ringspan.span import Span
from ringspan.tree import TILE


class Strip(NamedTuple):
    """The tokens of one tile: as which rows of the shard of the rank that holds them."""

    tile: int
    rows: slice


@functools.lru_cache(maxsize=512)
def strips_of(layout: Layout, rank: int) -> tuple[Strip, ...]:
    """The tiles of a rank, ascending, as rows of its shard; the layout lies on the grid."""
    tiles, firsts = np.unique(layout.positions(rank) // TILE, return_index=True)
    stops = [*firsts.tolist()[1:], layout.shard_len(rank)]
    return tuple(map(Strip, tiles.tolist(), map(slice, firsts.tolist(), stops)))


@functools.lru_cache(maxsize=64)
def check_on_grid(layout: Layout) -> None:
    """Refuse a layout that cuts a tile."""
    owners: dict[int, int] = {}
    for rank in range(layout.world_size):
        for tile in np.unique(layout.own_positions(rank) // TILE).tolist():
            if tile in owners:
                raise LayoutError(
                    f"layout: positions {tile * TILE} to {(tile + 1) * TILE - 1} are one tile, and ranks "
                    f"{owners[tile]} and {rank} both have some of it; reproducible mode needs layouts on the grid of "
                    f"TILE={TILE} tokens: build them with align=rs.TILE, striped ones with block=rs.TILE too. The "
                    f"nearest to this one is {_nearest(layout)}"
                )
            owners[tile] = rank


def _nearest(layout: Layout) -> Layout:
    """Each tile goes to the rank that has most of it, the first of them if several do."""
    positions = [layout.own_positions(rank) for rank in range(layout.world_size)]
    num_tiles = max(int(held[-1]) // TILE + 1 for held in positions if len(held))
    counts = np.stack([np.bincount(held // TILE, minlength=num_tiles) for held in positions])
    owners = counts.argmax(axis=0)
    everything = np.sort(np.concatenate(positions))
    spans: list[list[Span]] = [[] for _ in positions]
    for held in np.split(everything, np.flatnonzero(np.diff(everything // TILE)) + 1):
        runs = np.split(held, np.flatnonzero(np.diff(held) != 1) + 1)
        spans[owners[held[0] // TILE]] += [Span(int(run[0]), int(run[-1]) + 1) for run in runs]
    return Layout(tuple(map(tuple, spans)), layout.replicated)

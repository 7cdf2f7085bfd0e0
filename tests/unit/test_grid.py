"""Which layouts lie on the grid of tiles, and what the others are told."""

import pytest

import ringspan as rs
from ringspan.grid import check_on_grid, strips_of
from ringspan.tree import TILE

SEQ_LEN = 5 * TILE + 77


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_aligned_layouts_lie_on_the_grid_and_their_tiles_are_all_rows(world_size):
    for layout in (
        rs.contiguous(SEQ_LEN, world_size, align=TILE),
        rs.zigzag(SEQ_LEN, world_size, align=TILE),
        rs.striped(SEQ_LEN, world_size, block=TILE),
        rs.contiguous(SEQ_LEN, world_size, align=TILE, start=3 * TILE),
    ):
        check_on_grid(layout)
        for rank in range(world_size):
            rows = strips_of(layout, rank)
            positions = layout.positions(rank)
            assert [row for part in rows for row in range(part.rows.start, part.rows.stop)] == list(
                range(len(positions))
            )
            assert all((positions[part.rows] // TILE == part.tile).all() for part in rows)
            assert len({part.tile for part in rows}) == len(rows)


def test_a_tile_on_two_ranks_is_refused_with_the_nearest_layout_that_does():
    with pytest.raises(rs.LayoutError) as refused:
        check_on_grid(rs.contiguous(1300, 2))
    message = str(refused.value)
    assert "positions 512 to 1023 are one tile, and ranks 0 and 1 both have some of it" in message
    assert "align=rs.TILE" in message
    assert message.endswith("is <Layout of 1300 positions on 2 ranks: 0:512 | 512:1300>")


def test_the_nearest_layout_keeps_gaps_and_lies_on_the_grid():
    layout = rs.Layout(((rs.Span(0, 700), rs.Span(900, 1000)), (rs.Span(701, 850), rs.Span(2048, 2050))))
    with pytest.raises(rs.LayoutError, match=r"is <Layout of 951 positions on 2 ranks: 0:700 701:850 900:1000 \| 2048"):
        check_on_grid(layout)
    with pytest.raises(rs.LayoutError, match="nearest"):
        check_on_grid(rs.striped(SEQ_LEN, 2))


def test_one_rank_cuts_nothing():
    check_on_grid(rs.Layout(((rs.Span(3, 700, 3), rs.Span(900, 1000)),)))

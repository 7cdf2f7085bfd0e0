from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan.program.pieces
from ringspan.errors import MaskError
from ringspan.mask import (
    Band,
    Mask,
    blocks,
    causal,
    chunks,
    documents,
    frame_causal,
    full,
    per_row,
    prefix,
    sliding_window,
)
from ringspan.program.pieces import LEAF, Piece, PieceKind, cut_pieces
from ringspan.span import Positions, Span
from support.mask_cases import NUM_POSITIONS, MaskCase, masks

FULL, CAUSAL, ANTICAUSAL, MASKED = PieceKind


def contiguous_positions(start: int, stop: int) -> Positions:
    return np.arange(start, max(start, stop))


def zigzag_positions(chunk: int, rank: int, world_size: int) -> Positions:
    late = 2 * world_size - 1 - rank
    return np.r_[rank * chunk : (rank + 1) * chunk, late * chunk : (late + 1) * chunk]


positions = st.one_of(
    st.builds(contiguous_positions, st.integers(0, 50), st.integers(0, NUM_POSITIONS)),
    st.builds(zigzag_positions, st.integers(1, 8), st.integers(0, 3), st.just(4)),
    st.builds(Span, st.integers(0, 9), st.just(NUM_POSITIONS), st.integers(1, 9)).map(Span.positions),
    st.sets(st.integers(0, NUM_POSITIONS - 1)).map(lambda some: np.array(sorted(some), dtype=np.int64)),
)


def allowed_in(piece: Piece) -> np.ndarray:
    shape = (piece.q.stop - piece.q.start, piece.kv.stop - piece.kv.start)
    assert min(shape) > 0
    if piece.kind is MASKED:
        assert piece.allowed is not None
        assert piece.allowed.shape == shape
        return piece.allowed
    assert piece.allowed is None
    if piece.kind is FULL:
        return np.ones(shape, dtype=bool)
    assert shape[0] == shape[1]
    early = np.tri(shape[0], dtype=bool)
    return early if piece.kind is CAUSAL else early.T


def times_painted(pieces: tuple[Piece, ...], q: Positions, kv: Positions) -> np.ndarray:
    times = np.zeros((q.size, kv.size), dtype=int)
    for piece in pieces:
        times[piece.q, piece.kv] += allowed_in(piece)
    return times


def visible_and_covered(pieces: tuple[Piece, ...]) -> tuple[int, int]:
    """Count visible pairs, and pairs of a kernel that skips only the other half of CAUSAL and ANTICAUSAL."""
    visible = sum(int(allowed_in(piece).sum()) for piece in pieces)
    covered = sum(int(allowed_in(p).sum()) if p.kind.is_triangle else allowed_in(p).size for p in pieces)
    return visible, covered


def shapes(pieces: tuple[Piece, ...]) -> list[tuple[PieceKind, int, int, int, int]]:
    return [(p.kind, p.q.start, p.q.stop, p.kv.start, p.kv.stop) for p in pieces]


@pytest.fixture(params=[(1, 1), (2, 3), (4, 2), (8, 8), (128, 32)], ids=lambda sizes: f"leaf{sizes[0]}-jump{sizes[1]}")
def _leaf_sizes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set small limits, so that tiles of 64 tokens are cut as deeply as long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ringspan.program.pieces, "LEAF", request.param[0])
        patch.setattr(ringspan.program.pieces, "JUMP", request.param[1])
        yield


@pytest.mark.usefixtures("_leaf_sizes")
@settings(deadline=None, max_examples=200)
@given(masks, positions, positions)
def test_each_visible_pair_is_in_exactly_one_piece(case: MaskCase, q: Positions, kv: Positions) -> None:
    pieces = cut_pieces(case.mask, q, kv)
    np.testing.assert_array_equal(times_painted(pieces, q, kv), case.expected(q, kv))
    assert {piece.rows for piece in pieces} <= {None}


@st.composite
def monotone_bands(draw: st.DrawFn) -> list[Band]:
    ends = st.lists(st.integers(0, 9), min_size=4, max_size=4).map(sorted).map(np.array)
    return draw(st.lists(st.builds(Band, ends, ends), min_size=1, max_size=4))


@settings(deadline=None, max_examples=400)
@given(monotone_bands())
def test_disjoint_bands_have_the_same_union(bands: list[Band]) -> None:
    def times(some: list[Band]) -> np.ndarray:
        return sum((lo[:, None] <= np.arange(9)) & (np.arange(9) < hi[:, None]) for lo, hi in some) + np.zeros((4, 9))

    disjoint = ringspan.program.pieces._disjoint(bands)
    np.testing.assert_array_equal(times(disjoint), times(bands) > 0)
    for lo, hi in disjoint:
        assert (lo <= hi).all()
        assert (np.diff(lo) >= 0).all()
        assert (np.diff(hi) >= 0).all()


@settings(deadline=None)
@given(st.lists(masks, min_size=1, max_size=3), positions, positions)
def test_per_row_cuts_each_row_by_its_own_mask(cases: list[MaskCase], q: Positions, kv: Positions) -> None:
    cases = [*cases, cases[0]]
    pieces = cut_pieces(per_row([case.mask for case in cases]), q, kv)
    for row, case in enumerate(cases):
        in_row = tuple(piece for piece in pieces if row in piece.rows)
        np.testing.assert_array_equal(times_painted(in_row, q, kv), case.expected(q, kv))


def test_per_row_cuts_once_per_distinct_mask() -> None:
    pieces = cut_pieces(per_row([causal(), full(), causal()]), np.arange(300), np.arange(300))
    assert [(piece.kind, piece.rows) for piece in pieces] == [(CAUSAL, (0, 2)), (FULL, (1,))]


@pytest.mark.parametrize("num_tokens", [2, 10, 1000, 16384])
def test_causal_is_one_causal_piece(num_tokens: int) -> None:
    tokens = np.arange(num_tokens)
    assert shapes(cut_pieces(causal(), tokens, tokens)) == [(CAUSAL, 0, num_tokens, 0, num_tokens)]


def test_zigzag_causal_is_one_piece_per_pair_of_ranks() -> None:
    chunk, world_size = 512, 4
    shard = [zigzag_positions(chunk, rank, world_size) for rank in range(world_size)]
    for q_rank, q in enumerate(shard):
        for kv_rank, kv in enumerate(shard):
            found = shapes(cut_pieces(causal(), q, kv))
            if q_rank == kv_rank:
                assert found == [(CAUSAL, 0, 2 * chunk, 0, 2 * chunk)]
            elif kv_rank < q_rank:  # both chunks of q come after the early chunk of kv and before the late one
                assert found == [(FULL, 0, 2 * chunk, 0, chunk)]
            else:  # only the late chunk of q comes after anything of kv
                assert found == [(FULL, chunk, 2 * chunk, 0, 2 * chunk)]


def test_striped_causal_is_one_piece_per_pair_of_ranks() -> None:
    first, second = np.arange(0, 4096, 2), np.arange(1, 4096, 2)
    assert shapes(cut_pieces(causal(), second, first)) == [(CAUSAL, 0, 2048, 0, 2048)]
    assert shapes(cut_pieces(causal(), first, second)) == [(CAUSAL, 1, 2048, 0, 2047)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (full(), [(FULL, 0, 1000, 0, 1000)]),
        (prefix(400), [(FULL, 0, 1000, 0, 400), (CAUSAL, 400, 1000, 400, 1000)]),
        (documents([300, 700]), [(FULL, 0, 300, 0, 300), (FULL, 300, 1000, 300, 1000)]),
        (documents([300, 700]) & causal(), [(CAUSAL, 0, 300, 0, 300), (CAUSAL, 300, 1000, 300, 1000)]),
        (frame_causal(400), [(FULL, 0, 400, 0, 400), (FULL, 400, 800, 0, 800), (FULL, 800, 1000, 0, 1000)]),
        # bands that touch in every row are one band: no seam along the diagonal
        (causal() | sliding_window(0, None), [(FULL, 0, 1000, 0, 1000)]),
        (sliding_window(None, -1) | sliding_window(0, 0), [(CAUSAL, 0, 1000, 0, 1000)]),
        (sliding_window(4, 0) & documents([1] * 1000) & sliding_window(None, -1), []),
    ],
    ids=repr,
)
def test_pieces_of_simple_masks(mask: Mask, expected: list[tuple[PieceKind, int, int, int, int]]) -> None:
    assert sorted(shapes(cut_pieces(mask, np.arange(1000), np.arange(1000))), key=lambda s: s[1:]) == expected


def test_short_prefix_costs_no_more_than_three_pieces() -> None:
    kinds = [piece.kind for piece in cut_pieces(prefix(60), np.arange(16384), np.arange(16384))]
    assert sorted(kinds, key=lambda kind: kind.value) == [CAUSAL, FULL, FULL]


@pytest.mark.parametrize(
    ("mask", "at_most", "max_pieces"),
    [
        (causal(), 1.0, 1),
        (sliding_window(1023, 0), 1.0, 31),
        (sliding_window(4095, 0), 1.0, 7),
        (sliding_window(2048, 2048), 1.0, 27),
        (prefix(5000), 1.0, 2),
        (frame_causal(1560), 1.0, 11),
        (documents([2000, 384, 9000, 5000]), 1.0, 4),
        (documents([2000, 384, 9000, 5000]) & causal(), 1.0, 4),
        (documents([2000, 384, 9000, 5000]) & sliding_window(1023, 0), 1.01, 60),
    ],
    ids=repr,
)
def test_little_is_computed_beyond_what_is_visible(mask: Mask, at_most: float, max_pieces: int) -> None:
    tokens = np.arange(16384)
    pieces = cut_pieces(mask, tokens, tokens)
    visible, covered = visible_and_covered(pieces)
    assert visible == sum(int(np.clip(np.minimum(hi, 16384) - lo, 0, None).sum()) for lo, hi in mask.bands(tokens))
    assert covered <= at_most * visible
    assert len(pieces) <= max_pieces


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_masked_pieces_stay_small(data: st.DataObject) -> None:
    num_tokens = 2000
    lengths = data.draw(st.lists(st.integers(1, 800), max_size=20))
    basic = st.one_of(
        st.builds(sliding_window, st.integers(0, 1500), st.integers(0, 1500)),
        st.builds(prefix, st.integers(0, 1500)),
        st.builds(frame_causal, st.integers(1, 900), st.integers(0, 900)),
        st.builds(chunks, st.integers(1, 900), st.integers(0, 900)),
        st.builds(lambda a, b, c: blocks([(a, a + b), (a + b + c, 2000)]), *[st.integers(1, 400)] * 3),
        st.just(documents([*lengths, num_tokens])),
    )
    mask = data.draw(basic) & data.draw(basic) | data.draw(basic)
    q = np.arange(data.draw(st.integers(0, 3)), num_tokens, data.draw(st.integers(1, 3)))
    kv = np.arange(0, num_tokens, data.draw(st.integers(1, 3)))
    pieces = cut_pieces(mask, q, kv)
    assert all(piece.allowed.size <= LEAF * LEAF for piece in pieces if piece.allowed is not None)
    np.testing.assert_array_equal(times_painted(pieces, q, kv), mask.allowed(q, kv))


def test_many_equal_documents_do_not_exhaust_the_stack() -> None:
    tokens = np.arange(200 * 1500)
    pieces = cut_pieces(documents([200] * 1500), tokens, tokens)
    assert [piece.kind for piece in pieces] == [FULL] * 1500


def test_a_tile_without_visible_pairs_has_no_pieces() -> None:
    none = np.array([], dtype=np.int64)
    assert cut_pieces(causal(), np.arange(4), np.arange(4, 8)) == ()
    assert cut_pieces(causal(), none, np.arange(4)) == ()
    assert cut_pieces(causal(), np.arange(4), none) == ()


@pytest.mark.parametrize(
    ("q", "kv", "message"),
    [
        ([0, 2, 1], [0, 1], r"q_positions\[1:3\]=\[2, 1\]: .* ascend; "),
        ([0, 1], [3, 3], r"kv_positions\[0:2\]=\[3, 3\]: .* ascend; "),
        ([0, 1], [0, 8], r"kv_positions reaches position 8: .* 8 tokens; "),
        ([0, 8], [0, 1], r"q_positions reaches position 8: .* 8 tokens; "),
        ([0, 1], [0.0, 1.0], "kv_positions has shape .* dtype float64"),
    ],
)
def test_positions_that_make_no_tile_are_refused(q: list[int], kv: list[int], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        cut_pieces(documents([8]), q, kv)

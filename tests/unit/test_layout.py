import pickle
import re
import time
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspan.errors import LayoutError, ShapeError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import Mask, causal, documents, frame_causal, full, per_row, prefix, sliding_window
from ringspan.span import Span

LENGTHS = [0, 1, 2, 3, 7, 8, 16, 37, 64, 101]
RANKS = [1, 2, 3, 4, 8]


def held(layout: Layout) -> list[list[int]]:
    return [layout.positions(rank).tolist() for rank in range(layout.world_size)]


def from_owners(owners: list[int], world_size: int, first: int = 0) -> Layout:
    """owners[i] holds position first + i; world_size means replicated, -1 means that no rank holds it."""
    spans = [
        [Span(first + i, first + i + 1) for i, owner in enumerate(owners) if owner == rank]
        for rank in range(world_size + 1)
    ]
    return Layout(spans[:-1], spans[-1])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world_size = draw(st.integers(1, 5))
    start = draw(st.sampled_from([0, 1, 1000]))
    if draw(st.booleans()):
        build = draw(st.sampled_from([contiguous, zigzag, striped]))
        return build(draw(st.integers(0, 40)), world_size, start=start)
    return from_owners(draw(st.lists(st.integers(-1, world_size), max_size=40)), world_size, start)


# --- builders


@pytest.mark.parametrize("world_size", RANKS)
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("build", [contiguous, zigzag, striped])
def test_builders_place_every_position_once_with_equal_counts(build, seq_len: int, world_size: int) -> None:
    layout = build(seq_len, world_size, start=5)
    positions = held(layout)
    assert sorted(chain(*positions)) == list(range(5, 5 + seq_len))
    assert max(map(len, positions)) - min(map(len, positions)) <= 1
    assert layout.world_size == world_size
    assert layout.num_positions == seq_len


def test_contiguous_runs_in_rank_order() -> None:
    assert held(contiguous(7, 3)) == [[0, 1, 2], [3, 4], [5, 6]]
    assert held(contiguous(2, 4, start=10)) == [[10], [11], [], []]


def test_zigzag_gives_rank_i_chunks_i_and_2n_minus_1_minus_i() -> None:
    # arXiv 2411.01783, section 3.5.1, with 2 x 3 chunks of 2 tokens
    assert held(zigzag(12, 3)) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert held(zigzag(5, 2)) == [[0, 1, 4], [2, 3]]


def test_striped_deals_blocks_round_robin() -> None:
    assert held(striped(7, 3)) == [[0, 3, 6], [1, 4], [2, 5]]
    assert held(striped(11, 2, block=3, start=1)) == [[1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11]]
    assert striped(7, 3).spans_by_rank == ((Span(0, 7, 3),), (Span(1, 7, 3),), (Span(2, 7, 3),))


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize("seq_len", [0, 5, 16, 37, 95, 128])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("build", [contiguous, zigzag, lambda *args, **kw: striped(*args, block=8, **kw)])
def test_cuts_lie_on_the_align_grid(build, world_size: int, seq_len: int, start: int) -> None:
    layout = build(seq_len, world_size, align=4, start=start)
    ends = {end for spans in layout.spans_by_rank for span in spans for end in (span.start, span.stop)}
    assert all((end - start) % 4 == 0 or end == start + seq_len for end in ends)
    assert sorted(chain(*held(layout))) == list(range(start, start + seq_len))


def test_aligned_runs_differ_by_at_most_align() -> None:
    assert [contiguous(43, 4, align=8).shard_len(rank) for rank in range(4)] == [16, 8, 8, 11]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: contiguous(-1, 2), "seq_len=-1: seq_len is at least 0"),
        (lambda: zigzag(8, 0), "world_size=0: world_size is at least 1"),
        (lambda: striped(8, 2, align=0), "align=0: align is at least 1"),
        (lambda: contiguous(8, 2, start=-3), "start=-3: start is at least 0"),
        (lambda: striped(8, 2, block=6, align=4), "block=6, align=4: .* use block=8"),
        (lambda: striped(8, 2, block=0), "block=0: block is at least 1; use block=1 or more"),
        (lambda: striped(8, 2, block=2.0), "block=2.0: block is a whole number; give an int"),
    ],
)
def test_builders_refuse_and_name_the_way_out(build, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build()


# --- the value


def test_a_rank_may_have_gaps_and_interleave_with_others() -> None:
    layout = Layout([[Span(2, 9, 3)], [Span(3, 9, 3), Span(20, 22)], []], [Span(0, 2)])
    assert held(layout) == [[0, 1, 2, 5, 8], [0, 1, 3, 6, 20, 21], [0, 1]]
    assert layout.own_positions(1).tolist() == [3, 6, 20, 21]
    assert layout.all_positions().tolist() == [0, 1, 2, 3, 5, 6, 8, 20, 21]
    assert layout.num_positions == 9
    assert [layout.shard_len(rank) for rank in range(3)] == [5, 6, 2]


def test_replicated_positions_are_merged_in_ascending_order() -> None:
    assert held(from_owners([2, 0, 2, 1, 0], 2)) == [[0, 1, 2, 4], [0, 2, 3]]


@pytest.mark.parametrize(
    ("spans_by_rank", "replicated", "message"),
    [
        ([[Span(0, 4)], [Span(3, 6)]], [], "position 3 is in rank 0 and in rank 1"),
        ([[Span(8, 9)], [Span(0, 20, 4)]], [], "position 8 is in rank 0 and in rank 1"),
        ([[Span(0, 30, 6)], [], [Span(4, 30, 4)]], [], "position 12 is in rank 0 and in rank 2"),
        ([[Span(0, 4)], [Span(9, 10)]], [Span(2, 3)], "position 2 is in rank 0 and in replicated"),
        ([[Span(4, 6), Span(0, 2)]], [], "rank 0: span 0:2 begins before the end of span 4:6"),
        ([[], [Span(0, 9, 2), Span(1, 9, 2)]], [], "rank 1: span 1:8:2 begins before"),
        ([[]], [Span(3, 5), Span(4, 6)], "replicated: span 4:6 begins before"),
        ([], [], "at least one rank"),
    ],
)
def test_impossible_layouts_are_refused(spans_by_rank, replicated, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout(spans_by_rank, replicated)


@pytest.mark.parametrize("ends", [(0, 2**62 + 1), (0, 2**63 - 1), (2**70, 2**70 + 3)])
def test_positions_have_a_bound(ends: tuple[int, int]) -> None:
    """NumPy's arange is empty where its length does not fit into 64 bits as a float."""
    with pytest.raises(LayoutError, match=r"positions are below 2\*\*62"):
        Span(*ends)
    assert Span(2**62 - 1, 2**62).positions().tolist() == [2**62 - 1]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), st.integers(1, 9)), min_size=2, max_size=6))
def test_overlap_is_refused_exactly_if_two_ranks_share_a_position(raw: list[tuple[int, int, int]]) -> None:
    spans = [Span(*one) for one in raw]
    everything = np.concatenate([span.positions() for span in spans])
    shared = len(np.unique(everything)) < len(everything)
    if not shared:
        assert Layout([[span] for span in spans]).num_positions == len(everything)
        return
    with pytest.raises(LayoutError, match="position ") as refusal:
        Layout([[span] for span in spans])
    position, first, second = map(
        int, re.findall(r"position (\d+) is in rank (\d+) and in rank (\d+)", str(refusal.value))[0]
    )
    assert first != second
    assert position in spans[first].positions()
    assert position in spans[second].positions()


def test_empty_spans_are_dropped() -> None:
    assert Layout([[Span(5, 5), Span(0, 4), Span(2, 2)], [Span(9, 3)]]).spans_by_rank == ((Span(0, 4),), ())


def test_equal_layouts_are_equal_values() -> None:
    lists = Layout([[Span(0, 2), Span(2, 2), Span(2, 4)], [Span(4, 8)]])
    assert lists == contiguous(8, 2)
    assert hash(lists) == hash(contiguous(8, 2))
    assert lists.spans_by_rank == ((Span(0, 4),), (Span(4, 8),))
    assert len({lists, contiguous(8, 2), contiguous(9, 2), striped(8, 2)}) == 3
    assert contiguous(8, 2) != Layout([[Span(0, 4)], [Span(4, 8)]], [Span(8, 9)])
    assert contiguous(8, 2) != "layout"


@pytest.mark.parametrize("layout", [zigzag(37, 4), striped(37, 4), from_owners([2, 0, -1, 1], 2)])
def test_layouts_survive_pickling(layout: Layout) -> None:
    copy = pickle.loads(pickle.dumps(layout))
    assert copy == layout
    assert hash(copy) == hash(layout)


def test_large_layouts_are_checked_by_arithmetic_not_by_position() -> None:
    begin = time.process_time()
    assert striped(1 << 40, 256).num_positions == 1 << 40
    assert striped(1 << 20, 256, block=64).num_positions == 1 << 20
    assert time.process_time() - begin < 2


def test_printed_layouts_are_short() -> None:
    assert repr(zigzag(16, 2)) == "<Layout of 16 positions on 2 ranks: 0:4 12:16 | 4:12>"
    assert "replicated 0:1" in str(from_owners([2, 0, -1, 1], 2))
    assert len(str(striped(1 << 20, 256, block=64))) < 300


@pytest.mark.parametrize("rank", [-1, 2])
def test_unknown_ranks_are_refused(rank: int) -> None:
    layout = contiguous(8, 2)
    for ask in (layout.positions, layout.own_positions, layout.shard_len, lambda r: layout.shard(np.zeros(8), r, 0)):
        with pytest.raises(LayoutError, match=f"rank={rank}: the layout has 2 ranks; use 0 to 1"):
            ask(rank)


# --- shards of arrays


@settings(deadline=None, max_examples=150)
@given(layouts(), st.integers(-3, 2))
def test_unshard_is_the_inverse_of_shard(layout: Layout, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = layout.num_positions
    x = np.arange(np.prod(shape)).reshape(shape)
    parts = [layout.shard(x, rank, dim) for rank in range(layout.world_size)]
    assert [part.shape[dim] for part in parts] == [layout.shard_len(rank) for rank in range(layout.world_size)]
    np.testing.assert_array_equal(layout.unshard(parts, dim), x)


@settings(deadline=None)
@given(layouts())
def test_rows_of_a_shard_are_the_positions_in_order(layout: Layout) -> None:
    for rank in range(layout.world_size):
        np.testing.assert_array_equal(layout.shard(layout.all_positions(), rank, 0), layout.positions(rank))


def test_a_single_run_is_a_view() -> None:
    x = np.arange(24).reshape(2, 12)
    assert np.shares_memory(contiguous(12, 3).shard(x, 1, 1), x)
    assert not np.shares_memory(zigzag(12, 3).shard(x, 1, 1), x)
    gaps = Layout([[Span(0, 3), Span(10, 19)], []])
    assert np.shares_memory(gaps.shard(x, 0, 1), x)  # no other position lies in the gap


def test_replicated_rows_come_from_rank_0() -> None:
    layout = from_owners([2, 0, 1], 2)
    assert layout.unshard([np.array([7.0, 1]), np.array([9.0, 2])], 0).tolist() == [7, 1, 2]
    assert layout.unshard([np.array([7], np.int8).repeat(2)] * 2, 0).dtype == np.int8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layout: layout.shard(np.zeros((4, 9)), 0, 1), r"x.shape\[1\]=9: the layout has 8 positions"),
        (lambda layout: layout.shard(np.zeros(8), 0, 1), "dim=1: x has 1 dims; use -1 to 0"),
        (lambda layout: layout.unshard([np.zeros(4)], 0), r"len\(parts\)=1: the layout has 2 ranks"),
        (lambda layout: layout.unshard([np.zeros(4), np.zeros(5)], 0), r"parts\[1\].*rank 1 holds 4 .*expected \(4,\)"),
        (lambda layout: layout.unshard([np.zeros((4, 2)), np.zeros((4, 3))], 0), r"parts\[1\].*expected \(4, 2\)"),
        (
            lambda layout: layout.unshard([np.zeros(4, int), np.full(4, 0.5)], 0),
            r"parts\[1\]: its dtype is float64, and parts\[0\] has int64; give all parts the same dtype",
        ),
        (lambda layout: layout.unshard([np.zeros(4)] * 2, -2), r"dim=-2: parts\[0\] has 1 dims"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(call, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        call(contiguous(8, 2))


# --- work

MASKS = [
    full(),
    causal(),
    sliding_window(3, 2),
    prefix(9),
    documents([5, 1, 20, 1100]),
    documents([5, 1, 20, 1100]) & causal(),
    frame_causal(4, start=3),
    sliding_window(2, 0) | prefix(4) | documents([13, 1100]),
    per_row([causal(), sliding_window(0, 4), full()]),
    per_row([causal() | sliding_window(1, 1)]),
]


def dense_pairs(mask: Mask, layout: Layout, kv_layout: Layout) -> list[list[int]]:
    def pairs(rank: int, owner: int) -> int:
        queries = layout.positions(rank)
        keys = kv_layout.positions(owner) if rank == owner else kv_layout.own_positions(owner)
        return int(mask.allowed(queries, keys).sum())

    ranks = range(layout.world_size)
    return [[pairs(rank, owner) for owner in ranks] for rank in ranks]


@settings(deadline=None, max_examples=150)
@given(layouts(), st.sampled_from(MASKS))
def test_work_counts_the_pairs_of_the_dense_mask(layout: Layout, mask: Mask) -> None:
    assert layout.work(mask).pairs.tolist() == dense_pairs(mask, layout, layout)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("kv_layout", [striped(50, 3), from_owners([3, 0, 0, -1, 1, 2, 2, 3, 1], 3), contiguous(0, 3)])
def test_work_takes_a_layout_of_its_own_for_the_keys(mask: Mask, kv_layout: Layout) -> None:
    layout = contiguous(7, 3, start=20)
    assert layout.work(mask, kv_layout).pairs.tolist() == dense_pairs(mask, layout, kv_layout)


def test_work_by_rank_and_by_ring_step() -> None:
    work = contiguous(6, 3).work(causal())
    assert work.pairs.tolist() == [[3, 0, 0], [4, 3, 0], [4, 4, 3]]
    assert work.per_rank.tolist() == [3, 7, 11]
    # at step t rank r meets the keys of (r - t) mod 3
    assert work.per_step.tolist() == [[3, 3, 3], [0, 4, 4], [0, 0, 4]]
    assert work.imbalance == pytest.approx((3 + 4 + 4) / (21 / 3))


def test_zigzag_is_perfect_for_a_causal_mask_and_nothing_visible_is_balanced() -> None:
    assert zigzag(64, 4).work(full()).imbalance == 1
    assert zigzag(64, 4).work(causal()).imbalance == 1
    assert contiguous(0, 4).work(causal()).imbalance == 1


def test_work_of_a_million_tokens_is_exact(subtests: pytest.Subtests) -> None:
    num = 1 << 20
    for layout in (zigzag(num, 8), striped(num, 8), striped(num, 8, block=128)):
        with subtests.test(layout=layout):
            begin = time.process_time()
            assert int(layout.work(causal()).pairs.sum()) == num * (num + 1) // 2
            assert time.process_time() - begin < 3


def test_work_refuses_keys_on_other_ranks() -> None:
    with pytest.raises(LayoutError, match=r"kv_layout.world_size=3: .* use a layout for 2"):
        contiguous(8, 2).work(causal(), contiguous(8, 3))

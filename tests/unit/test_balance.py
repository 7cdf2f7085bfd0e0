import functools
import itertools

import numpy as np
import pytest

from ringspan.errors import LayoutError, MaskError, ShapeError
from ringspan.layout import Layout, balanced, contiguous, striped, zigzag
from ringspan.layout import _balance as balance
from ringspan.mask import Mask, causal, documents, frame_causal, full, per_row, prefix, sliding_window


@functools.cache
def packed(kind: str, seq_len: int) -> Mask:
    """Draw documents that fill seq_len."""
    rng = np.random.default_rng(7)
    draw = {
        "short": lambda: rng.integers(50, 401),
        "mixed": lambda: rng.integers(100, 5001),
        "log-normal": lambda: rng.lognormal(6.5, 1.2),
        "two blocks": lambda: 256,
        "thousand": lambda: 1000,
        "one huge": iter([seq_len // 10, seq_len // 2, *rng.integers(20, 200, seq_len)]).__next__,
        # all but one document are tiny; it has 5.5 blocks per rank of the 64, so that blocks of one length fail
        "one large": iter([77, seq_len * 11 // 128, *[30] * seq_len]).__next__,
    }[kind]
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(max(1, min(left, int(draw()))))
    return documents(lengths)


def masks(seq_len: int) -> dict[str, Mask]:
    kinds = ["short", "mixed", "log-normal", "two blocks", "thousand", "one huge", "one large"]
    found = {kind: packed(kind, seq_len) for kind in kinds}
    found |= {f"{kind} & causal": packed(kind, seq_len) & causal() for kind in kinds}
    found["full"], found["causal"] = full(), causal()
    found |= {
        f"window {left} {right}": sliding_window(left, right) for left, right in ((100, 0), (4095, 0), (200, 200))
    }
    found["prefix"] = prefix(seq_len // 3)
    found["frames"], found["frames from 77"] = frame_causal(1560), frame_causal(256, start=77)
    found["union"] = (packed("mixed", seq_len) & causal()) | prefix(seq_len // 5)
    found["window over documents"] = packed("log-normal", seq_len) | sliding_window(300, 0)
    found["rows"] = per_row([packed("short", seq_len) & causal(), packed("log-normal", seq_len)])
    return found


def check_promises(layout: Layout, seq_len: int, world_size: int, align: int = 1, start: int = 0) -> None:
    """Check: every position once, cuts on the grid, no block below 128, token counts within the longest block."""
    blocks = [span for spans in layout.spans_by_rank for span in spans]
    counts = [layout.shard_len(rank) for rank in range(world_size)]
    assert layout.world_size == world_size
    assert layout.all_positions().tolist() == list(range(start, start + seq_len))
    assert all(span.step == 1 and len(span) >= 128 for span in blocks)
    assert all((span.start - start) % align == 0 for span in blocks)
    assert max(counts) - min(counts) <= max(map(len, blocks))


@pytest.mark.parametrize("name", masks(64))
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_imbalance_is_at_most_one_twentieth(world_size: int, name: str) -> None:
    seq_len = 64 * 128 * world_size + 5
    mask = masks(seq_len)[name]
    layout = balanced(mask, seq_len, world_size)
    check_promises(layout, seq_len, world_size)
    assert layout.work(mask).imbalance <= 1.05


def test_it_is_needed(subtests: pytest.Subtests) -> None:
    """No fixed layout is balanced for these."""
    mask, seq_len = packed("short", 65536) & causal(), 65536
    for layout in (contiguous(seq_len, 8), zigzag(seq_len, 8), striped(seq_len, 8, block=128)):
        with subtests.test(f"{layout}"):
            assert layout.work(mask).imbalance > 1.05


def test_long_runs_are_kept_where_they_are_balanced() -> None:
    assert balanced(full(), 65536, 8) == contiguous(65536, 8)
    assert balanced(sliding_window(100, 0), 65536, 8) == contiguous(65536, 8)
    assert balanced(causal(), 65536, 8) == zigzag(65536, 8)
    assert balanced(causal(), 5000, 1) == contiguous(5000, 1)


@pytest.mark.parametrize("align", [16, 128, 192])
def test_cuts_lie_on_the_align_grid(align: int) -> None:
    seq_len = 64 * 192 * 4 + 131
    mask = documents([1000 + 500, seq_len // 3, *[200] * (seq_len // 200)]) & causal()
    layout = balanced(mask, seq_len, 4, align=align, start=1000)
    check_promises(layout, seq_len, 4, align, start=1000)
    assert layout.work(mask).imbalance <= 1.05


@pytest.mark.parametrize("world_size", [3, 4, 5])
@pytest.mark.parametrize("blocks_per_rank", [1, 1.7, 2, 3.5, 9, 40])
def test_shorter_sequences_keep_the_promises_and_are_no_worse_than_contiguous(
    blocks_per_rank: float, world_size: int
) -> None:
    seq_len = int(128 * blocks_per_rank * world_size)
    mask = packed("mixed", seq_len) & causal()
    layout = balanced(mask, seq_len, world_size)
    check_promises(layout, seq_len, world_size)
    assert layout.work(mask).imbalance <= contiguous(seq_len, world_size).work(mask).imbalance


@pytest.mark.parametrize("seq_len", [0, 1, 3, 100, 511])
def test_without_a_block_per_rank_the_better_of_contiguous_and_zigzag(subtests: pytest.Subtests, seq_len: int) -> None:
    plain = [contiguous(seq_len, 4), zigzag(seq_len, 4)]
    for mask in (causal(), sliding_window(3, 0)):
        with subtests.test(mask=mask):
            best = min(layout.work(mask).imbalance for layout in plain)
            assert balanced(mask, seq_len, 4) in plain
            assert balanced(mask, seq_len, 4).work(mask).imbalance == best


def test_smaller_blocks_are_tried_where_the_sequence_allows_them() -> None:
    seq_len = 4 * 64 * 128 * 4
    mask = documents([1500, *[1] * (seq_len - 1500)])  # less than a block of 512 per rank, but more than one of 256
    layout = balanced(mask, seq_len, 4)
    assert min(len(span) for spans in layout.spans_by_rank for span in spans) < 512
    assert layout.work(mask).imbalance <= 1.05


def test_above_the_search_limit_the_best_deal_is_taken() -> None:
    world_size, seq_len = 80, 64 * 128 * 80
    mask = packed("thousand", seq_len) & causal()
    layout = balanced(mask, seq_len, world_size)
    check_promises(layout, seq_len, world_size)
    assert layout.work(mask).imbalance <= contiguous(seq_len, world_size).work(mask).imbalance


def test_the_answer_is_the_same_every_time() -> None:
    mask, seq_len = packed("short", 65536) & causal(), 65536
    first = balanced(mask, seq_len, 8)
    assert balanced(mask, seq_len, 8) is first
    balance._balanced.cache_clear()
    assert balanced(mask, seq_len, 8) == first


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_what_a_swap_would_change_is_foretold_exactly(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    work = rng.integers(0, 10**6, (30, 30))
    deal = balance._Deal(work, np.arange(30) % world_size, world_size)
    for a, b in itertools.permutations(range(world_size), 2):
        i, j = np.flatnonzero(deal.owners == a), np.flatnonzero(deal.owners == b)
        foretold = deal.unevenness_after(a, b, i, j)
        deal.swap(i[2], j[3])
        fresh = balance._Deal(work, deal.owners, world_size)
        assert foretold[2, 3] == deal.unevenness == fresh.unevenness
        assert deal.time == fresh.time


def test_swaps_keep_the_token_counts_within_their_range() -> None:
    rng = np.random.default_rng(1)
    owners = np.arange(128) % 4
    tokens = rng.integers(128, 256, 32).repeat(4)  # the same on every rank, so only equal blocks may change places
    work = tokens[:, None] * tokens * rng.integers(0, 2, (128, 128)) * (np.arange(128) % 5 == 0)
    improved = balance._improve(work, tokens, owners, 4)
    assert balance._Deal(work, improved, 4).time < balance._Deal(work, owners, 4).time
    assert np.bincount(improved, tokens).tolist() == np.bincount(owners, tokens).tolist()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match="world_size: expected a number of ranks"):
        balanced(causal(), 8, 0)
    with pytest.raises(LayoutError, match="align=0: align is at least 1"):
        balanced(causal(), 8, 2, align=0)
    with pytest.raises(MaskError):
        balanced(documents([100]), 2000, 2)

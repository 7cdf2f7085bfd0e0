"""The faults of the page are real: their errors follow from the definitions, their refusals come from the proof."""

import re

import numpy as np
import pytest

from ringspan.errors import ScheduleError
from ringspan.layout import zigzag
from ringspan.mask import causal
from ringspan.page.cases import SEQ_LEN, random_inputs
from ringspan.page.faults import describe_faults, list_faults, refusal_of, run_fault
from ringspan.schedule import parse_schedule, validate, visible_blocks
from support.oracle import dense_attention, dense_mask

FAULTS = {fault.key: fault for fault in list_faults()}
DESCRIBED = {fault["key"]: fault for fault in describe_faults()}
LAYOUT = zigzag(SEQ_LEN, 4)
POSITIONS = np.arange(SEQ_LEN)


def attend_block(rank: int, taken: int, named: int) -> tuple[np.ndarray, np.ndarray]:
    """Rank's queries against the data of one block, masked as if it were another."""
    q, k, v = random_inputs(SEQ_LEN, SEQ_LEN)
    mine, keys = LAYOUT.positions(rank), LAYOUT.positions(taken)
    mask = dense_mask(("causal",), mine, LAYOUT.positions(named))
    return dense_attention(q[:, mine], k[:, keys], v[:, keys], mask)


def merged(parts: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    outs, lses = np.array([out for out, _ in parts]), np.array([lse for _, lse in parts])
    weights = np.exp(lses - np.logaddexp.reduce(lses))
    return (weights[..., None] * outs).sum(axis=0)


def by_hand(blocks: list[tuple[int, int]], rank: int) -> np.ndarray:
    """What comes out if a rank attends (data, name) pairs of blocks and merges them rightly."""
    return merged([attend_block(rank, taken, named) for taken, named in blocks])


def rows_of(key: str, rank: int) -> np.ndarray:
    return run_fault(FAULTS[key]).out[:, LAYOUT.positions(rank)]


def right_blocks(rank: int) -> list[int]:
    return [(rank - t) % 4 for t in range(4)]


@pytest.mark.parametrize("rank", range(4))
def test_nothing_wrong_is_dense_attention(rank: int) -> None:
    expected = by_hand([(block, block) for block in right_blocks(rank)], rank)
    np.testing.assert_allclose(rows_of("none", rank), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", range(4))
def test_adding_as_they_are_is_the_sum_of_the_blocks_outputs(rank: int) -> None:
    expected = sum(attend_block(rank, block, block)[0] for block in right_blocks(rank))
    np.testing.assert_allclose(rows_of("plain_sum", rank), expected, rtol=0, atol=1e-13)


def test_an_overwritten_buffer_puts_block_0_in_the_place_of_block_1() -> None:
    """Rank 2 takes kv0 for kv1 in step 1, and passes it on to rank 3, which does the same in step 2."""
    np.testing.assert_allclose(rows_of("overwrite", 2), by_hand([(2, 2), (0, 1), (0, 0), (3, 3)], 2), atol=1e-13)
    np.testing.assert_allclose(rows_of("overwrite", 3), by_hand([(3, 3), (2, 2), (0, 1), (0, 0)], 3), atol=1e-13)
    for rank in (0,):
        # The wrong block comes round to rank 0 in the last step, under the name of kv1.
        expected = by_hand([(0, 0), (3, 3), (2, 2), (0, 1)], rank)
        np.testing.assert_allclose(rows_of("overwrite", rank), expected, atol=1e-13)
    np.testing.assert_allclose(rows_of("overwrite", 1), rows_of("none", 1), atol=1e-13)


@pytest.mark.parametrize("rank", range(4))
def test_the_wrong_direction_masks_each_block_as_another(rank: int) -> None:
    expected = by_hand([((rank - t) % 4, (rank + t) % 4) for t in range(4)], rank)
    np.testing.assert_allclose(rows_of("direction", rank), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", range(4))
def test_without_the_last_hop_one_block_is_missing(rank: int) -> None:
    expected = by_hand([(block, block) for block in right_blocks(rank)[:3]], rank)
    np.testing.assert_allclose(rows_of("last_hop", rank), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rank", range(4))
def test_one_hop_too_many_counts_the_own_block_twice(rank: int) -> None:
    expected = by_hand([(block, block) for block in (*right_blocks(rank), rank)], rank)
    np.testing.assert_allclose(rows_of("extra_hop", rank), expected, rtol=0, atol=1e-13)


def test_only_faults_are_wrong() -> None:
    assert {key for key, fault in DESCRIBED.items() if fault["error"] < 1e-14} == {"none", "contiguous"}
    assert all(fault["error"] > 0.1 for key, fault in DESCRIBED.items() if key not in ("none", "contiguous"))


@pytest.mark.parametrize("key", FAULTS)
def test_the_error_shown_is_the_distance_from_dense_attention(key: str) -> None:
    truth, _ = dense_attention(*random_inputs(SEQ_LEN, SEQ_LEN), dense_mask(("causal",), POSITIONS, POSITIONS))
    by_row = np.abs(run_fault(FAULTS[key]).out - truth).max(axis=(0, -1))
    if by_row.max() > 1e-9:
        assert DESCRIBED[key]["error"] == pytest.approx(by_row.max(), rel=0.06)
    assert DESCRIBED[key]["wrong"] == (by_row > 1e-9).sum()


def test_the_proof_refuses_faults_of_the_schedule_and_nothing_else() -> None:
    assert {key for key in FAULTS if refusal_of(FAULTS[key]) is None} == {"none", "plain_sum", "contiguous"}


@pytest.mark.parametrize("key", ["overwrite", "direction", "last_hop", "extra_hop"])
def test_the_refusal_shown_is_that_of_validate_with_the_step_marked(key: str) -> None:
    shown = parse_schedule(DESCRIBED[key]["grid"])
    with pytest.raises(ScheduleError) as refused:
        validate(shown, visible_blocks(causal(), LAYOUT))
    assert str(refused.value) == DESCRIBED[key]["refusal"]
    step = re.match(r"step (\d+):", DESCRIBED[key]["refusal"])
    assert step is not None
    assert re.search(rf"^▶ {step[1]} ", DESCRIBED[key]["refusal"], re.MULTILINE)

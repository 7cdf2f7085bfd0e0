"""What the page shows of a run is what was computed: tiles, bytes, idle time, errors, against the definitions."""

import itertools

import numpy as np
import pytest

from ringspan.algorithms import build_schedule
from ringspan.errors import UnsupportedError
from ringspan.layout import contiguous, zigzag
from ringspan.mask import causal
from ringspan.page.cases import (
    DECODES,
    HEAD_DIM,
    HEADS,
    MASK_OF,
    MOST_RUNS,
    SEQ_LEN,
    Combination,
    list_combinations,
    random_inputs,
    run_combination,
)
from ringspan.page.replay import ReplayInputs, replay
from ringspan.page.runs import EVERYONE, describe_run, idle_shares, share_tables
from ringspan.schedule import visible_blocks
from ringspan.simulate import simulate_attention
from support.oracle import dense_attention, dense_mask

COMBINATIONS = list(list_combinations())
MASK_SPECS = {
    "full": ("full",),
    "causal": ("causal",),
    "window": ("sliding_window", 7, 0),
    "documents": ("and", ("causal",), ("documents", (12, 20))),
}
ITEMSIZE = 8  # float64


def test_the_lesson_has_at_most_sixty_different_runs() -> None:
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) <= MOST_RUNS


@pytest.mark.parametrize("one", COMBINATIONS, ids=lambda one: one.key)
def test_replay_gives_the_bits_of_the_simulator_after_every_step(one: Combination) -> None:
    simulation = run_combination(one)
    case = simulation.case
    shown = replay(simulation.schedule, case.problem, ReplayInputs(case.q, case.k, case.v))
    np.testing.assert_array_equal(shown.out, simulation.out)
    assert len(shown.lses) == simulation.schedule.num_steps
    for step, lse in zip(simulation.trace, shown.lses, strict=True):
        for cell in step:
            positions = case.problem.layout.positions(cell.rank)
            rows = np.searchsorted(case.problem.layout.all_positions(), positions)
            expected = np.full(lse[:, rows].shape, -np.inf) if cell.lse is None else cell.lse
            np.testing.assert_array_equal(lse[:, rows], expected)


@pytest.mark.parametrize("one", COMBINATIONS, ids=lambda one: one.key)
def test_tiles_are_the_schedule_and_fill_the_mask_once(one: Combination) -> None:
    simulation = run_combination(one)
    run = describe_run(simulation)
    seen: dict[str, np.ndarray] = {}
    for t, step in enumerate(simulation.schedule.steps):
        for rank, attends in enumerate(step.attends):
            product = {(str(q), str(kv)) for attend in attends for q in attend.qs for kv in attend.kvs}
            shown = run["steps"][t][rank][1]
            assert {(q, kv) for q, kv, _ in shown} <= product
            for q, kv, pairs in shown:
                cells = visible_cells(run, owner_of(q), owner_of(kv))
                assert cells.sum() == pairs > 0
                heads = q.partition("[")[2]
                so_far = seen.setdefault(heads, np.zeros_like(cells))
                assert not (so_far & cells).any()
                so_far |= cells
    for so_far in seen.values():
        np.testing.assert_array_equal(so_far, allowed(run))


def owner_of(block: str) -> str:
    return block.partition("[")[0].lstrip("qkv")


def allowed(run: dict) -> np.ndarray:
    return np.array([[mark == "1" for mark in row] for row in run["visible"]])


def visible_cells(run: dict, q_owner: str, kv_owner: str) -> np.ndarray:
    rows, columns = (np.array(run[name]["owners"]) for name in ("rows", "columns"))
    return (rows == q_owner)[:, None] & (columns == kv_owner)[None, :] & allowed(run)


@pytest.mark.parametrize("one", [one for one in COMBINATIONS if one.algorithm not in DECODES], ids=lambda one: one.key)
def test_the_mask_shown_is_the_mask_by_definition(one: Combination) -> None:
    positions = np.arange(SEQ_LEN)
    expected = dense_mask(MASK_SPECS[one.mask], positions, positions)
    np.testing.assert_array_equal(allowed(describe_run(run_combination(one))), expected)


def test_followed_queries_end_at_the_dense_result_by_definition() -> None:
    inputs = random_inputs(SEQ_LEN, SEQ_LEN)
    positions = np.arange(SEQ_LEN)
    truth, true_lse = dense_attention(*inputs, dense_mask(("causal",), positions, positions))
    simulation = run_combination(Combination(4, "zigzag", "causal", "pass_kv", "forward"))
    queries = describe_run(simulation)["queries"]
    assert len(queries["rows"]) == 16
    for i, row in enumerate(queries["rows"]):
        assert queries["lse"][i][-1] == pytest.approx(true_lse[0, row], abs=0.005)
        assert queries["error"][i][-1] < 1e-14
        assert queries["share"][i][-1] == 100
    # Rank 0 holds the last row, which has met one block after step 0: the error is that of the block alone.
    keys = zigzag(SEQ_LEN, 4).positions(0)
    q, k, v = inputs
    alone, lse = dense_attention(q[:, -1:], k[:, keys], v[:, keys], np.ones((1, len(keys)), bool))
    assert queries["error"][-1][0] == pytest.approx(np.abs(alone[0, 0] - truth[0, -1]).max(), rel=0.05)
    assert queries["share"][-1][0] == int(100 * np.exp(lse[0, 0] - true_lse[0, -1]))


def test_bytes_are_those_of_the_blocks() -> None:
    run = describe_run(run_combination(Combination(4, "zigzag", "causal", "pass_kv", "forward")))
    block = (SEQ_LEN // 4) * HEADS.num_kv_heads * 2 * HEAD_DIM * ITEMSIZE
    assert run["sent"] == [[block] * 4, [2 * block] * 4, [3 * block] * 4, [3 * block] * 4]


def test_idle_time_is_that_of_ranks_that_wait_for_the_busiest() -> None:
    simulation = run_combination(Combination(4, "contiguous", "causal", "pass_kv", "forward"))
    own, other = 8 * 9 // 2, 64
    elapsed = own + 3 * other
    expected = [1 - own / elapsed, 1 - (own + other) / elapsed, 1 - (own + 2 * other) / elapsed, 0.0]
    assert idle_shares(simulation)[-1] == pytest.approx(expected, abs=1e-4)
    assert describe_run(simulation)["imbalance"] == pytest.approx(4 * elapsed / (4 * own + 6 * other), abs=0.005)


def test_shared_tables_give_back_every_run() -> None:
    runs = [describe_run(run_combination(one)) for one in COMBINATIONS[:4]]
    tables: dict = {}
    shared = share_tables(runs, tables)
    assert len(tables["visible"]) == 1
    for run, small in zip(runs, shared, strict=True):
        for name, table in (("rows", "rows"), ("columns", "rows"), ("visible", "visible")):
            assert tables[table][small[name]] == run[name]


def test_replicated_queries_belong_to_everyone() -> None:
    run = describe_run(run_combination(Combination(4, "zigzag", "causal", "decode_replicated")))
    assert run["rows"] == {"positions": [SEQ_LEN - 1], "owners": [EVERYONE]}


def test_masks_and_layouts_of_the_controls_are_those_of_the_runs(subtests: pytest.Subtests) -> None:
    layouts = {"contiguous": contiguous, "zigzag": zigzag}
    for one in COMBINATIONS:
        with subtests.test(f"{one}"):
            if one.algorithm == "pass_kv" and one.layout in layouts:
                layout = layouts[one.layout](SEQ_LEN, one.ranks)
                visible = visible_blocks(MASK_OF[one.mask], layout)
                expected = build_schedule("pass_kv", visible, direction=one.direction)
                assert run_combination(one).schedule == expected


def test_any_simulation_can_be_described() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((heads, 13, 4)) for heads in (2, 1, 1))
    for ranks, algorithm in itertools.product((1, 3), ("pass_kv", "pass_q", "all_gather")):
        run = describe_run(simulate_attention(q, k, v, mask=causal(), layout=zigzag(13, ranks), algorithm=algorithm))
        assert run["ranks"] == ranks
        assert run["error"] < 1e-14


def test_arrays_without_heads_are_one_head_and_batches_are_refused() -> None:
    x = np.random.default_rng(1).standard_normal((13, 4))
    assert describe_run(simulate_attention(x, x, x, mask=causal(), layout=zigzag(13, 3)))["error"] < 1e-14
    batch = np.ones((2, 1, 13, 4))
    with pytest.raises(UnsupportedError, match="one sequence"):
        describe_run(simulate_attention(batch, batch, batch, mask=causal(), layout=zigzag(13, 3)))

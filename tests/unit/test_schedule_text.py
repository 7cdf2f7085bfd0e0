"""A schedule and its grid convert into each other, and the grids of tests/golden do not change.

`PYTHONPATH=tests python tests/unit/test_schedule_text.py` writes the golden grids anew; look at what changed first.
"""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.schedule import ALL, AllMerge, Attend, Block, Step, Transfer
from support.faults import make_samples

GOLDEN = Path(__file__).parent.parent / "golden"

HEADS = rs.Heads(8, 2)
WINDOW = rs.sliding_window(8, 0)
CACHE = rs.striped(32, 4)
NEW_TOKENS = rs.striped(4, 4, start=32)
NEW_TOKEN = rs.Layout(((),) * 4, replicated=(rs.Span(32, 33),))


def causal_visible(layout: rs.Layout, mask: rs.Mask | None = None) -> rs.Visible:
    return rs.schedule.visible_blocks(mask or rs.causal(), layout, layout)


ZIGZAG = causal_visible(rs.zigzag(32, 4))
CONTIGUOUS = causal_visible(rs.contiguous(32, 4))


def golden_schedules() -> dict[str, rs.Schedule]:
    mesh = rs.Mesh(2, 2)
    return {
        "pass_kv": rs.schedule.build_schedule("pass_kv", ZIGZAG, heads=HEADS),
        "pass_kv_backward_kv": rs.schedule.build_schedule("pass_kv", ZIGZAG, heads=HEADS, backward="kv"),
        "pass_kv_backward_q": rs.schedule.build_schedule("pass_kv", ZIGZAG, heads=HEADS, backward="q"),
        "pass_kv_reverse": rs.schedule.build_schedule("pass_kv", ZIGZAG, heads=HEADS, direction="reverse"),
        "pass_kv_contiguous": rs.schedule.build_schedule("pass_kv", CONTIGUOUS, heads=HEADS),
        "pass_kv_window": rs.schedule.build_schedule(
            "pass_kv", causal_visible(rs.contiguous(32, 4), WINDOW), heads=HEADS
        ),
        "pass_q": rs.schedule.build_schedule("pass_q", ZIGZAG, heads=HEADS),
        "all_gather": rs.schedule.build_schedule("all_gather", ZIGZAG, heads=HEADS),
        "ulysses": rs.schedule.build_schedule("ulysses", ZIGZAG, heads=HEADS),
        "hybrid": rs.schedule.build_schedule("hybrid", ZIGZAG, heads=HEADS, mesh=mesh),
        "double_ring": rs.schedule.build_schedule("double_ring", ZIGZAG, heads=HEADS, mesh=mesh),
        "decode_sharded": rs.schedule.build_decode(rs.schedule.visible_blocks(rs.causal(), NEW_TOKENS, CACHE)),
        "decode_replicated": rs.schedule.build_decode(
            rs.schedule.visible_blocks(rs.causal(), NEW_TOKEN, CACHE), query="replicated"
        ),
    }


@pytest.mark.parametrize("name", golden_schedules())
def test_golden_grid(name):
    schedule = golden_schedules()[name]
    drawn = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert rs.schedule.format_schedule(schedule) + "\n" == drawn
    assert rs.schedule.parse_schedule(drawn) == schedule


def test_every_golden_grid_is_tested():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(golden_schedules())


def test_a_window_makes_fewer_hops():
    grids = golden_schedules()
    assert grids["pass_kv_window"].num_steps < grids["pass_kv_contiguous"].num_steps


kinds = st.sampled_from(["q", "kv", "q_grad", "out", "dq", "dkv"])
heads = st.none() | st.tuples(st.integers(0, 3), st.integers(1, 4)).map(lambda ends: range(ends[0], sum(ends)))
blocks = st.builds(Block, kinds, st.integers(ALL, 11), heads)
sides = st.lists(blocks, min_size=1, max_size=3).map(tuple)
attends = st.lists(st.builds(Attend, sides, sides), max_size=2)


@st.composite
def schedules(draw: st.DrawFn) -> rs.Schedule:
    """Any schedule that can be written, valid or not."""
    world_size = draw(st.integers(1, 12))
    ranks = st.integers(0, world_size - 1)
    transfers = st.lists(st.builds(Transfer, blocks, ranks, ranks), max_size=3)
    merges = st.lists(st.builds(AllMerge, blocks), max_size=2)
    step = st.builds(Step, st.lists(attends, min_size=world_size, max_size=world_size), transfers, merges)
    num_heads = draw(st.none() | st.builds(rs.Heads, st.just(8), st.sampled_from([1, 2, 4, 8])))
    return rs.Schedule.of_steps(world_size, num_heads, draw(st.lists(step, max_size=3)))


@pytest.mark.wide
@given(schedules())
@settings(deadline=None, max_examples=150)
def test_parse_is_the_inverse_of_format(schedule):
    text = rs.schedule.format_schedule(schedule)
    assert rs.schedule.parse_schedule(text) == schedule
    assert rs.schedule.format_schedule(rs.schedule.parse_schedule(text)) == text


def test_schedules_of_all_algorithms_come_back(subtests):
    for sample in make_samples(5, 60):
        with subtests.test(sample.name):
            assert rs.schedule.parse_schedule(rs.schedule.format_schedule(sample.schedule)) == sample.schedule, (
                sample.name
            )


def test_schedules_that_differ_in_one_place_have_different_grids():
    schedule = golden_schedules()["hybrid"]
    steps = list(schedule.steps)
    rng = random.Random(0)
    for t, step in enumerate(steps):
        if not step.transfers:
            continue
        transfers = list(step.transfers)
        del transfers[rng.randrange(len(transfers))]
        other = rs.Schedule.of_steps(4, schedule.heads, [*steps[:t], Step(step.attends, transfers), *steps[t + 1 :]])
        assert other != schedule
        assert rs.schedule.format_schedule(other) != rs.schedule.format_schedule(schedule)
        assert rs.schedule.parse_schedule(rs.schedule.format_schedule(other)) == other


def test_spacing_and_empty_lines_do_not_matter():
    schedule = golden_schedules()["pass_q"]
    lines = rs.schedule.format_schedule(schedule).splitlines()
    loose = "\n\n".join("  " + line.replace(" │ ", "│   ") for line in lines) + "\n\n"
    assert rs.schedule.parse_schedule(loose) == schedule


def test_a_marked_part_of_a_grid():
    text = rs.schedule.format_schedule(golden_schedules()["pass_kv_contiguous"], range(1, 3), marked=2)
    header, columns, *lines = text.splitlines()
    assert header == "4 ranks"
    assert columns.startswith("  step")
    assert [line[:3] for line in lines] == ["  1", "▶ 2"]


TWO = "2 ranks\nstep │ rank 0 │ rank 1\n"
WRONG_TEXTS = {
    "nothing": ("", "begins with ''; its first line must be like '4 ranks'"),
    "no header": ("step │ rank 0\n0 │ q0×kv0", "begins with 'step │ rank 0'; its first line must be like"),
    "bad header": ("two ranks\nstep │ rank 0\n0 │ q0×kv0", "begins with 'two ranks'; its first line must be like"),
    "no ranks": ("0 ranks\nstep", "0 ranks"),
    "no KV heads": ("1 rank, heads 8/0\nstep │ rank 0\n0 │ q0×kv0", "8/0"),
    "heads that do not divide": ("1 rank, heads 8/3\nstep │ rank 0\n0 │ q0×kv0", "8/3"),
    "no line of columns": ("1 rank\n0 │ q0×kv0", "0 │ q0×kv0"),
    "columns of other ranks": ("1 rank\nstep │ rank 0 │ rank 1\n0 │ q0×kv0", "rank 1"),
    "missing cell": (
        TWO + "0 │ q0×kv0",
        "expected step 0 and 2 cells, one per rank, separated by │; found step '0' and 1",
    ),
    "extra cell": (TWO + "0 │ q0×kv0 │ q1×kv1 │ ", "expected step 0 and 2 cells"),
    "missing step": (TWO + "0 │ q0×kv0 │ \n2 │ │ q1×kv1", "expected step 1 and 2 cells.*found step '2'"),
    "step twice": (TWO + "0 │ q0×kv0 │ \n0 │ │ q1×kv1", "expected step 1 and 2 cells.*found step '0'"),
    "first step missing": (TWO + "1 │ q0×kv0 │ q1×kv1", "expected step 0 and 2 cells.*found step '1'"),
    "no number of step": (TWO + "x │ q0×kv0 │ q1×kv1", "expected step 0 and 2 cells.*found step 'x'"),
    "marked step": (TWO + "▶ 0 │ q0×kv0 │ q1×kv1", "found step '▶ 0'"),
    "unknown kind": (
        TWO + "0 │ query0×kv0 │ ",
        "'query0' is not a block; a block is a kind .dkv, dq, kv, out, q, q_grad.",
    ),
    "no owner": (TWO + "0 │ q×kv0 │ ", "'q' is not a block"),
    "bad heads": (TWO + "0 │ q0[1]×kv0 │ ", "'q0.1.' is not a block"),
    "no block": (TWO + "0 │ ×kv0 │ ", "'' is not a block"),
    "not an action": (TWO + "0 │ q0 │ ", "'q0' is not an action; an action is like 'q0×kv3', 'kv3→1' or 'out.↔all'"),
    "no rank to send to": (TWO + "0 │ kv0→x │ ", "kv0→x"),
    "nobody to send to": (TWO + "0 │ kv0→ │ ", "kv0→"),
    "merge by some": (TWO + "0 │ out*↔1 │ out*↔1", "out.↔1"),
    "merge missing in the first cell": (TWO + "0 │ │ out*↔all", "out.↔all"),
    "merge missing in the second cell": (TWO + "0 │ out*↔all │ ", "out.↔all"),
}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_a_wrong_text_is_refused(name):
    text, message = WRONG_TEXTS[name]
    with pytest.raises(rs.ScheduleError, match=message):
        rs.schedule.parse_schedule(text)


if __name__ == "__main__":
    for golden_name, golden in golden_schedules().items():
        (GOLDEN / f"{golden_name}.txt").write_text(rs.schedule.format_schedule(golden) + "\n", encoding="utf-8")

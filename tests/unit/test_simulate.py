"""The simulator: its trace, its arithmetic, its refusals, and its memory."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

import ringspan as rs
from ringspan.schedule import ALL, Block, Transfer, validate
from ringspan.simulate import bytes_sent
from support import oracle
from support.cases import ROWS, expect, make_arrays, meshes, replicated

HEADS = rs.Heads(8, 2)
LENGTH = 24


def simulate(layout: rs.Layout, mask: rs.Mask | None = None, **options) -> rs.Simulation:
    q, k, v, _ = make_arrays("simulate", HEADS, layout.num_positions, layout.num_positions)
    return rs.simulate_attention(q, k, v, mask=mask or rs.causal(), layout=layout, **options)


def every_algorithm(world_size: int = 4) -> list[dict]:
    return [{"algorithm": row.algorithm, "mesh": mesh} for row in ROWS for mesh in meshes(row, world_size)]


ALGORITHMS = pytest.mark.parametrize(
    "options",
    every_algorithm(),
    ids=lambda options: f"{options['algorithm']} {options['mesh'] and tuple(options['mesh'])}",
)


# The trace.


@ALGORITHMS
def test_trace_has_every_step_and_rank(options):
    got = simulate(rs.zigzag(LENGTH, 4), **options)
    for trace, schedule in ((got.trace, got.schedule), (got.gradients(got.out[..., :3]).trace, None)):
        assert schedule is None or len(trace) == schedule.num_steps
        for t, step in enumerate(trace):
            assert [(of_rank.step, of_rank.rank) for of_rank in step] == [(t, rank) for rank in range(4)]
            assert all((event.step, event.rank) == (t, of_rank.rank) for of_rank in step for event in of_rank.events)


@ALGORITHMS
def test_trace_tells_what_the_schedule_says(options):
    got = simulate(rs.zigzag(LENGTH, 4), **options)
    for t, step in enumerate(got.schedule.steps):
        for rank, of_rank in enumerate(got.trace[t]):
            sent = [Transfer(event.blocks[0], rank, event.peer) for event in of_rank.sent]
            assert sent == list(step.actions(rank).sends)
            tiles = [(q, kv) for attend in step.attends[rank] for q in attend.qs for kv in attend.kvs]
            assert [event.blocks for event in of_rank.attended] == tiles  # zigzag: every tile has something visible
            assert {block for tile in tiles for block in tile} <= set(of_rank.held)


@ALGORITHMS
def test_every_message_sent_is_received_from_that_peer(options):
    got = simulate(rs.zigzag(LENGTH, 4), **options)
    events = [event for step in got.trace for of_rank in step for event in of_rank.events]
    sent = Counter((event.rank, event.peer, event.blocks) for event in events if event.action == "send")
    came = Counter((event.peer, event.rank, event.blocks) for event in events if event.action in ("receive", "merge"))
    assert sent == came
    received = Counter((event.rank, event.blocks) for event in events if event.action == "receive")
    dropped = Counter((event.rank, event.blocks) for event in events if event.action == "drop")
    assert received == dropped


def test_held_blocks_of_a_ring():
    got = simulate(rs.contiguous(LENGTH, 4), rs.full())
    for t, step in enumerate(got.trace):
        for rank, of_rank in enumerate(step):
            held = {Block("q", rank), Block("kv", rank), Block("kv", (rank - t) % 4)}
            assert held <= set(of_rank.held)
            assert len(of_rank.held) <= 4  # q, own kv, and two that pass through
            assert list(of_rank.held) == sorted(of_rank.held, key=str)


def test_coverage_and_pairs_of_tiles():
    """Contiguous causal: the diagonal is partial, below it all pairs are visible; counts are those of Layout.work."""
    layout = rs.contiguous(LENGTH, 4)
    got = simulate(layout)
    pairs = np.zeros((4, 4), np.int64)
    for step in got.trace:
        for of_rank in step:
            for event in of_rank.attended:
                q, kv = (block.owner for block in event.blocks)
                assert event.coverage is (rs.Coverage.PARTIAL if q == kv else rs.Coverage.FULL)
                pairs[q, kv] += event.pairs
    np.testing.assert_array_equal(pairs, layout.work(rs.causal()).pairs)
    np.testing.assert_array_equal(pairs.sum(), LENGTH * (LENGTH + 1) // 2)


def test_pairs_of_masks_by_row_and_of_replicated_keys():
    mask = rs.per_row([rs.causal(), rs.sliding_window(3, 0)])
    layout = replicated(LENGTH, 4)
    q, k, v, _ = make_arrays("rows", HEADS, LENGTH, LENGTH, batch=(2,))
    got = rs.simulate_attention(q, k, v, mask=mask, layout=layout)
    pairs = sum(event.pairs for step in got.trace for of_rank in step for event in of_rank.attended)
    assert pairs == layout.work(mask).pairs.sum()


def test_bytes_of_a_ring():
    got = simulate(rs.contiguous(LENGTH, 4), rs.full())
    block = 6 * 2 * (4 + 3) * 8  # tokens, KV heads, head_dim of k and v, bytes of a float64
    sent = [[[(event.peer, event.nbytes) for event in of_rank.sent] for of_rank in step] for step in got.trace]
    assert sent == [[[((rank + 1) % 4, block)] for rank in range(4)] for _ in range(3)] + [[[]] * 4]
    assert bytes_sent(got.trace) == 12 * block


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "all_gather"])
def test_running_lse_rises_to_the_final_one(algorithm):
    layout = rs.zigzag(LENGTH, 4)
    got = simulate(layout, algorithm=algorithm)
    for rank in range(4):
        running = np.stack([step[rank].lse for step in got.trace])
        assert np.all(running[1:] >= running[:-1])  # a key more never lowers it; -inf to begin with
        np.testing.assert_array_equal(running[-1], layout.shard(got.lse, rank, -1))


@ALGORITHMS
def test_last_lse_of_every_algorithm_is_the_final_one(options):
    layout = rs.striped(LENGTH, 4)
    got = simulate(layout, **options)
    for rank in range(4):
        np.testing.assert_array_equal(got.trace[-1][rank].lse, layout.shard(got.lse, rank, -1))


def test_lse_after_each_step_is_that_of_the_keys_seen_so_far():
    layout = rs.contiguous(LENGTH, 4)
    q, k, v, _ = make_arrays("simulate", HEADS, LENGTH, LENGTH)
    got = simulate(layout, rs.full())
    for t, step in enumerate(got.trace):
        for rank, of_rank in enumerate(step):
            seen = np.concatenate([layout.positions((rank - hop) % 4) for hop in range(t + 1)])
            queries = layout.positions(rank)
            allowed = np.ones((len(queries), len(seen)))
            _, lse = oracle.dense_attention(q[:, queries], k[:, seen], v[:, seen], allowed)
            np.testing.assert_allclose(of_rank.lse, lse, rtol=0, atol=1e-12)


def test_a_backward_trace_has_no_lse():
    got = simulate(rs.zigzag(LENGTH, 4))
    trace = got.gradients(np.ones_like(got.out)).trace
    assert all(of_rank.lse is None for step in trace for of_rank in step)


# Numbers.


@ALGORITHMS
def test_inputs_are_left_alone(options):
    """Also if a shard is a view: a contiguous layout, or a single rank."""
    q, k, v, dout = arrays = make_arrays("inputs", HEADS, LENGTH, LENGTH)
    copies = [x.copy() for x in arrays]
    for layout in (rs.zigzag(LENGTH, 4), rs.contiguous(LENGTH, 4)):
        rs.simulate_attention(q, k, v, mask=rs.causal(), layout=layout, **options).gradients(dout)
    for head in range(8):
        of_head = (q[head], k[head // 4], v[head // 4])
        rs.simulate_attention(*of_head, mask=rs.causal(), layout=rs.contiguous(LENGTH, 1)).gradients(dout[head])
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes(dtype):
    q, k, v, dout = make_arrays("dtypes", HEADS, LENGTH, LENGTH, dtype=dtype)
    got = rs.simulate_attention(q, k, v, mask=rs.causal(), layout=rs.zigzag(LENGTH, 4), algorithm="pass_q")
    gradients = got.gradients(dout)
    assert {x.dtype for x in (got.out, gradients.dq, gradients.dk, gradients.dv)} == {np.dtype(dtype)}
    assert got.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_float16_accumulates_in_float32(algorithm):
    """Sums of thousands of ones exceed the 11 bits of float16; outputs are as accurate as float16 can be."""
    length = 6000
    q, k = (np.zeros((length, 1), np.float16) for _ in range(2))
    rng = np.random.default_rng(0)
    v = rng.standard_normal((length, 1)).astype(np.float16)
    layout = rs.contiguous(length, 4)
    got = rs.simulate_attention(q, k, v, mask=rs.full(), layout=layout, algorithm=algorithm)
    np.testing.assert_allclose(got.lse, np.log(length), rtol=1e-6)
    mean = v.astype(np.float64).mean()
    assert np.abs(got.out.astype(np.float64) - mean).max() <= abs(mean) * 2**-11 + 1e-7
    gradients = got.gradients(np.ones_like(got.out))
    np.testing.assert_allclose(gradients.dv.astype(np.float64), 1.0, rtol=2**-10)  # each key gets 6000 shares of 1/6000


def test_out_of_different_algorithms_is_the_same_to_rounding():
    outs = [simulate(rs.zigzag(LENGTH, 4), **options).out for options in every_algorithm()]
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_memory_is_not_that_of_a_matrix(algorithm):
    length = 4096
    q, k, v, dout = (x[0] for x in make_arrays("memory", rs.Heads(1, 1), length, length))
    layout = rs.zigzag(length, 4)

    def both_passes() -> None:
        got = rs.simulate_attention(q, k, v, mask=rs.causal(), layout=layout, algorithm=algorithm)
        got.gradients(dout)

    tracemalloc.start()
    both_passes()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.1 * length * length * 8  # a matrix of scores in float64; measured: 4 % of it


# Schedules and refusals.


def test_a_schedule_in_place_of_a_name():
    layout = rs.zigzag(LENGTH, 4)
    visible = rs.schedule.visible_blocks(rs.causal(), layout, layout)
    schedule = rs.schedule.build_schedule("pass_q", visible, heads=HEADS, direction="reverse")
    got = simulate(layout, algorithm=schedule)
    by_name = simulate(layout, algorithm="pass_q", direction="reverse")
    assert got.schedule is schedule
    np.testing.assert_array_equal(got.out, by_name.out)
    backward = rs.schedule.build_schedule("all_gather", visible, heads=HEADS, backward="q")
    gradients = got.gradients(np.ones_like(got.out), backward)
    assert gradients.schedule is backward
    np.testing.assert_allclose(gradients.dq, by_name.gradients(np.ones_like(got.out)).dq, rtol=0, atol=1e-14)


def test_a_schedule_read_from_its_grid():
    layout = rs.contiguous(LENGTH, 3)
    grid = rs.schedule.format_schedule(simulate(layout).schedule)
    got = simulate(layout, algorithm=rs.schedule.parse_schedule(grid))
    np.testing.assert_array_equal(got.out, simulate(layout).out)


OWN_FORWARD = """2 ranks, heads 8/2
step │ rank 0                                                      │ rank 1
0    │ q0[0:4]×kv0[0:1] q0×kv* q0[4:8]×kv0[1:2] kv0[0:1]→1         │ q1×kv* q1×kv1 kv1→0 q1[4:8]→0
1    │ q1[4:8]×kv0[1:2] q0[0:1]×kv1[0:1] q0[1:4]×kv1[0:1] q0[4:8]×kv1[1:2] │ q1[0:4]×kv0[0:1]
2    │ out1[4:8]→1                                                 │"""
OWN_BACKWARD = (
    OWN_FORWARD.replace("q0", "q_grad0")
    .replace("q1", "q_grad1")
    .replace(
        "out1[4:8]→1                                                 │",
        "dq1[4:8]→1 dkv1[0:1]→1 dkv1[1:2]→1 │ dkv0[0:1]→0",
    )
)


def test_a_schedule_made_by_hand_that_names_heads_in_many_ways():
    layout = rs.Layout(((rs.Span(0, 5),), (rs.Span(5, 9),)), replicated=(rs.Span(9, 12),))
    q, k, v, dout = arrays = make_arrays("hand", HEADS, 12, 12)
    got = rs.simulate_attention(
        q, k, v, mask=rs.full(), layout=layout, algorithm=rs.schedule.parse_schedule(OWN_FORWARD)
    )
    gradients = got.gradients(dout, rs.schedule.parse_schedule(OWN_BACKWARD))
    wanted = expect(("full",), layout, layout, arrays)
    for x, y in zip((got.out, got.lse, *gradients[:3]), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", [{"direction": "reverse"}, {"mesh": (2, 2)}], ids=str)
def test_a_schedule_leaves_no_options(option):
    layout = rs.zigzag(LENGTH, 4)
    (name,) = option
    with pytest.raises(rs.ScheduleError, match=f"{name}=.*: algorithm is a schedule, which has its own; leave it out"):
        simulate(layout, algorithm=simulate(layout).schedule, **option)


def test_gradients_of_a_schedule_of_ones_own_need_one():
    layout = rs.zigzag(LENGTH, 4)
    got = simulate(layout, algorithm=simulate(layout).schedule)
    with pytest.raises(rs.ScheduleError, match=r"schedule=None.*pass gradients\(dout, schedule=…\)"):
        got.gradients(np.ones_like(got.out))


@pytest.mark.parametrize(
    ("heads", "q_len", "side"),
    [((8, 1), 24, "kv"), ((8, 8), 24, "kv"), ((8, 8), 2, "q"), ((1, 1), 2, "q"), ((8, 1), 4, "kv")],
)
def test_the_lighter_side_travels_backward(heads, q_len, side):
    layout, kv_layout = rs.contiguous(q_len, 2), rs.contiguous(24, 2)
    q, k, v, dout = make_arrays("side", rs.Heads(*heads), q_len, 24)
    got = rs.simulate_attention(q, k, v, mask=rs.full(), layout=layout, kv_layout=kv_layout)
    other = rs.schedule.build_schedule(
        "pass_kv",
        rs.schedule.visible_blocks(rs.full(), layout, kv_layout),
        heads=rs.Heads(*heads),
        backward="q" if side == "kv" else "kv",
    )
    gradients = got.gradients(dout)
    assert {event.blocks[0].kind for step in gradients.trace for of_rank in step for event in of_rank.sent} == (
        {"kv", "dkv"} if side == "kv" else {"q_grad", "dq"}
    )
    assert bytes_sent(gradients.trace) <= bytes_sent(got.gradients(dout, other).trace)


def test_a_wrong_schedule_does_not_run():
    layout = rs.zigzag(LENGTH, 4)
    for wrong in (
        rs.schedule.build_schedule("pass_kv", rs.Visible.of(np.eye(4)), heads=HEADS),  # lacks most of it
        rs.schedule.build_schedule("pass_kv", rs.Visible.of(np.ones((3, 3))), heads=HEADS),  # for other ranks
        rs.schedule.build_schedule(
            "pass_kv", rs.Visible.of(np.ones((4, 4))), heads=HEADS, backward="kv"
        ),  # not forward
    ):
        with pytest.raises(rs.ScheduleError):
            simulate(layout, algorithm=wrong)


def test_a_forward_schedule_gives_no_gradients():
    got = simulate(rs.zigzag(LENGTH, 4))
    with pytest.raises(rs.ScheduleError):
        got.gradients(np.ones_like(got.out), got.schedule)


def test_a_schedule_for_other_heads():
    visible = rs.Visible.of(np.ones((4, 4)))
    schedule = rs.schedule.build_schedule("ulysses", visible, heads=rs.Heads(16, 4))
    with pytest.raises(rs.ScheduleError, match=r"it splits \(16, 4\) heads, and the arrays have \(8, 2\)"):
        simulate(rs.zigzag(LENGTH, 4), algorithm=schedule)


def test_a_replicated_query_in_a_layout_that_shards():
    schedule = rs.schedule.build_decode(rs.Visible.of(np.ones((4, 4))), query="replicated")
    validate(schedule, rs.Visible.of(np.ones((4, 4))))
    with pytest.raises(rs.ScheduleError, match=r"attends q\*.*the layout shards the queries"):
        simulate(rs.zigzag(LENGTH, 4), rs.full(), algorithm=schedule)


ONES = {name: np.ones((4, 8, 5)) for name in "qkv"}
BAD_ARRAYS = {
    "integers": (
        {"q": np.ones((4, 8, 5), int)},
        "q: it has shape .4, 8, 5. and dtype int64; give a float16, float32 or",
    ),
    "complex": ({"v": np.ones((4, 8, 5), complex)}, "v: it has shape .4, 8, 5. and dtype complex128"),
    "one dim": ({"k": np.ones(8)}, "k: it has shape .8,. and dtype float64.*shape .seq, dim. or"),
    "dims differ": ({"q": np.ones((8, 5))}, "q, k and v must have as many dims as each other and one dtype"),
    "dtypes differ": ({"q": np.ones((4, 8, 5), np.float32)}, "float32, float64, float64: q, k and v must have"),
    "batch dims differ": (
        {name: np.ones((2 if name == "q" else 3, 4, 8, 5)) for name in "qkv"},
        r"q.shape=\(2, 4, 8, 5\).*batch dims must be equal",
    ),
    "k and v of different heads": ({"v": np.ones((2, 8, 5))}, "k and v must agree in all but the last dim"),
    "k and v of different length": ({"v": np.ones((4, 7, 5))}, "k and v must agree in all but the last dim"),
    "head_dims differ": ({"q": np.ones((4, 8, 6))}, "q and k must have the same head_dim, at least 1"),
    "no head_dim": (
        {"q": np.ones((4, 8, 0)), "k": np.ones((4, 8, 0))},
        "q and k must have the same head_dim, at least 1",
    ),
    "heads that do not divide": (
        {"k": np.ones((3, 8, 5)), "v": np.ones((3, 8, 5))},
        "the 4 query heads must be a multiple of the 3 KV heads",
    ),
    "no KV heads": ({"k": np.ones((0, 8, 5)), "v": np.ones((0, 8, 5))}, "must be a multiple of the 0 KV heads"),
    "q too long": (
        {"q": np.ones((4, 9, 5))},
        r"q.shape=\(4, 9, 5\): its layout has 8 positions; give one row for each",
    ),
    "keys too short": ({"k": np.ones((4, 7, 5)), "v": np.ones((4, 7, 5))}, "k.shape=.*its layout has 8 positions"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_bad_arrays_are_refused(name):
    changes, message = BAD_ARRAYS[name]
    with pytest.raises(rs.ShapeError, match=message):
        rs.simulate_attention(**(ONES | changes), mask=rs.full(), layout=rs.contiguous(8, 2))


def test_a_dout_that_does_not_fit_is_refused():
    got = rs.simulate_attention(**ONES, mask=rs.full(), layout=rs.contiguous(8, 2))
    with pytest.raises(rs.ShapeError, match=r"dout.shape=\(4, 8, 4\).*give \(4, 8, 5\)"):
        got.gradients(np.ones((4, 8, 4)))
    with pytest.raises(rs.ShapeError, match=r"dout: it has shape .* and dtype int64"):
        got.gradients(np.ones((4, 8, 5), int))


def test_layouts_and_masks_that_do_not_fit_are_refused():
    with pytest.raises(rs.LayoutError, match="kv_layout: it is for 3 ranks and layout is for 2"):
        rs.simulate_attention(**ONES, mask=rs.full(), layout=rs.contiguous(8, 2), kv_layout=rs.contiguous(8, 3))
    with pytest.raises(rs.ShapeError, match=r"mask: it has 3 rows and q has batch dims \(\)"):
        rs.simulate_attention(**ONES, mask=rs.per_row([rs.full()] * 3), layout=rs.contiguous(8, 2))
    with pytest.raises(rs.MaskError, match="the mask's documents have 5 tokens"):
        rs.simulate_attention(**ONES, mask=rs.documents([5]), layout=rs.contiguous(8, 2))


def test_one_row_of_replicated_keys_is_kept_by_every_rank():
    got = simulate(replicated(LENGTH, 4))
    for step in got.trace:
        for of_rank in step:
            assert Block("kv", ALL) in of_rank.held

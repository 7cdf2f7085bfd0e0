"""Properties of the schedules of all algorithms, and the promises of each; counted here, not by `validate`."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringspan as rs
from ringspan.algorithms import ALGORITHMS
from ringspan.schedule import ALL, Block, Schedule, Step
from ringspan.simulate import bytes_sent
from support.cases import ROWS, WORLD_SIZES, Row, meshes

SIDES = (None, "kv", "q")
ONE_HEAD = rs.Heads(1, 1)


def everyone(world_size: int, *, replicated: bool = False) -> rs.Visible:
    return rs.Visible.of(np.ones((world_size, world_size + replicated)))


def heads_for(row: Row, world_size: int, mesh: rs.Mesh | None) -> rs.Heads:
    degree = world_size if mesh is None else mesh.inner
    return rs.Heads(2 * degree, degree) if row.splits_heads else ONE_HEAD


@st.composite
def built(draw: st.DrawFn) -> tuple[Schedule, rs.Visible, rs.Heads]:
    """Build any algorithm with any options for any matrix."""
    row = draw(st.sampled_from(ROWS))
    world_size = draw(st.integers(1, 8))
    cells = draw(st.integers(0, 2 ** (world_size * (world_size + 1)) - 1))
    bits = [bool(cells >> i & 1) for i in range(world_size * (world_size + 1))]
    visible = rs.Visible.of(np.array(bits).reshape(world_size, world_size + 1))
    mesh = draw(st.sampled_from(meshes(row, world_size)))
    heads = heads_for(row, world_size, mesh)
    options = {"mesh": mesh, "direction": draw(st.sampled_from(row.directions)), "heads": heads}
    return (
        rs.schedule.build_schedule(row.algorithm, visible, **options, backward=draw(st.sampled_from(SIDES))),
        visible,
        heads,
    )


def query_heads(block: Block, heads: rs.Heads) -> range:
    """Return the query heads that a block covers."""
    if block.heads is None:
        return range(heads.num_heads)
    width = heads.group if block.kind == "kv" else 1
    return range(block.heads.start * width, block.heads.stop * width)


def attended_pairs(schedule: Schedule, visible: rs.Visible, heads: rs.Heads) -> Counter[tuple[int, int, int]]:
    """Count how often each visible (q owner, kv owner, query head) is computed."""
    attends = [attend for step in schedule.steps for of_rank in step.attends for attend in of_rank]
    return Counter(
        (q.owner, kv.owner, head)
        for attend in attends
        for q in attend.qs
        for kv in attend.kvs
        if visible.matrix[q.owner, kv.owner]
        for head in query_heads(q, heads)
        if head in query_heads(kv, heads)
    )


@given(built())
@settings(deadline=None, max_examples=150)
def test_every_visible_pair_is_attended_exactly_once(case):
    schedule, visible, heads = case
    pairs = [
        (int(q), ALL if kv == visible.world_size else int(kv), head)
        for q, kv in np.argwhere(visible.matrix)
        for head in range(heads.num_heads)
    ]
    assert attended_pairs(schedule, visible, heads) == Counter(pairs)


@given(built())
@settings(deadline=None, max_examples=100)
def test_sends_match_receives(case):
    schedule, _, _ = case
    for t in range(schedule.num_steps):
        of_ranks = [schedule.actions(rank, t) for rank in range(schedule.world_size)]
        sends = [transfer for actions in of_ranks for transfer in actions.sends]
        receives = [transfer for actions in of_ranks for transfer in actions.receives]
        assert Counter(sends) == Counter(receives) == Counter(schedule.step(t).transfers)
        for rank, actions in enumerate(of_ranks):
            assert all(transfer.src == rank for transfer in actions.sends)
            assert all(transfer.dst == rank for transfer in actions.receives)


@given(built())
@settings(deadline=None, max_examples=100)
def test_every_sum_is_brought_home(case):
    """Each rank that adds to another rank's sum sends its part once, and the owner receives at least one part."""
    schedule, visible, _ = case
    made = {
        (rank, block)
        for step in schedule.steps
        for rank, attends in enumerate(step.attends)
        for attend in attends
        for block, _ in visible.contributions(attend)
        if block.owner not in (rank, ALL)
    }
    sums = [transfer for step in schedule.steps for transfer in step.transfers if transfer.block.is_sum]
    assert Counter((transfer.src, transfer.block) for transfer in sums) == Counter(made)
    assert {block for _, block in made} == {transfer.block for transfer in sums if transfer.dst == transfer.block.owner}


def build(algorithm: str, visible: rs.Visible, heads: rs.Heads = ONE_HEAD, **options) -> Schedule:
    return rs.schedule.build_schedule(algorithm, visible, heads=heads, **options)


def transfers(schedule: Schedule) -> list:
    return [transfer for step in schedule.steps for transfer in step.transfers]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("direction", "sign"), [("forward", -1), ("reverse", 1), (None, -1)])
@pytest.mark.parametrize(("algorithm", "side"), [("pass_kv", 1), ("pass_q", 0)])
def test_which_block_is_where_in_a_ring(algorithm, side, direction, sign, world_size):
    schedule = build(algorithm, everyone(world_size), direction=direction)
    for t in range(world_size):
        for rank in range(world_size):
            (attend,) = schedule.actions(rank, t).attends
            assert attend[side][0].owner == (rank + sign * t) % world_size
            assert attend[1 - side][0].owner == rank


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_blocks_move_to_the_neighbour(direction):
    hop = 1 if direction == "forward" else -1
    for transfer in transfers(build("pass_kv", everyone(5), direction=direction)):
        assert transfer.dst == (transfer.src + hop) % 5


@pytest.mark.parametrize("algorithm", ["pass_kv", "all_gather", "double_ring"])
def test_no_sum_travels_where_queries_rest(algorithm):
    mesh = rs.Mesh(2, 2) if algorithm == "double_ring" else None
    assert {transfer.block.kind for transfer in transfers(build(algorithm, everyone(4), mesh=mesh))} == {"kv"}


def test_rings_run_backward_on_the_named_side(subtests):
    for algorithm in ("pass_kv", "pass_q"):
        with subtests.test(algorithm=algorithm):
            for side, moved in (("kv", {"kv", "dkv"}), ("q", {"q_grad", "dq"})):
                kinds = {transfer.block.kind for transfer in transfers(build(algorithm, everyone(4), backward=side))}
                assert kinds == moved


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "all_gather"])
@pytest.mark.parametrize(("left", "neighbours"), [(0, 0), (4, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_a_window_makes_fewer_hops(algorithm, left, neighbours):
    """With 8 tokens per rank, a window of `left` tokens needs the blocks of this many earlier ranks."""
    layout = rs.contiguous(64, 8)
    visible = rs.schedule.visible_blocks(rs.sliding_window(left, 0), layout, layout)
    schedule = build(algorithm, visible)
    needed = sum(min(rank, neighbours) for rank in range(8))
    inputs = [transfer for transfer in transfers(schedule) if not transfer.block.is_sum]
    if algorithm != "pass_q":  # queries turn the other way: they go round to the ranks before theirs
        assert len(inputs) == needed
        assert schedule.num_steps == neighbours + 1 if algorithm == "pass_kv" else schedule.num_steps <= 2
    else:
        reverse = build(algorithm, visible, direction="reverse")
        assert len([transfer for transfer in transfers(reverse) if not transfer.block.is_sum]) == needed
        assert len(inputs) >= needed


@given(built())
@settings(deadline=None, max_examples=100)
def test_no_rank_receives_a_block_that_it_does_not_need(case):
    """A received input is read: attended with a block that sees it, or forwarded to such a rank."""
    schedule, visible, _ = case
    for rank in range(schedule.world_size):
        received, used = Counter(), set()
        for step in schedule.steps:
            attends, sends, receives, _ = step.actions(rank)
            used |= {block for attend in attends for block in (*attend.qs, *attend.kvs)}
            used |= {transfer.block for transfer in sends}
            received.update(transfer.block for transfer in receives if not transfer.block.is_sum)
            for attend in attends:
                sees = visible.matrix[np.ix_([q.owner for q in attend.qs], [kv.owner for kv in attend.kvs])]
                assert sees.any(axis=0).all()
                assert sees.any(axis=1).all()
        assert set(received) <= used
        assert max(received.values(), default=1) == 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
@pytest.mark.parametrize("backward", SIDES)
def test_nothing_is_sent_where_all_is_local(subtests, row, backward):
    for mesh in meshes(row, 4):
        with subtests.test(mesh=mesh):
            inner = 4 if mesh is None else mesh.inner
            schedule = build(
                row.algorithm, rs.Visible.of(np.eye(4)), heads_for(row, 4, mesh), mesh=mesh, backward=backward
            )
            moved = transfers(schedule)
            if row.splits_heads:  # heads are exchanged all the same, but not beyond the group
                assert all(transfer.src // inner == transfer.dst // inner for transfer in moved)
            else:
                assert not moved


def test_replicated_keys_are_never_sent(subtests):
    for row in ROWS:
        with subtests.test(row.algorithm):
            for mesh in meshes(row, 4):
                for backward in SIDES:
                    visible = everyone(4, replicated=True)
                    schedule = build(row.algorithm, visible, heads_for(row, 4, mesh), mesh=mesh, backward=backward)
                    assert all(transfer.block.owner != ALL for transfer in transfers(schedule))


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("backward", SIDES)
def test_double_ring_crosses_nodes_once_per_block_and_phase(mesh, backward):
    outer, inner = mesh
    schedule = build("double_ring", everyone(8), mesh=rs.Mesh(*mesh), backward=backward)
    crossing = [t for t in transfers(schedule) if t.src // inner != t.dst // inner and not t.block.is_sum]
    assert len(crossing) == 8 * (outer - 1)
    flat = build("pass_kv", everyone(8), backward=backward)
    assert len(transfers(schedule)) == len(transfers(flat))


def test_ulysses_exchanges_twice_whatever_the_number_of_ranks(subtests):
    for world_size in (2, 4, 8):
        with subtests.test(world_size=world_size):
            schedule = build("ulysses", everyone(world_size), rs.Heads(8, 8))
            assert [len(step.transfers) > 0 for step in schedule.steps] == [True, False, True]
            assert [sum(map(len, step.attends)) for step in schedule.steps] == [0, world_size, 0]


# Refusals.


@pytest.mark.parametrize(
    ("heads", "world_size", "legal"),
    [
        ((8, 8), 3, "1, 2, 4 or 8 ranks"),
        ((8, 2), 16, "1, 2, 4 or 8 ranks"),
        ((6, 3), 2, "1, 3 or 6 ranks"),
        ((6, 2), 3, "1, 2 or 6 ranks"),
        ((1, 1), 2, "1 rank"),
    ],
)
def test_ulysses_names_the_legal_sizes(heads, world_size, legal):
    q_heads, kv_heads = ("1 {} head" if number == 1 else f"{number} {{}} heads" for number in heads)
    split = f"{q_heads.format('query')} and {kv_heads.format('KV')}:"
    message = f"Ulysses over {world_size} ranks with {split}.*use {legal}, or"
    with pytest.raises(rs.UnsupportedError, match=message):
        build("ulysses", everyone(world_size), rs.Heads(*heads))
    with pytest.raises(rs.UnsupportedError, match=message):
        build("hybrid", everyone(2 * world_size), rs.Heads(*heads), mesh=rs.Mesh(2, world_size))


@pytest.mark.parametrize("num_heads", [2**12, 2**39])
def test_ulysses_names_no_more_ranks_than_anyone_has(num_heads):
    with pytest.raises(rs.UnsupportedError, match="use 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 or 1024 ranks"):
        build("ulysses", everyone(3), rs.Heads(num_heads, num_heads))


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (15, 5), (15, 15), (6, 3), (12, 4)], ids=str)
def test_ulysses_takes_exactly_the_sizes_it_names(subtests, heads):
    query_heads, kv_heads = heads
    for world_size in range(1, query_heads + 1):
        with subtests.test(world_size=world_size):
            divides = query_heads % world_size == 0 and (kv_heads % world_size == 0 or world_size % kv_heads == 0)
            if divides:
                assert build("ulysses", everyone(world_size), rs.Heads(*heads)).world_size == world_size
            else:
                with pytest.raises(rs.UnsupportedError, match="the ranks must divide the query heads"):
                    build("ulysses", everyone(world_size), rs.Heads(*heads))


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if "mesh" not in row.options])
def test_a_mesh_is_refused_where_it_has_no_use(algorithm):
    message = rf"mesh=Mesh.*: {algorithm} takes no mesh; leave it out, or use hybrid, double_ring"
    with pytest.raises(rs.UnsupportedError, match=message):
        build(algorithm, everyone(4), rs.Heads(4, 4), mesh=rs.Mesh(2, 2))


@pytest.mark.parametrize("algorithm", [name for name, row in ALGORITHMS.items() if "direction" not in row.options])
def test_a_direction_is_refused_where_it_has_no_use(algorithm):
    message = rf"direction='reverse': {algorithm} takes no direction; leave it out, or use pass_kv, pass_q, hybrid"
    with pytest.raises(rs.UnsupportedError, match=message):
        build(algorithm, everyone(4), rs.Heads(4, 4), direction="reverse")


@pytest.mark.parametrize("algorithm", ["hybrid", "double_ring"])
def test_a_mesh_is_asked_for_where_it_is_needed(algorithm):
    with pytest.raises(rs.UnsupportedError, match=rf"mesh=None: {algorithm} runs on ranks in two dimensions.*= 4"):
        build(algorithm, everyone(4), rs.Heads(4, 4))


@pytest.mark.parametrize("mesh", [(2, 3), (0, 4), (-2, -2), (4, 4)], ids=str)
@pytest.mark.parametrize("algorithm", ["hybrid", "double_ring"])
def test_a_mesh_that_does_not_fit_names_those_that_do(algorithm, mesh):
    with pytest.raises(
        rs.LayoutError, match=r"must be the 4 ranks of the group; use one of \(4, 1\), \(2, 2\), \(1, 4\)"
    ):
        build(algorithm, everyone(4), rs.Heads(4, 4), mesh=rs.Mesh(*mesh))


def test_an_unknown_algorithm_lists_the_choices():
    with pytest.raises(rs.UnsupportedError, match=f"algorithm='ring'.*{', '.join(ALGORITHMS)}"):
        build("ring", everyone(4))


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_an_unknown_direction_lists_the_choices(algorithm):
    with pytest.raises(rs.UnsupportedError, match=r"direction='left'.*forward.*reverse"):
        build(algorithm, everyone(4), direction="left")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_an_unknown_side_lists_the_choices(row):
    mesh = meshes(row, 4)[-1]
    with pytest.raises(rs.UnsupportedError, match=r"backward='out'.*kv.*q"):
        build(row.algorithm, everyone(4), rs.Heads(4, 4), mesh=mesh, backward="out")


def test_an_unknown_route_lists_the_choices():
    with pytest.raises(rs.UnsupportedError, match=r"route='Straight'.*straight, follow"):
        rs.schedule.build_schedule("pass_kv", everyone(4), backward="kv", route="Straight")


@pytest.mark.parametrize("shape", [(4, 3), (4, 6), (4,), (0, 0)])
def test_a_matrix_of_what_sees_what_has_a_column_for_each_rank(shape):
    with pytest.raises(rs.ShapeError, match=r"matrix.shape=.*give \(P, P\) or \(P, P \+ 1\)"):
        rs.Visible.of(np.ones(shape))


def test_an_unknown_form_of_decode_lists_the_choices():
    with pytest.raises(rs.UnsupportedError, match=r"query='both'.*sharded.*replicated"):
        rs.schedule.build_decode(everyone(4), query="both")


# Bytes, computed by hand: 4 ranks of 6 tokens, 8 query heads over 2 KV heads, head_dim 5 (v: 3), float32.

TOKENS, Q_HEADS, KV_HEADS, DIM, V_DIM, ITEM = 6, 8, 2, 5, 3, 4
Q_BYTES = TOKENS * Q_HEADS * DIM * ITEM
KV_BYTES = TOKENS * KV_HEADS * (DIM + V_DIM) * ITEM
OUT_BYTES = TOKENS * Q_HEADS * (V_DIM + 1) * ITEM  # out and lse
Q_GRAD_BYTES = TOKENS * Q_HEADS * (DIM + V_DIM + V_DIM + 1) * ITEM  # q, dout, out, lse
HOPS = 4 * 3  # each of 4 blocks visits 3 other ranks

FORWARD_BYTES = {
    "pass_kv": HOPS * KV_BYTES,
    "pass_q": HOPS * (Q_BYTES + OUT_BYTES),
    "all_gather": HOPS * KV_BYTES,
    # A quarter of the query heads goes to each other rank and comes back as out; two ranks share a KV head.
    "ulysses": HOPS * (Q_BYTES // 4 + OUT_BYTES // 4 + KV_BYTES // 2),
    "double_ring": HOPS * KV_BYTES,
    # Half of the heads to the neighbour and back; then half of two ranks' KV to the other group.
    "hybrid": 4 * (Q_BYTES // 2 + KV_BYTES // 2 + OUT_BYTES // 2) + 4 * 2 * KV_BYTES // 2,
}
BACKWARD_BYTES = {
    ("pass_kv", "kv"): HOPS * 2 * KV_BYTES,
    ("pass_kv", "q"): HOPS * (Q_GRAD_BYTES + Q_BYTES),
    ("all_gather", "kv"): HOPS * 2 * KV_BYTES,
    ("double_ring", "kv"): HOPS * 2 * KV_BYTES,
    ("ulysses", "kv"): HOPS * (Q_GRAD_BYTES // 4 + Q_BYTES // 4 + KV_BYTES),
}


def arrays(dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    shapes = [(Q_HEADS, 24, DIM), (KV_HEADS, 24, DIM), (KV_HEADS, 24, V_DIM)]
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


@pytest.mark.parametrize("algorithm", FORWARD_BYTES)
def test_bytes_forward(algorithm):
    mesh = (2, 2) if "mesh" in ALGORITHMS[algorithm].options else None
    layout = rs.zigzag(24, 4)
    got = rs.simulate_attention(*arrays(), mask=rs.causal(), layout=layout, algorithm=algorithm, mesh=mesh)
    assert bytes_sent(got.trace) == FORWARD_BYTES[algorithm]


@pytest.mark.parametrize(("algorithm", "side"), BACKWARD_BYTES)
def test_bytes_backward(algorithm, side):
    mesh = (2, 2) if "mesh" in ALGORITHMS[algorithm].options else None
    layout = rs.zigzag(24, 4)
    forward = rs.simulate_attention(*arrays(), mask=rs.causal(), layout=layout, algorithm=algorithm, mesh=mesh)
    visible = rs.schedule.visible_blocks(rs.causal(), layout, layout)
    options = {"mesh": mesh and rs.Mesh(*mesh), "backward": side}
    backward = forward.gradients(forward.out, build(algorithm, visible, rs.Heads(Q_HEADS, KV_HEADS), **options))
    assert bytes_sent(backward.trace) == BACKWARD_BYTES[algorithm, side]


def test_bytes_of_narrow_inputs_and_wide_sums():
    """float16 inputs travel unchanged, sums in float32; every rank sends its merged part to all others."""
    layout = rs.zigzag(24, 4)
    got = rs.simulate_attention(*arrays(np.float16), mask=rs.causal(), layout=layout, algorithm="pass_q")
    assert bytes_sent(got.trace) == HOPS * (Q_BYTES // 2 + OUT_BYTES)
    query = rs.Layout(((),) * 4, replicated=(rs.Span(24, 25),))
    decode = rs.schedule.build_decode(rs.schedule.visible_blocks(rs.causal(), query, layout), query="replicated")
    q, k, v = arrays(np.float16)
    got = rs.simulate_attention(q[:, :1], k, v, mask=rs.causal(), layout=query, kv_layout=layout, algorithm=decode)
    assert bytes_sent(got.trace) == 4 * 3 * OUT_BYTES // TOKENS


def test_equal_schedules_are_equal_and_others_are_not():
    schedule = build("pass_kv", everyone(4))
    steps = list(schedule.steps)
    assert Schedule.of_steps(4, None, steps) == schedule
    assert hash(Schedule.of_steps(4, None, steps)) == hash(schedule)
    assert Schedule.of_steps(4, None, steps[:-1]) != schedule
    assert Schedule.of_steps(4, ONE_HEAD, steps) != schedule
    assert Schedule.of_steps(4, None, [*steps[:-1], Step([()] * 4)]) != schedule
    assert schedule != build("pass_kv", everyone(4), direction="reverse")
    assert schedule is build("pass_kv", everyone(4))

"""Every case of the table, forward and backward, against the dense oracle; then inputs that it does not vary."""

import numpy as np
import pytest

import ringspan as rs
from ringspan.algorithms import ALGORITHMS
from support import oracle
from support.cases import (
    CASES,
    LAYOUTS,
    ROWS,
    Arrays,
    Expected,
    Row,
    expect,
    factor_pairs,
    irregular,
    make_arrays,
    make_mask,
    meshes,
    product_cases,
    replicated,
    select,
    wide_from,
)

EXACT = 1e-12  # float64
SINGLE = 1e-5  # float32
HEADS = rs.Heads(4, 2)

each_world_size = pytest.mark.parametrize("world_size", wide_from(3))


def options(row: Row, world_size: int) -> dict:
    """Return the algorithm's options, with the squarest mesh if it takes one."""
    mesh = min(meshes(row, world_size), key=lambda mesh: 0 if mesh is None else abs(mesh.outer - mesh.inner))
    return {"algorithm": row.algorithm, "mesh": mesh}


def largest_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference; infinite if only one side is finite, or if the shapes differ."""
    if got.shape != wanted.shape:
        return np.inf
    same = got == wanted  # -inf is equal to -inf, though their difference is NaN
    difference = np.abs(np.subtract(got, wanted, out=np.zeros(wanted.shape), where=~same))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def check(got: tuple, wanted: tuple, tolerance: float, what: object) -> None:
    assert len(got) == len(wanted), what
    for name, mine, theirs in zip(Expected._fields, got, wanted, strict=False):
        error = largest_error(mine, theirs)
        assert error < tolerance, f"{what}: {name} is off by {error:.2e}"


def run(arrays: Arrays, schedule: rs.Schedule | None = None, **keywords) -> tuple:
    """Simulate out, lse, dq, dk and dv; `schedule` replaces the usual one of the backward pass."""
    forward = rs.simulate_attention(arrays.q, arrays.k, arrays.v, **keywords)
    gradients = forward.gradients(arrays.dout, schedule=schedule)
    return forward.out, forward.lse, gradients.dq, gradients.dk, gradients.dv


def run_case(case, arrays: Arrays) -> tuple:
    mask, layout = make_mask(case.spec), case.make_layout()
    backward = case.make_schedule(rs.schedule.visible_blocks(mask, layout, layout), case.backward)
    return run(arrays, backward, mask=mask, layout=layout, **case.options)


def test_the_table_has_every_algorithm(subtests):
    assert {row.algorithm for row in ROWS} == set(ALGORITHMS)
    for row in ROWS:
        with subtests.test(row.algorithm):
            assert ("direction" in ALGORITHMS[row.algorithm].options) == (len(row.directions) == 2)
            assert ("mesh" in ALGORITHMS[row.algorithm].options) == row.has_mesh
            assert ("heads" in ALGORITHMS[row.algorithm].options) == row.splits_heads


def test_the_table_covers_every_pair_of_values():
    possible, covered = ({pair for case in cases for pair in factor_pairs(case)} for cases in (product_cases(), CASES))
    assert possible == covered
    assert len(set(map(str, CASES))) == len(CASES)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_world_size
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_case(subtests, algorithm, world_size, layout):
    cases = select(algorithm=algorithm, world_size=world_size, layout=layout)
    assert cases
    for case in cases:
        with subtests.test(str(case)):
            arrays = case.make_arrays()
            placed = case.make_layout()
            check(run_case(case, arrays), expect(case.spec, placed, placed, arrays), EXACT, case)


@each_world_size
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_float32_case(subtests, algorithm, world_size):
    for case in select(algorithm=algorithm, world_size=world_size)[::9]:
        with subtests.test(str(case)):
            arrays = case.make_arrays(np.float32)
            placed = case.make_layout()
            got = run_case(case, arrays)
            assert {x.dtype for x in got} == {np.dtype(np.float32)}, case
            check(got, expect(case.spec, placed, placed, arrays), SINGLE, case)


CROSS_LAYOUTS = {
    "keys longer": (rs.zigzag(11, 4), rs.striped(30, 4)),
    "queries longer": (rs.striped(30, 4, block=4), rs.contiguous(9, 4)),
    "no key on two ranks": (rs.contiguous(17, 4), rs.Layout(((rs.Span(3, 20, 3),), (), (), (rs.Span(1, 15, 3),)))),
    "no query on two ranks": (rs.Layout(((), (rs.Span(6, 13),), (), (rs.Span(0, 5, 2),))), rs.zigzag(19, 4)),
    "keys replicated": (rs.zigzag(21, 4), replicated(21, 4)),
    "only replicated keys": (rs.striped(14, 4), rs.Layout(((),) * 4, replicated=(rs.Span(0, 9),))),
    "queries replicated": (replicated(21, 4), irregular(21, 4)),
}
CROSS_MASKS = (("full",), ("causal",), ("sliding_window", 4, 2), ("documents", (8, 5, 30)))


@pytest.mark.parametrize("name", CROSS_LAYOUTS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_queries_and_keys_of_different_layouts(subtests, row, name):
    layout, kv_layout = CROSS_LAYOUTS[name]
    for spec in CROSS_MASKS:
        with subtests.test(spec=spec):
            arrays = make_arrays(name, rs.Heads(8, 4), layout.num_positions, kv_layout.num_positions)
            got = run(arrays, mask=make_mask(spec), layout=layout, kv_layout=kv_layout, **options(row, 4))
            check(got, expect(spec, layout, kv_layout, arrays), EXACT, (row.algorithm, name, spec))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_batch_dims(row, batch):
    layout = rs.zigzag(15, 2)
    arrays = make_arrays(str(batch), HEADS, 15, 15, batch=batch)
    got = run(arrays, mask=rs.causal(), layout=layout, **options(row, 2))
    check(got, expect(("causal",), layout, layout, arrays), EXACT, batch)


@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "all_gather"])
def test_arrays_without_heads(algorithm):
    layout = rs.striped(13, 3)
    arrays = Arrays(*(x[0] for x in make_arrays("2-D", rs.Heads(1, 1), 13, 13)))
    got = run(arrays, mask=rs.causal(), layout=layout, algorithm=algorithm)
    assert [x.ndim for x in got] == [2, 1, 2, 2, 2]
    check(got, expect(("causal",), layout, layout, arrays), EXACT, algorithm)


ROW_SPECS = (("causal",), ("sliding_window", 4, 0), ("documents", (6, 40)), ("causal",))


@pytest.mark.parametrize("batch", [(4,), (4, 2)], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_masks_that_differ_between_batch_rows(subtests, row, batch):
    for layout in (rs.zigzag(21, 4), irregular(21, 4), replicated(21, 4)):
        with subtests.test(layout=layout):
            arrays = make_arrays("per_row", rs.Heads(8, 2), layout.num_positions, layout.num_positions, batch=batch)
            spec = ("per_row", ROW_SPECS)
            got = run(arrays, mask=make_mask(spec), layout=layout, **options(row, 4))
            check(got, expect(spec, layout, layout, arrays), EXACT, (row.algorithm, layout))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_new_tokens_against_a_cache(subtests, row):
    cached, new = 20, 11
    layout = rs.zigzag(new, 4, start=cached)
    old = rs.contiguous(cached, 4)
    both = rs.Layout(tuple((*a, *b) for a, b in zip(old.spans_by_rank, layout.spans_by_rank, strict=True)))
    for kv_layout in (both, rs.striped(cached + new, 4), rs.striped(cached + new, 4, block=4)):
        for spec in (("causal",), ("sliding_window", 12, 0), ("prefix", 25)):
            with subtests.test(kv_layout=kv_layout, spec=spec):
                arrays = make_arrays("turn", rs.Heads(8, 2), new, cached + new)
                got = run(arrays, mask=make_mask(spec), layout=layout, kv_layout=kv_layout, **options(row, 4))
                check(got, expect(spec, layout, kv_layout, arrays), EXACT, (row.algorithm, kv_layout, spec))


CACHES = {
    "contiguous": rs.contiguous(23, 4),
    "striped": rs.striped(23, 4),
    "two ranks still empty": rs.striped(2, 4),
    "irregular": irregular(23, 4),
    "replicated": replicated(23, 4),
}


def with_new_tokens(cache: rs.Layout, layout: rs.Layout) -> rs.Layout:
    """Return the layout of the cache after each query's own key was added on the query's rank."""
    spans = [(*old, *new) for old, new in zip(cache.spans_by_rank, layout.spans_by_rank, strict=True)]
    return rs.Layout(tuple(spans), replicated=(*cache.replicated, *layout.replicated))


def check_decode(layout: rs.Layout, kv_layout: rs.Layout, spec: tuple, query: str) -> None:
    mask = make_mask(spec)
    schedule = rs.schedule.build_decode(rs.schedule.visible_blocks(mask, layout, kv_layout), query=query)
    q, k, v, _ = arrays = make_arrays(query, rs.Heads(8, 2), layout.num_positions, kv_layout.num_positions)
    got = rs.simulate_attention(q, k, v, mask=mask, layout=layout, kv_layout=kv_layout, algorithm=schedule)
    wanted = expect(spec, layout, kv_layout, arrays)
    check((got.out, got.lse), (wanted.out, wanted.lse), EXACT, (layout, kv_layout, spec))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_new", [1, 2, 6])
def test_decode_with_sharded_queries(subtests, cache, num_new):
    layout = rs.striped(num_new, 4, start=23)
    for spec in (("causal",), ("sliding_window", 9, 0), ("documents", (12, 30))):
        with subtests.test(spec=spec):
            check_decode(layout, with_new_tokens(CACHES[cache], layout), spec, "sharded")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_new", [1, 3])
def test_decode_with_replicated_queries(subtests, cache, num_new):
    layout = rs.Layout(((),) * 4, replicated=(rs.Span(23, 23 + num_new),))
    owned = rs.Layout(((), (), (rs.Span(23, 23 + num_new),), ()))
    for spec in (("causal",), ("sliding_window", 9, 0), ("documents", (12, 30))):
        for kv_layout in (with_new_tokens(CACHES[cache], layout), with_new_tokens(CACHES[cache], owned)):
            with subtests.test(spec=spec, kv_layout=kv_layout):
                check_decode(layout, kv_layout, spec, "replicated")


@pytest.mark.parametrize("length", [0, 1, 2, 5])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_fewer_tokens_than_ranks(subtests, row, length):
    for layout in (rs.contiguous(length, 8), rs.zigzag(length, 8), rs.striped(length, 8)):
        for spec in (("full",), ("causal",)):
            with subtests.test(layout=layout, spec=spec):
                arrays = make_arrays("few", rs.Heads(8, 2), length, length)
                got = run(arrays, mask=make_mask(spec), layout=layout, **options(row, 8))
                check(got, expect(spec, layout, layout, arrays), EXACT, (layout, spec))


@pytest.mark.parametrize("spec", [("causal",), ("sliding_window", 700, 3), ("prefix", 600)], ids=str)
@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_shards_longer_than_a_block_of_scores(algorithm, spec):
    layout = rs.zigzag(1301, 2)
    arrays = make_arrays("long", rs.Heads(1, 1), 1301, 1301)
    got = run(arrays, mask=make_mask(spec), layout=layout, algorithm=algorithm)
    check(got, expect(spec, layout, layout, arrays), EXACT, spec)


def test_balanced_layout_that_deals_blocks():
    spec = ("and", ("documents", (700, 20, 1328)), ("causal",))
    layout = rs.balanced(make_mask(spec), 2048, 4)
    assert layout not in (rs.contiguous(2048, 4), rs.zigzag(2048, 4))
    arrays = make_arrays("balanced", rs.Heads(1, 1), 2048, 2048)
    got = run(arrays, mask=make_mask(spec), layout=layout, algorithm="pass_kv")
    check(got, expect(spec, layout, layout, arrays), EXACT, layout)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_scale_and_scores_too_large_for_exp(subtests, row):
    layout = rs.zigzag(19, 4)
    q, k, v, dout = make_arrays("scale", rs.Heads(8, 2), 19, 19)
    allowed = oracle.dense_mask(("causal",), range(19), range(19))
    for scale in (0.0, 0.3, 2000.0):
        with subtests.test(scale=scale):
            got = rs.simulate_attention(q, k, v, mask=rs.causal(), layout=layout, scale=scale, **options(row, 4))
            gradients = got.gradients(dout)
            wanted = (
                oracle.dense_attention(q, k, v, allowed, scale),
                oracle.dense_gradients(q, k, v, allowed, dout, scale),
            )
            tolerance = EXACT * max(1.0, scale)
            found = got.out, got.lse, gradients.dq, gradients.dk, gradients.dv
            check(found, (*wanted[0], *wanted[1]), tolerance, (row.algorithm, scale))


POISONED = 13  # the position of the key that is broken


def poisoned_arrays(name: str, value: float) -> tuple[Arrays, Arrays]:
    """The same arrays with and without a broken key or value."""
    clean = make_arrays("poison", rs.Heads(8, 2), 24, 24)
    broken = {"k": clean.k.copy(), "v": clean.v.copy()}
    broken[name][:, POISONED] = value
    return clean, clean._replace(**broken)


@pytest.mark.wide
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_a_broken_key_reaches_only_the_rows_that_see_it(subtests, row, name, value):
    clean, broken = poisoned_arrays(name, value)
    for spec in (("causal",), ("sliding_window", 4, 0), ("documents", (11, 6, 7)), ("prefix", 5)):
        for layout in (rs.contiguous(24, 4), rs.zigzag(24, 4), rs.striped(24, 4), replicated(24, 4)):
            with subtests.test(spec=spec, layout=layout):
                with np.errstate(invalid="ignore"):  # inf - inf, in the rows that see it
                    got = rs.simulate_attention(*broken[:3], mask=make_mask(spec), layout=layout, **options(row, 4))
                wanted = expect(spec, layout, layout, clean)
                spared = ~oracle.dense_mask(spec, range(24), [POISONED])[:, 0]
                found = got.out[:, spared], got.lse[:, spared]
                what = (row.algorithm, layout, spec)
                check(found, (wanted.out[:, spared], wanted.lse[:, spared]), EXACT, what)
                if name == "v" or np.isnan(value):
                    assert not np.isfinite(got.out[:, ~spared]).any(axis=-1).any(), f"{what}: a broken row looks sound"


@pytest.mark.wide
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_a_broken_key_reaches_only_the_gradients_that_depend_on_it(subtests, row, name):
    clean, broken = poisoned_arrays(name, np.nan)
    for spec in (("causal",), ("documents", (11, 6, 7))):
        for layout in (rs.contiguous(24, 4), rs.zigzag(24, 4), rs.striped(24, 4)):
            with subtests.test(spec=spec, layout=layout):
                got = run(broken, mask=make_mask(spec), layout=layout, **options(row, 4))[2:]
                wanted = expect(spec, layout, layout, clean)[2:]
                allowed = oracle.dense_mask(spec, range(24), range(24))
                spared_rows = ~allowed[:, POISONED]
                spared_keys = ~allowed[~spared_rows].any(axis=0)  # those that no broken row sees
                for x, y, spared in zip(got, wanted, (spared_rows, spared_keys, spared_keys), strict=True):
                    assert largest_error(x[:, spared], y[:, spared]) < EXACT, (row.algorithm, layout, spec)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.algorithm)
def test_a_broken_batch_row_leaves_the_others_alone(row):
    layout = rs.zigzag(16, 4)
    clean = make_arrays("rows", rs.Heads(8, 2), 16, 16, batch=(2,))
    v = clean.v.copy()
    v[1, :, 3] = np.nan
    got = run(clean._replace(v=v), mask=rs.causal(), layout=layout, **options(row, 4))
    wanted = expect(("causal",), layout, layout, clean)
    check(tuple(x[0] for x in got), tuple(x[0] for x in wanted), EXACT, row.algorithm)

"""NaN and infinity in the input of a simulation reach only the rows that see them, without a warning.

Warnings are errors in all tests. The truth is each row by itself over just the keys it sees, so that nothing can reach
it from anywhere else.
"""

import itertools

import numpy as np
import numpy.typing as npt
import pytest

import ringspan as rs
from support import oracle
from support.cases import ROWS, Arrays, make_arrays, make_mask, meshes, replicated
from support.oracle import MaskSpec

HEADS = rs.Heads(8, 4)
LENGTH = 24
WORLD_SIZE = 4
MASKS: list[MaskSpec] = [("causal",), ("sliding_window", 2, 0), ("documents", (7, 1, 4, 5, 3, 40))]
LAYOUTS = (rs.zigzag(LENGTH, WORLD_SIZE), rs.striped(LENGTH, WORLD_SIZE), replicated(LENGTH, WORLD_SIZE))
# Places of one element each (head, position, dim): the queries at 7 and 15 and the keys at 3, 9 and 20.
ODD = {"q": [(5, 7, 1)], "k": [(1, 3, 2)], "v": [(0, 9, 1), (1, 20, 0)], "dout": [(6, 15, 2)]}
ODD_QUERIES, ODD_KEYS = [7, 15], [3, 9, 20]

each_algorithm = pytest.mark.parametrize(
    "options",
    [{"algorithm": row.algorithm, "mesh": mesh} for row in ROWS for mesh in meshes(row, WORLD_SIZE)],
    ids=lambda options: f"{options['algorithm']} {options['mesh'] and tuple(options['mesh'])}",
)
each_value = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])


def with_odd_values(arrays: Arrays, value: float) -> Arrays:
    odd = Arrays(*(x.copy() for x in arrays))
    for name, places in ODD.items():
        for place in places:
            getattr(odd, name)[place] = value
    return odd


def row_by_row(arrays: Arrays, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    group = HEADS.group
    k, v = (np.repeat(x, group, axis=0) for x in (arrays.k, arrays.v))
    out = np.zeros((*arrays.q.shape[:-1], v.shape[-1]))
    with np.errstate(all="ignore"):
        for row, seen in enumerate(allowed):
            scores = (arrays.q[:, row, None] @ k[:, seen].swapaxes(1, 2) / np.sqrt(k.shape[-1]))[:, 0]
            has_weight = ~np.isneginf(scores).all(axis=-1, keepdims=True)
            weights = np.where(has_weight, np.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
            total = np.where(has_weight, weights.sum(axis=-1, keepdims=True), 1.0)
            out[:, row] = ((weights / total)[:, None] @ v[:, seen])[:, 0]
    return out


@pytest.mark.wide
@each_algorithm
@each_value
def test_odd_values_reach_only_the_rows_that_see_them(subtests: pytest.Subtests, options: dict, value: float) -> None:
    for spec, layout in itertools.product(MASKS, LAYOUTS):
        with subtests.test(spec=spec, layout=layout):
            odd = with_odd_values(make_arrays("odd", HEADS, LENGTH, LENGTH), value)
            got = rs.simulate_attention(*odd[:3], mask=make_mask(spec), layout=layout, **options)
            expected = row_by_row(odd, oracle.dense_mask(spec, range(LENGTH), range(LENGTH)))
            assert not np.isfinite(expected).all()
            np.testing.assert_allclose(got.out, expected, rtol=1e-12, atol=1e-12, err_msg=f"{spec}, {layout}")


@pytest.mark.wide
@each_algorithm
@each_value
def test_odd_values_reach_only_the_gradients_they_are_in(
    subtests: pytest.Subtests, options: dict, value: float
) -> None:
    for spec, layout in itertools.product(MASKS, LAYOUTS):
        with subtests.test(spec=spec, layout=layout):
            arrays = make_arrays("odd", HEADS, LENGTH, LENGTH)
            odd = with_odd_values(arrays, value)
            got = rs.simulate_attention(*odd[:3], mask=make_mask(spec), layout=layout, **options).gradients(odd.dout)
            allowed = oracle.dense_mask(spec, range(LENGTH), range(LENGTH))
            dq, dk, dv = oracle.dense_gradients(*arrays[:3], allowed, arrays.dout)
            fine_queries = ~allowed[:, ODD_KEYS].any(axis=1)
            fine_queries[ODD_QUERIES] = False
            fine_keys = ~allowed[~fine_queries].any(axis=0)
            assert fine_queries.any()
            assert fine_keys.any() or spec == ("causal",)
            for mine, clean, fine in ((got.dq, dq, fine_queries), (got.dk, dk, fine_keys), (got.dv, dv, fine_keys)):
                np.testing.assert_allclose(mine[:, fine], clean[:, fine], atol=1e-12, err_msg=f"{spec}, {layout}")

"""Random masks, layouts, heads and algorithms: the simulator, ranks in torch and dense attention agree.

What a mask means is written down a second time, a pair of tokens at a time (`support/mask_cases.py`).
"""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.campaign import HOW_MANY, count
from support.cases import ROWS, Row, make_arrays, meshes
from support.mask_cases import MaskCase, masks


@st.composite
def layouts(draw: st.DrawFn, world_size: int) -> rs.Layout:
    """Positions dealt to ranks at random: runs, single ones, gaps; some ranks may hold none."""
    length = draw(st.integers(1, 40))
    owners = draw(st.lists(st.integers(-1, world_size - 1), min_size=length, max_size=length))
    run = draw(st.integers(1, 8))
    spans: list[list[rs.Span]] = [[] for _ in range(world_size)]
    for position in range(length):
        owner = owners[position // run * run]  # a gap if it is negative
        if owner >= 0:
            spans[owner].append(rs.Span(position, position + 1))
    if not any(spans):
        spans[0].append(rs.Span(0, 1))
    return rs.Layout(tuple(map(tuple, spans)))


@HOW_MANY
@given(st.data(), masks, st.sampled_from(ROWS), st.sampled_from([1, 2, 3, 4, 6]))
def test_simulator_ranks_and_dense_attention_agree(
    data: st.DataObject, case: MaskCase, row: Row, world_size: int
) -> None:
    layout = data.draw(layouts(world_size))
    kv_layout = data.draw(st.none() | layouts(world_size))
    keys = layout if kv_layout is None else kv_layout
    heads = data.draw(st.sampled_from([rs.Heads(4, 2), rs.Heads(6, 6), rs.Heads(12, 1)]))
    mesh = data.draw(st.sampled_from(meshes(row, world_size)))
    options: dict[str, Any] = {"algorithm": row.algorithm, "direction": data.draw(st.sampled_from(row.directions))}
    options |= {"mask": case.mask, "layout": layout, "kv_layout": kv_layout, "mesh": mesh}
    q, k, v, dout = make_arrays(str(case), heads, layout.num_positions, keys.num_positions)
    allowed = case.expected(np.array(layout.all_positions()), np.array(keys.all_positions()))
    expected = *oracle.dense_attention(q, k, v, allowed), *oracle.dense_gradients(q, k, v, allowed, dout)
    try:
        simulation = rs.simulate_attention(q, k, v, **options)
        gradients = simulation.gradients(dout)
    except rs.RingspanError:
        count(f"differential, {row.algorithm}: refused")
        return
    for got, wanted in zip((simulation.out, simulation.lse, *gradients[:3]), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)
    wholes = [torch.from_numpy(x)[None] for x in (q, k, v, dout, *expected)]

    def attend(group: InProcessRank) -> None:
        rank = group.rank
        mine = [rs_layout.shard(x, rank, 2) for rs_layout, x in zip(_of(layout, keys), wholes, strict=True)]
        inputs = [x.clone().requires_grad_() for x in mine[:3]]
        result = rs.attention(*inputs, group=group, return_lse=True, **options)
        assert isinstance(result, rs.Attention)
        result.out.backward(mine[3])
        for got, wanted in zip((result.out, result.lse, *(x.grad for x in inputs)), mine[4:], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)

    rs.run_in_process(attend, world_size)
    count(f"differential, {row.algorithm}: right in NumPy and torch")


def _of(layout: rs.Layout, keys: rs.Layout) -> list[rs.Layout]:
    """Whose rows q, k, v, dout, out, lse, dq, dk and dv have."""
    return [layout, keys, keys, layout, layout, layout, layout, keys, keys]

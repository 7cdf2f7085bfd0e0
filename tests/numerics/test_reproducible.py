"""The bits of `rs.attention(..., reproducible=True)`: the same for any number of ranks, however they share the work."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import attention_cases
import ringspan as rs
import ringspan.attend
from cases import make_mask
from reproducible_cases import (
    CAUSAL,
    LAYOUTS,
    MASKS,
    SEQ_LEN,
    WAYS,
    Call,
    alone,
    cases,
    different,
    on_rank,
    options_of,
    run,
)
from ringspan.execute import Event, Value
from ringspan.grid import bind_grid
from ringspan.nodes import TreeState
from ringspan.schedule import Block
from ringspan.softmax import steadily
from ringspan.tiles import Exchange, Problem, Shapes
from ringspan.transports.counting import CountingTransport
from ringspan.transports.in_process import InProcessRank

torch.set_num_threads(1)

each_way = pytest.mark.parametrize("way", list(WAYS))


# The promise


@each_way
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_outputs_and_gradients_are_those_of_one_device(way: str, world_size: int) -> None:
    for call, layout in cases(way, world_size):
        got = run(call, LAYOUTS[layout](world_size), **options_of(way, world_size))
        assert different(got, alone(call)) == [], (call, layout)


def test_the_cases_cover_all_there_is() -> None:
    chosen = [case for way in WAYS for world_size in (1, 2, 3, 4, 5, 8) for case in cases(way, world_size)]
    assert {call.mask for call, _ in chosen} == set(MASKS)
    assert {layout for _, layout in chosen} == set(LAYOUTS)
    assert len({(call.mask, call.dtype) for call, _ in chosen}) == 18
    assert {rs.Heads(8, 8), rs.Heads(8, 2)} <= {call.heads for call, _ in chosen}


@pytest.mark.parametrize("spec", [*MASKS.values(), ("frame_causal", 130, 7)], ids=str)
def test_the_numbers_are_right(spec: attention_cases.MaskSpec) -> None:
    """Against dense float64 attention."""
    if spec[0] == "documents":
        spec = ("documents", (300, 801))
    for dtype in (torch.float64, torch.float32):
        layout = rs.zigzag(2 * rs.TILE + 77, 2, align=rs.TILE)
        job = attention_cases.make_job("right", spec, layout, rs.Heads(2, 1), dtype=dtype)
        both = attention_cases.run_both(job, reproducible=True)
        for rank, (got, _) in enumerate(both):
            job.check(rank, got)
        attention_cases.check_gradients(job, [gradients for _, gradients in both])


@pytest.mark.parametrize("head_dim", [5, 64])
def test_float64_and_odd_head_dims(head_dim: int) -> None:
    call = Call("causal", torch.float64, rs.Heads(2, 2), head_dim)
    for world_size, way in ((2, "ulysses"), (3, "pass_q")):
        assert different(run(call, LAYOUTS["zigzag"](world_size), **options_of(way, world_size)), alone(call)) == []


def test_keys_in_a_layout_of_their_own() -> None:
    """Cross-attention: more keys than queries, from another position on."""

    def attend(world_size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        layout = rs.zigzag(1500, world_size, align=rs.TILE)
        kv_layout = rs.contiguous(3000, world_size, align=rs.TILE, start=2 * rs.TILE)
        q, k, v = (torch.randn(1, 2, n, 4, generator=generator) for n in (1500, 3000, 3000))

        def on_rank(group: InProcessRank) -> list[torch.Tensor]:
            of_kv = [kv_layout.shard(x, group.rank, 2) for x in (k, v)]
            leaves = [x.clone().requires_grad_() for x in (layout.shard(q, group.rank, 2), *of_kv)]
            out = rs.attention(
                *leaves, mask=rs.full(), layout=layout, kv_layout=kv_layout, group=group, reproducible=True
            )
            return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]

        parts = rs.run_in_process(on_rank, world_size)
        layouts = (layout, layout, kv_layout, kv_layout)
        return [each.unshard([part[i] for part in parts], 2) for i, each in enumerate(layouts)]

    expected = attend(1)
    for world_size in (2, 3):
        assert all(map(torch.equal, attend(world_size), expected))


@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 0, 1), (600, 600, 0), (600, 0, 1), (0, 600, 1)])
def test_nothing_to_attend(q_len: int, kv_len: int, batch: int) -> None:
    layout, kv_layout = (rs.zigzag(length, 2, align=rs.TILE) for length in (q_len, kv_len))
    job = attention_cases.make_job(
        "empty", ("full",), layout, rs.Heads(2, 1), kv_layout=kv_layout, batch=batch, algorithm="pass_q"
    )
    both = attention_cases.run_both(job, reproducible=True)
    attention_cases.check_gradients(job, [gradients for _, gradients in both])


def test_sinks() -> None:
    call = Call("window", heads=rs.Heads(4, 2))
    sinks = torch.tensor([0.0, 1.5, -2.0, -math.inf])
    expected = run(call, rs.contiguous(SEQ_LEN, 1), sinks=sinks)
    assert different(expected, alone(call)) == ["out", "lse", "dq", "dk", "dv"]
    for world_size, way in ((2, "ulysses"), (3, "pass_kv")):
        got = run(call, LAYOUTS["zigzag"](world_size), sinks=sinks, **options_of(way, world_size))
        assert different(got, expected) == []


@pytest.mark.parametrize("head", ["zeros", "infinity"])
def test_odd_values_in_one_head_do_not_reach_the_bits_of_another(head: str) -> None:
    """An lse of exactly 0, or a NaN, makes the kernel look again, at what is in the same call as well."""
    call = Call("causal", heads=rs.Heads(4, 4))
    tensors = call.tensors()
    tensors[0][:, 0] = 0.0
    if head == "infinity":
        tensors[1][:, 0, 700] = math.inf
    expected = run(call, rs.contiguous(SEQ_LEN, 1), tensors)
    got = run(call, LAYOUTS["zigzag"](4), tensors, algorithm="ulysses")
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("heads", [rs.Heads(1, 1), rs.Heads(4, 1), rs.Heads(8, 8)], ids=str)
def test_the_number_of_threads_does_not_matter(heads: rs.Heads) -> None:
    call = Call("causal", heads=heads, head_dim=64)
    expected = alone(call)
    try:
        for num_threads in (2, 3):
            torch.set_num_threads(num_threads)
            assert different(run(call, rs.contiguous(SEQ_LEN, 1)), expected) == []
    finally:
        torch.set_num_threads(1)


def test_the_tiles_of_one_kernel_call_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("full", heads=rs.Heads(4, 2), head_dim=24)
    expected = alone(call)
    monkeypatch.setattr(ringspan.attend, "tiles_at_once", lambda *_: 1)
    assert different(run(call, LAYOUTS["contiguous"](2)), expected) == []


def test_functions_of_single_numbers_do_not_depend_on_their_place() -> None:
    x = torch.randn(3, 40_000)
    whole = steadily(torch.exp, x)
    torch.testing.assert_close(whole, x.exp())
    for index in (np.s_[:, 5:], np.s_[1:, ::7], np.s_[:2, :1], np.s_[2, :77], np.s_[:0]):
        assert torch.equal(steadily(torch.exp, x[index]), whole[index])


# Broken on purpose


def test_the_default_mode_has_other_bits() -> None:
    call = Call("causal", heads=rs.Heads(4, 2))
    one, two = (run(call, LAYOUTS["zigzag"](n), reproducible=False) for n in (1, 2))
    assert different(one, two) == ["out", "lse", "dq", "dk", "dv"]
    assert different(one, alone(call)) == ["out", "lse", "dq", "dk", "dv"]


def test_joins_in_order_of_arrival_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def join_as_they_come(state: TreeState, block: Block, node: Value, other: Value, is_left: bool) -> Value:
        state.arithmetic.merge(block, other, node)
        return other

    call = Call("full", heads=rs.Heads(4, 2))
    monkeypatch.setattr(TreeState, "_joined", join_as_they_come)
    one, two = (run(call, LAYOUTS["contiguous"](n)) for n in (1, 2))
    assert "out" in different(one, two)
    monkeypatch.undo()
    assert different(one, alone(call)) == []  # on one rank they come in order


# What is said about it: events, bytes, nodes


@each_way
@pytest.mark.parametrize("world_size", [2, 5])
def test_events_and_bytes_are_those_of_the_simulator(
    way: str, world_size: int, counted: dict[int, CountingTransport]
) -> None:
    call = Call("causal", heads=rs.Heads(world_size, world_size), head_dim=2)
    layout, mask, options = LAYOUTS["zigzag"](world_size), make_mask(CAUSAL), options_of(way, world_size)
    events: list[list[Event]] = [[] for _ in range(world_size)]

    def attend(group: InProcessRank) -> None:
        on_rank(call, layout, group, group.rank, record=events[group.rank].append, **options)

    rs.run_in_process(attend, world_size)
    *arrays, dout = (x.numpy() for x in call.tensors())
    simulation = rs.simulate_attention(*arrays, mask=mask, layout=layout, reproducible=True, **options)
    traces = simulation.trace, simulation.gradients(dout).trace
    simulated = [
        [event for trace in traces for step in trace for event in step[rank].events] for rank in range(world_size)
    ]
    assert events == simulated
    for rank, transport in counted.items():
        assert sum(transport.bytes_sent) == sum(event.nbytes for event in events[rank])


def bound_bytes(problem: Problem, way: str, side: str | None) -> tuple[int, int, int]:
    """Of the sums that travel: their bytes, those of the default mode, and the most nodes of a tile anywhere."""
    options, world_size = options_of(way, problem.world_size), problem.world_size
    visible = rs.visible_blocks(problem.mask, problem.layout)
    schedules = [
        rs.build_schedule(visible=visible, heads=problem.shapes.heads, backward=side, route=route, **options)
        for route in ("straight", "follow")
    ]
    grown = [bind_grid(schedules[0], rank, problem) for rank in range(world_size)]
    exchanges = [each for program, _ in grown for each in program if isinstance(each, Exchange)]
    messages = [message for exchange in exchanges for message in exchange.sends if message.transfer.block.is_sum]
    default = [t.block for step in schedules[1].steps for t in step.transfers if t.block.is_sum]
    pending = max(growth.pending for _, growth in grown)
    return sum(message.nbytes for message in messages), sum(map(problem.block_bytes, default)), pending


@pytest.mark.parametrize("layout", [rs.zigzag, rs.contiguous])
@pytest.mark.parametrize("spec", [CAUSAL, ("full",)], ids=str)
def test_sums_that_travel_and_nodes_that_wait_are_few(layout: Any, spec: attention_cases.MaskSpec) -> None:
    num_tiles = 32
    for world_size in (2, 3, 4, 8):
        held = layout(num_tiles * rs.TILE, world_size, align=rs.TILE)
        problem = Problem(make_mask(spec), held, held, Shapes((1,), rs.Heads(8, 8), 64, 64, 4, 4))
        for way, side in (("pass_kv", None), ("pass_kv", "kv"), ("pass_q", None), ("pass_kv reverse", "q")):
            nbytes, default, pending = bound_bytes(problem, way, side)
            assert pending <= 2 * math.log2(num_tiles) + 8, (world_size, way, side)
            if world_size != 3:
                assert nbytes <= 2 * default, (world_size, way, side)


# The simulator


@each_way
def test_the_simulator_has_the_same_bits_for_any_number_of_devices(way: str) -> None:
    generator = np.random.default_rng(0)
    heads = rs.Heads(8, 8) if way == "ulysses" else rs.Heads(2, 1)
    num_heads = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads
    seq_len = 4 * rs.TILE + 77
    *arrays, dout = (generator.standard_normal((n, seq_len, 2)) for n in num_heads)

    def simulate(world_size: int, **options: Any) -> list[Any]:
        layout = rs.zigzag(seq_len, world_size, align=rs.TILE)
        done = rs.simulate_attention(*arrays, mask=rs.causal(), layout=layout, reproducible=True, **options)
        return [done.out, done.lse, *done.gradients(dout)[:3]]

    expected = simulate(1)
    sizes = (2, 4, 8) if way == "ulysses" else (2, 3, 5)
    for world_size in sizes:
        for mine, wanted in zip(simulate(world_size, **options_of(way, world_size)), expected, strict=True):
            assert mine.dtype == np.float64
            assert np.array_equal(mine, wanted), world_size


# Refused


def refusal(layout: rs.Layout, world_size: int = 1, **options: Any) -> str:
    def attend(group: InProcessRank) -> str:
        x = torch.randn(1, 4, layout.shard_len(group.rank), 8)
        with pytest.raises((rs.UnsupportedError, rs.LayoutError)) as caught:
            rs.attention(
                x, x[:, :2], x[:, :2], mask=rs.causal(), layout=layout, group=group, **options, reproducible=True
            )
        return f"{caught.typename}: {caught.value}"

    (message,) = set(rs.run_in_process(attend, world_size))
    return message


@pytest.mark.parametrize(
    ("layout", "nearest"),
    [
        (rs.zigzag(4100, 2), "rs.zigzag(4100, 2, align=rs.TILE)"),
        (rs.contiguous(4100, 2), "rs.contiguous(4100, 2, align=rs.TILE)"),
        (rs.striped(4100, 2), "rs.striped(4100, 2, block=rs.TILE)"),
        (rs.Layout(((rs.Span(0, 600),), (rs.Span(600, 1700),))), "0:512 | 512:1700"),
        (rs.contiguous(2000, 2, align=rs.TILE, start=100), "100:1024 | 1024:2100"),
    ],
)
def test_layouts_off_the_grid_are_refused_with_the_nearest_on_it(layout: rs.Layout, nearest: str) -> None:
    message = refusal(layout, 2)
    assert message.startswith("LayoutError: reproducible=True, layout=")
    assert "rs.TILE" in message
    assert nearest in message


def test_what_cannot_have_fixed_bits_is_refused() -> None:
    layout = rs.zigzag(2000, 1)
    everywhere = rs.Layout(((rs.Span(512, 1024),), (rs.Span(1024, 1536),)), replicated=(rs.Span(0, 512),))
    assert "replicated" in refusal(everywhere, 2)
    assert "sinks.detach()" in refusal(layout, sinks=torch.zeros(4, requires_grad=True))
    assert "leave one of them out" in refusal(layout, wire="int8")
    assert "kernel='auto', or sdpa_cpu" in refusal(layout, kernel="reference")
    too_many = refusal(rs.contiguous(2048, 4, align=rs.TILE), 4, algorithm="ulysses")
    assert "more ranks than the 2 KV heads" in too_many
    assert "over 2 ranks or fewer" in too_many


def test_ranks_that_ask_for_different_modes_are_told_so() -> None:
    layout = rs.zigzag(2048, 2, align=rs.TILE)

    def attend(group: InProcessRank) -> str:
        x = torch.randn(1, 1, layout.shard_len(group.rank), 8)
        with pytest.raises(rs.TransportError) as caught:
            rs.attention(x, x, x, mask=rs.causal(), layout=layout, group=group, reproducible=group.rank == 0)
        return str(caught.value)

    for message in rs.run_in_process(attend, 2):
        assert "reproducible: rank 0 has True, rank 1 has False" in message

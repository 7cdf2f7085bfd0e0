"""`rs.attention(..., reproducible=True)` has the same bits for any number of ranks, algorithm and layout."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import ringspan as rs
import ringspan.runtime.arithmetic
from ringspan.kernels.sdpa_cpu import SdpaCpu
from ringspan.kernels.softmax import steadily
from ringspan.program.bind import Exchange
from ringspan.program.execute import Event, Value
from ringspan.program.problem import Problem, Shapes
from ringspan.program.reproducible.bind import bind_grid
from ringspan.program.reproducible.state import TreeState
from ringspan.runtime import modes
from ringspan.schedule import Block
from ringspan.transports.base import CountingTransport
from ringspan.transports.in_process import InProcessRank
from support import attention_cases
from support.cases import make_mask
from support.reproducible_cases import (
    CAUSAL,
    LAYOUTS,
    MASKS,
    SEQ_LEN,
    SHORT,
    WAYS,
    WORLD_SIZES,
    Call,
    alone,
    different,
    longer,
    on_rank,
    options_of,
    product,
    run,
)

each_way = pytest.mark.parametrize("way", list(WAYS))


# The promise


@each_way
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_outputs_and_gradients_are_those_of_one_device(subtests: pytest.Subtests, way: str, world_size: int) -> None:
    """All combinations: numbers of ranks, algorithms, masks, dtypes."""
    for call, layout in product(way, world_size):
        with subtests.test(call=call, layout=layout):
            got = run(call, LAYOUTS[layout](world_size, SHORT), **options_of(way, world_size))
            assert different(got, alone(call)) == [], (call, layout)


@each_way
def test_with_more_tiles_and_heads(subtests: pytest.Subtests, way: str) -> None:
    for world_size in (3, 5) if way == "ulysses" else (3, 5, 8):
        with subtests.test(world_size=world_size):
            call, layout = longer(way, world_size)
            got = run(call, LAYOUTS[layout](world_size), **options_of(way, world_size))
            assert different(got, alone(call)) == [], (call, layout)


@pytest.mark.parametrize("spec", [*MASKS.values(), ("frame_causal", 130, 7)], ids=str)
def test_the_numbers_are_right(subtests: pytest.Subtests, spec: attention_cases.MaskSpec) -> None:
    """Against dense float64 attention."""
    if spec[0] == "documents":
        spec = ("documents", (300, 801))
    for dtype in (torch.float64, torch.float32):
        with subtests.test(dtype=dtype):
            layout = rs.zigzag(2 * rs.TILE + 77, 2, align=rs.TILE)
            job = attention_cases.make_job("right", spec, layout, rs.Heads(2, 1), dtype=dtype)
            both = attention_cases.run_both(job, reproducible=True)
            for rank, (got, _) in enumerate(both):
                job.check(rank, got)
            attention_cases.check_gradients(job, [gradients for _, gradients in both])


@pytest.mark.parametrize("head_dim", [5, 64])
def test_float64_and_odd_head_dims(subtests: pytest.Subtests, head_dim: int) -> None:
    call = Call("causal", torch.float64, rs.Heads(2, 2), head_dim)
    for world_size, way in ((2, "ulysses"), (3, "pass_q")):
        with subtests.test(world_size=world_size, way=way):
            assert different(run(call, LAYOUTS["zigzag"](world_size), **options_of(way, world_size)), alone(call)) == []


def test_keys_in_a_layout_of_their_own(subtests: pytest.Subtests) -> None:
    """Cross-attention: more keys than queries, beginning at another position."""

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
        with subtests.test(world_size=world_size):
            assert all(map(torch.equal, attend(world_size), expected))


@pytest.mark.parametrize(("q_len", "kv_len", "batch"), [(0, 0, 1), (600, 600, 0), (600, 0, 1), (0, 600, 1)])
def test_nothing_to_attend(q_len: int, kv_len: int, batch: int) -> None:
    layout, kv_layout = (rs.zigzag(length, 2, align=rs.TILE) for length in (q_len, kv_len))
    job = attention_cases.make_job(
        "empty", ("full",), layout, rs.Heads(2, 1), kv_layout=kv_layout, batch=batch, algorithm="pass_q"
    )
    both = attention_cases.run_both(job, reproducible=True)
    attention_cases.check_gradients(job, [gradients for _, gradients in both])


@pytest.mark.parametrize("head", ["zeros", "infinity"])
def test_odd_values_in_one_head_do_not_reach_the_bits_of_another(head: str) -> None:
    """An lse of exactly 0, or a NaN, makes the kernel recompute other parts of the same call too."""
    call = Call("causal", heads=rs.Heads(4, 4))
    tensors = call.tensors()
    tensors[0][:, 0] = 0.0
    if head == "infinity":
        tensors[1][:, 0, 700] = math.inf
    expected = run(call, rs.contiguous(SEQ_LEN, 1), tensors)
    got = run(call, LAYOUTS["zigzag"](4), tensors, algorithm="ulysses")
    for mine, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def num_threads_of_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Record the number of threads at each call of the kernel; afterwards it is one again."""
    found = set()

    def record(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found.add(torch.get_num_threads())
            return compute(*args)

        return call

    monkeypatch.setattr(SdpaCpu, "forward", record(SdpaCpu.forward))
    monkeypatch.setattr(SdpaCpu, "backward", record(SdpaCpu.backward))
    yield found
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("heads", "head_dim"), [(rs.Heads(1, 1), 64), (rs.Heads(4, 1), 64), (rs.Heads(4, 2), 80), (rs.Heads(3, 3), 128)]
)
def test_the_number_of_threads_does_not_matter(
    heads: rs.Heads, head_dim: int, num_threads_of_kernels: set[int]
) -> None:
    """Products of 80 or 128 columns have other bits on several threads, so none runs on several."""
    for mask in ("causal", "rows"):
        call = Call(mask, heads=heads, head_dim=head_dim, has_sinks=True, seq_len=SHORT)
        expected = alone(call)
        for num_threads, world_size in ((2, 1), (3, 1), (2, 2)):
            torch.set_num_threads(num_threads)
            assert different(run(call, LAYOUTS["zigzag"](world_size, SHORT)), expected) == [], (mask, num_threads)
            assert torch.get_num_threads() == num_threads
        torch.set_num_threads(1)
    assert num_threads_of_kernels == {1}


def test_the_tiles_of_one_kernel_call_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("full", heads=rs.Heads(4, 2), head_dim=24)
    expected = alone(call)
    monkeypatch.setattr(modes, "REPRODUCIBLE", modes.REPRODUCIBLE._replace(tiles_at_once=lambda *_: 1))
    assert different(run(call, LAYOUTS["contiguous"](2)), expected) == []


@pytest.mark.parametrize("head_dim", [64, 20])
def test_where_the_tensors_lie_does_not_matter(subtests: pytest.Subtests, head_dim: int) -> None:
    """A matrix product can have other bits if a row begins in the middle of a vector."""
    call = Call("causal", torch.float64, rs.Heads(2, 2), head_dim, seq_len=SHORT)
    for place in (one_number_on, between_others):
        with subtests.test(place=place.__name__):
            q, k, v, dout = map(place, call.tensors())
            leaves = [x.requires_grad_() for x in (q, k, v)]
            layout = rs.contiguous(SHORT, 1)
            got = rs.attention(*leaves, mask=rs.causal(), layout=layout, return_lse=True, reproducible=True)
            assert isinstance(got, rs.Attention)
            results = [*(x.detach() for x in got), *torch.autograd.grad(got.out, leaves, dout)]
            assert different(results, alone(call)) == [], place


def test_a_short_tile_is_attended_whole_whatever_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default mode converts keys in runs for a few queries: half a tile here or, with half the heads, all."""
    call = Call("causal", torch.bfloat16, rs.Heads(4, 4))
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", 2**14)
    of_one = run(call, rs.contiguous(SEQ_LEN, 1))
    assert different(run(call, LAYOUTS["zigzag"](2), **options_of("ulysses", 2)), of_one) == []


def test_heads_that_share_keys_are_summed_alike_whatever_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default mode computes a small half-dtype cell in one call, as with half the heads, else in slabs of heads."""
    call = Call("causal", torch.bfloat16, rs.Heads(16, 4), seq_len=SHORT)
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", 2 * 4 * rs.TILE * call.head_dim)  # two heads
    of_one = run(call, rs.contiguous(SHORT, 1))
    assert different(run(call, LAYOUTS["zigzag"](2, SHORT), **options_of("ulysses", 2)), of_one) == []


def one_number_on(x: torch.Tensor) -> torch.Tensor:
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert moved.data_ptr() % 64 == 8
    return moved


def between_others(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def test_functions_of_single_numbers_do_not_depend_on_their_place(subtests: pytest.Subtests) -> None:
    x = torch.randn(3, 40_000)
    whole = steadily(torch.exp, x)
    torch.testing.assert_close(whole, x.exp())
    for index in (np.s_[:, 5:], np.s_[1:, ::7], np.s_[:2, :1], np.s_[2, :77], np.s_[:0]):
        with subtests.test(f"{index}"):
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
    assert different(one, alone(call)) == []  # one rank merges in order of arrival


# Events, bytes and nodes


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
    """Return of the travelling sums: the bytes, those of the default mode, and the most nodes of a tile."""
    options, world_size = options_of(way, problem.world_size), problem.world_size
    visible = rs.schedule.visible_blocks(problem.mask, problem.layout)
    schedules = [
        rs.schedule.build_schedule(visible=visible, heads=problem.shapes.heads, backward=side, route=route, **options)
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
def test_sums_that_travel_and_nodes_that_wait_are_few(
    subtests: pytest.Subtests, layout: Any, spec: attention_cases.MaskSpec
) -> None:
    num_tiles = 32
    for world_size in (2, 3, 4, 8):
        with subtests.test(world_size=world_size):
            held = layout(num_tiles * rs.TILE, world_size, align=rs.TILE)
            problem = Problem(make_mask(spec), held, held, Shapes((1,), rs.Heads(8, 8), 64, 64, 4, 4))
            for way, side in (("pass_kv", None), ("pass_kv", "kv"), ("pass_q", None), ("pass_kv reverse", "q")):
                nbytes, default, pending = bound_bytes(problem, way, side)
                assert pending <= 2 * math.log2(num_tiles) + 8, (world_size, way, side)
                if world_size != 3:
                    assert nbytes <= 2 * default, (world_size, way, side)


# The simulator


def simulate(heads: rs.Heads, world_size: int, **options: Any) -> list[Any]:
    generator = np.random.default_rng(0)
    num_heads = heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads
    *arrays, dout = (generator.standard_normal((n, SHORT, 2)) for n in num_heads)
    layout = rs.zigzag(SHORT, world_size, align=rs.TILE)
    done = rs.simulate_attention(*arrays, mask=rs.causal(), layout=layout, reproducible=True, **options)
    return [done.out, done.lse, *done.gradients(dout)[:3]]


simulate_alone = functools.cache(functools.partial(simulate, world_size=1))


@each_way
def test_the_simulator_has_the_same_bits_for_any_number_of_devices(subtests: pytest.Subtests, way: str) -> None:
    heads, sizes = (rs.Heads(4, 4), (2, 4)) if way == "ulysses" else (rs.Heads(2, 1), (2, 3, 5))
    for world_size in sizes:
        with subtests.test(world_size=world_size):
            found = simulate(heads, world_size, **options_of(way, world_size))
            for mine, wanted in zip(found, simulate_alone(heads), strict=True):
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
        (rs.striped(4100, 2, start=512), "rs.striped(4100, 2, block=rs.TILE, start=512)"),
        (
            rs.Layout(((rs.Span(0, 600, 4),), (rs.Span(2, 600, 4),))),
            "use the nearest such layout, <Layout of 300 positions on 2 ranks: 0:",
        ),
        (rs.Layout(((rs.Span(0, 600),), (rs.Span(600, 1700),))), "0:512 | 512:1700"),
        (rs.contiguous(2000, 2, align=rs.TILE, start=100), "100:1024 | 1024:2100"),
    ],
)
def test_layouts_off_the_grid_are_refused_with_the_nearest_on_it(layout: rs.Layout, nearest: str) -> None:
    message = refusal(layout, 2)
    assert message.startswith("LayoutError: layout=")
    assert "rs.TILE" in message
    assert nearest in message


def test_what_cannot_have_fixed_bits_is_refused() -> None:
    layout = rs.zigzag(2000, 1)
    everywhere = rs.Layout(((rs.Span(512, 1024),), (rs.Span(1024, 1536),)), replicated=(rs.Span(0, 512),))
    assert "replicated" in refusal(everywhere, 2)
    assert "leave one of the two out" in refusal(layout, wire="int8")
    assert "use auto, or sdpa_cpu" in refusal(layout, kernel="reference")
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

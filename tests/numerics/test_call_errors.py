"""What does `rs.attention` refuse? Before a message, on all ranks, with argument, value, rule and remedy."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ringspan as rs
import ringspan.runtime.session
from ringspan.transports.base import CountingTransport
from ringspan.transports.in_process import InProcessRank

SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 12, 4, 2, 8
Arguments = dict[str, Any]


def arguments(rank: int, world_size: int) -> Arguments:
    """A valid call."""
    layout = rs.zigzag(SEQ_LEN, world_size)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        layout.shard(torch.randn(1, heads, SEQ_LEN, HEAD_DIM, generator=generator), rank, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    return {**dict(zip("qkv", tensors, strict=True)), "mask": rs.causal(), "layout": layout}


def call(given: Arguments, group: object = None) -> Any:
    given = dict(given)
    return rs.attention(given.pop("q"), given.pop("k"), given.pop("v"), **{"group": group, **given})


class Refusal(NamedTuple):
    """One invalid call: the arguments, the error, and the parts of its message."""

    what: str
    change: Callable[[Arguments], Arguments]
    error: type[Exception]
    says: tuple[str, ...]


def given(**values: Any) -> Callable[[Arguments], Arguments]:
    return lambda _: values


def every(change: Callable[[torch.Tensor], torch.Tensor], names: str = "qkv") -> Callable[[Arguments], Arguments]:
    return lambda call: {name: change(call[name]) for name in names}


SHAPE, LAYOUT, UNSUPPORTED = rs.ShapeError, rs.LayoutError, rs.UnsupportedError

REFUSALS = [
    Refusal("a wire", given(wire="int4"), UNSUPPORTED, ("wire='int4'", "int8, float8_e4m3")),
    Refusal("off the grid", given(reproducible=True), LAYOUT, ("reproducible=True", "align=rs.TILE")),
    Refusal("too few dims", every(lambda x: x[0]), SHAPE, ("q.shape=(4, 6, 8)", "(batch, heads, seq, dim)")),
    Refusal("too many dims", every(lambda x: x[None], "v"), SHAPE, ("v.shape=(1, 1, 2, 6, 8)", "(batch, heads, seq,")),
    Refusal(
        "two dtypes",
        every(torch.Tensor.double, "k"),
        SHAPE,
        ("torch.float64", "torch.float32", "one dtype", "bfloat16"),
    ),
    Refusal("integers", every(torch.Tensor.long), SHAPE, ("torch.int64", "float64, float32, bfloat16, float16")),
    Refusal("complex numbers", every(lambda x: x + 0j), SHAPE, ("torch.complex64", "float32")),
    Refusal("two devices", every(lambda x: x.to("meta"), "v"), SHAPE, ("cpu, cpu, meta", "one device")),
    Refusal("another batch", every(lambda x: x.repeat(2, 1, 1, 1), "kv"), SHAPE, ("k.shape=(2, 2, 6, 8)", "batch")),
    Refusal("v longer than k", every(lambda x: x[:, :, 1:], "k"), SHAPE, ("k.shape=(1, 2, 5, 8)", "k and v differ")),
    Refusal("fewer heads in v", every(lambda x: x[:, 1:], "v"), SHAPE, ("v.shape=(1, 1, 6, 8)", "k and v differ")),
    Refusal("another head_dim", every(lambda x: x[..., 1:], "k"), SHAPE, ("k.shape=(1, 2, 6, 7)", "head_dim")),
    Refusal("no head_dim", every(lambda x: x[..., :0], "qk"), SHAPE, ("q.shape=(1, 4, 6, 0)", "at least 1")),
    Refusal("heads that do not divide", every(lambda x: x[:, 1:], "q"), SHAPE, ("q.shape=(1, 3, 6, 8)", "multiple")),
    Refusal("no KV heads", every(lambda x: x[:, :0], "kv"), SHAPE, ("k.shape=(1, 0, 6, 8)", "KV heads")),
    Refusal("sinks of KV heads", given(sinks=torch.zeros(2)), SHAPE, ("sinks.shape=(2,)", "expected (4,)")),
    Refusal("one sink", given(sinks=torch.tensor(0.0)), SHAPE, ("sinks.shape=()", "expected (4,)")),
    Refusal("sinks elsewhere", given(sinks=torch.zeros(4, device="meta")), SHAPE, ("sinks", "meta", "cpu")),
    Refusal("a scale of NaN", given(scale=math.nan), SHAPE, ("scale=nan", "finite")),
    Refusal("an infinite scale", given(scale=math.inf), SHAPE, ("scale=inf", "finite")),
    Refusal(
        "a short shard of q",
        every(lambda x: x[:, :, 1:], "q"),
        SHAPE,
        ("q.shape=(1, 4, 5, 8) on rank 1", "6", "layout.shard(whole, 1, dim=2)"),
    ),
    Refusal(
        "a long shard of k and v",
        every(lambda x: x.repeat(1, 1, 2, 1), "kv"),
        SHAPE,
        ("k.shape=(1, 2, 12, 8) on rank 1", "pass layout.shard("),
    ),
    Refusal(
        "k and v in the layout of q",
        lambda call: {"kv_layout": rs.contiguous(SEQ_LEN + 8, call["layout"].world_size)},
        SHAPE,
        ("k.shape=(1, 2, 6, 8) on rank 1", "10 positions", "pass kv_layout.shard(whole, 1, dim=2)"),
    ),
    Refusal("a layout for fewer ranks", given(layout=rs.zigzag(SEQ_LEN, 1)), LAYOUT, ("layout", "1 rank", "2")),
    Refusal("a layout for more ranks", given(layout=rs.zigzag(SEQ_LEN, 4)), LAYOUT, ("layout", "4 ranks", "2")),
    Refusal(
        "a kv_layout for more ranks",
        given(kv_layout=rs.zigzag(SEQ_LEN, 3)),
        LAYOUT,
        ("kv_layout", "for 3"),
    ),
    Refusal("masks for two rows", given(mask=rs.per_row([rs.full()] * 2)), SHAPE, ("mask: it has 2 rows", "(1,)")),
    Refusal("a mask that ends early", given(mask=rs.documents([5])), rs.MaskError, ("position 11", "5 tokens")),
    Refusal(
        "an unknown algorithm",
        given(algorithm="ring"),
        UNSUPPORTED,
        ("algorithm='ring'", "auto", "pass_kv, pass_q, all_gather, ulysses, hybrid, double_ring"),
    ),
    Refusal(
        "heads Ulysses cannot split",
        lambda call: given(algorithm="ulysses")(call) | every(lambda x: x[:, :1])(call),
        UNSUPPORTED,
        ("1 query head ", "pass_kv"),
    ),
    Refusal(
        "a mesh for a ring",
        given(mesh=(1, 2)),
        UNSUPPORTED,
        ("mesh=", "outer=1, inner=2", "pass_kv takes no mesh", "hybrid, double_ring"),
    ),
    Refusal("no mesh for a hybrid", given(algorithm="hybrid"), UNSUPPORTED, ("mesh=None", "(outer, inner)", "= 2")),
    Refusal(
        "a mesh of other size", given(algorithm="double_ring", mesh=(2, 2)), LAYOUT, ("mesh=(2, 2)", "(2, 1), (1, 2)")
    ),
    Refusal("a mesh of one dimension", given(algorithm="hybrid", mesh=(2,)), LAYOUT, ("mesh=(2,)", "(outer, inner)")),
    Refusal("an empty mesh", given(mesh=()), LAYOUT, ("mesh=()", "(outer, inner)")),
    Refusal(
        "an unknown direction", given(direction="left"), UNSUPPORTED, ("direction='left'", '"forward"', '"reverse"')
    ),
    Refusal(
        "a direction of an all-gather",
        given(algorithm="all_gather", direction="forward"),
        UNSUPPORTED,
        ("direction='forward'", "all_gather takes no direction", "pass_kv"),
    ),
    Refusal("an unknown kernel", given(kernel="fast"), UNSUPPORTED, ("kernel='fast'", "auto", "sdpa_cpu, reference")),
    Refusal(
        "a kernel for GPUs",
        given(kernel="sdpa_flash"),
        UNSUPPORTED,
        ("kernel='sdpa_flash'", "CUDA", "use auto, or sdpa_cpu"),
    ),
    Refusal("a mask that is none", given(mask="causal"), rs.MaskError, ("mask='causal'", "rs.causal()")),
    Refusal(
        "a dense mask",
        given(mask=torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool)),
        rs.MaskError,
        (
            "mask: expected a Mask, got a Tensor of shape (12, 12)",
            "rs.causal()",
            "rs.documents(",
            "rs.per_row(",
        ),
    ),
    Refusal(
        "a dense array",
        given(mask=np.ones((3, 3), bool)),
        rs.MaskError,
        ("mask: expected a Mask, got a ndarray of shape (3, 3)",),
    ),
    Refusal(
        "q and k swapped",
        lambda call: {"q": call["k"], "k": call["q"]},
        SHAPE,
        ("q has 2 heads and k has 4: if q and k are swapped, give q first",),
    ),
    Refusal(
        "k and v of the queries",
        lambda call: {"q": call["k"], "k": call["q"], "v": call["q"]},
        SHAPE,
        ("a multiple of the KV heads; q has 2 heads and k has 4: if q and k are swapped",),
    ),
    Refusal(
        "an algorithm as on the command line",
        given(algorithm="pass-kv"),
        UNSUPPORTED,
        ("algorithm='pass-kv'", 'write "pass_kv"'),
    ),
    Refusal("a layout that is none", given(layout=[[0, 1], [2, 3]]), LAYOUT, ("layout=[[0, 1], [2, 3]]",)),
    Refusal("an array for q", lambda call: {"q": call["q"].numpy()}, SHAPE, ("q", "ndarray", "tensor")),
    Refusal("a list of sinks", given(sinks=[0.0] * HEADS), SHAPE, ("sinks", "list", "tensor")),
    Refusal("a scale that is none", given(scale="big"), SHAPE, ("scale='big'",)),
    Refusal("a scale in words", given(scale="0.5"), SHAPE, ("scale='0.5'", "finite number")),
    Refusal("a learned scale", given(scale=torch.tensor(0.5)), SHAPE, ("scale=tensor(0.5", "multiply q by")),
    Refusal("a scale in an array", given(scale=np.array(0.5)), UNSUPPORTED, ("scale=array(0.5)", "ndarray")),
    Refusal("a set of sizes", given(mesh={1, 2}), UNSUPPORTED, ("mesh={1, 2}", "a set is not a valid value")),
    Refusal("a list of algorithms", given(algorithm=["pass_kv"]), UNSUPPORTED, ("algorithm=['pass_kv']", "a list")),
    Refusal("no direction", given(direction="", algorithm="pass_kv"), UNSUPPORTED, ("direction=''", "reverse")),
    Refusal("whole sinks", given(sinks=torch.zeros(4).long()), SHAPE, ("torch.int64", "sinks.to(torch.float32)")),
    Refusal("tensors without numbers", every(lambda x: x.to("meta")), SHAPE, ("meta, meta, meta", "numbers")),
    Refusal("a time in words", given(timeout_s="5"), SHAPE, ("timeout_s='5'", "number of seconds")),
    Refusal(
        "heads behind tokens",
        every(lambda x: x.transpose(1, 2)[:, :, :2]),
        SHAPE,
        ("q.shape=(1, 6, 2, 8) on rank 1", "use q.transpose(1, 2)"),
    ),
    Refusal("no time at all", given(timeout_s=0.0), rs.RingspanError, ("timeout_s=0",)),
    Refusal("a time that is not a number", given(timeout_s=math.nan), rs.RingspanError, ("timeout_s=nan",)),
]

each_refusal = pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.what)


def outcome(group: InProcessRank, bad: Callable[[Arguments], Arguments], counted: dict[int, CountingTransport]) -> Any:
    """Return the error of a call with the bad arguments; afterwards a good call must work."""
    good = arguments(group.rank, group.world_size)
    with pytest.raises(Exception) as raised:  # noqa: PT011 (which one is for the caller to look at)
        call(good | bad(good), group)
    assert not any(counted[group.rank].messages_sent)
    assert call(good, group).shape == good["q"].shape
    return raised.value


@each_refusal
def test_one_rank_with_a_bad_argument(refusal: Refusal, counted: dict[int, CountingTransport]) -> None:
    """The rank raises its own error, the others name the rank; nothing is sent, and the group stays usable."""

    def on_rank(group: InProcessRank) -> Any:
        return outcome(group, refusal.change if group.rank == 1 else given(), counted)

    theirs, own = rs.run_in_process(on_rank, 2, timeout_s=20)
    assert isinstance(own, refusal.error), repr(own)
    for words in refusal.says:
        assert words in str(own)
    assert isinstance(theirs, rs.TransportError), repr(theirs)
    assert f"rank 1: {type(own).__name__}: {own}" in str(theirs)
    assert len(counted) == 2


@each_refusal
def test_all_ranks_with_the_same_bad_argument(refusal: Refusal, counted: dict[int, CountingTransport]) -> None:
    """Each rank raises its own error."""
    errors = rs.run_in_process(lambda group: outcome(group, refusal.change, counted), 2, timeout_s=20)
    assert all(isinstance(error, refusal.error) for error in errors), errors


IN_ORDER_ALONE = (
    "off the grid",
    "a layout for fewer ranks",
    "heads Ulysses cannot split",
    "a mesh of one dimension",
)


def test_one_rank_alone(subtests: pytest.Subtests) -> None:
    """A call without a group is refused too."""
    layout = rs.zigzag(SEQ_LEN, 1)
    for refusal in REFUSALS:
        with subtests.test(refusal.what):
            if refusal.what in IN_ORDER_ALONE:
                continue
            good = arguments(0, 1) | {"layout": layout}
            with pytest.raises(refusal.error):
                call(good | refusal.change(good))


@pytest.mark.parametrize("group", ["gloo", 3, [], object()])
def test_a_value_that_is_not_a_group_is_refused(group: object) -> None:
    with pytest.raises(rs.UnsupportedError) as raised:
        call(arguments(0, 1), group)
    assert f"group={group!r}" in str(raised.value)
    assert "ProcessGroup" in str(raised.value)


def test_gradients_may_be_required_where_none_are_recorded() -> None:
    good = arguments(0, 1)
    wanting = good | {name: good[name].clone().requires_grad_() for name in "qkv"}
    with torch.no_grad():
        assert torch.equal(call(wanting), call(good))


# Ranks that do not agree

DISAGREEMENTS = {
    "pass": (every(lambda x: x.clone().requires_grad_(), "q"), "forward, to be differentiated", "forward"),
    "batch": (every(lambda x: x.repeat(2, 1, 1, 1)), "2", "1"),
    "heads": (every(lambda x: x.repeat(1, 2, 1, 1)), "8 over 4", "4 over 2"),
    "head_dim": (every(lambda x: x[..., 1:]), "7, 7 for v", "8, 8 for v"),
    "dtype": (every(torch.Tensor.double), "torch.float64", "torch.float32"),
    "mask": (given(mask=rs.sliding_window(3, 0)), "sliding_window(3, 0)", "causal()"),
    "layout": (
        given(layout=rs.striped(SEQ_LEN, 3)),
        rs.striped(SEQ_LEN, 3).fingerprint(),
        rs.zigzag(SEQ_LEN, 3).fingerprint(),
    ),
    "kv_layout": (
        given(kv_layout=rs.contiguous(SEQ_LEN, 3)),
        rs.contiguous(SEQ_LEN, 3).fingerprint(),
        rs.zigzag(SEQ_LEN, 3).fingerprint(),
    ),
    "algorithm": (given(algorithm="all_gather"), "all_gather", "pass_kv"),
    "scale": (given(scale=0.5), "0.5", str(1 / math.sqrt(HEAD_DIM))),
    "kernel": (given(kernel="reference"), "reference", "sdpa_cpu"),
    "sinks": (given(sinks=torch.zeros(HEADS)), "", ""),
}


@pytest.mark.parametrize("field", DISAGREEMENTS)
@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_rank_is_named_on_all(field: str, odd: int, counted: dict[int, CountingTransport]) -> None:
    change, value, others_value = DISAGREEMENTS[field]

    def on_rank(group: InProcessRank) -> Any:
        return outcome(group, change if group.rank == odd else given(), counted)

    errors = rs.run_in_process(on_rank, 3, timeout_s=20)
    (message,) = {str(error) for error in errors}
    others = ", ".join(str(rank) for rank in range(3) if rank != odd)
    assert f"{field}: rank {odd} has {value}" in message
    assert f"ranks {others} have {others_value}" in message
    assert {type(error) for error in errors} == {rs.TransportError}
    assert ("give all ranks of the group the same batch" in message) == (field == "batch")


def test_an_explicit_default_agrees_with_an_omitted_option() -> None:
    def on_rank(group: InProcessRank) -> Any:
        explicit = {
            "kv_layout": rs.zigzag(SEQ_LEN, 3),
            "algorithm": "pass_kv",
            "direction": "forward",
            "scale": 1 / math.sqrt(HEAD_DIM),
            "kernel": "sdpa_cpu",
            "timeout_s": 7.0,
            "return_lse": False,
        }
        return call(arguments(group.rank, 3) | (explicit if group.rank == 1 else {}), group).shape

    assert len(rs.run_in_process(on_rank, 3, timeout_s=20)) == 3


def test_one_rank_that_leaves_the_choice_open() -> None:
    """Many keys for few queries: "auto" would measure the machine, while other ranks make another call."""
    layout, kv_layout = rs.contiguous(4, 2), rs.contiguous(400, 2)

    def attend(group: InProcessRank) -> Exception:
        q, k, v = (torch.randn(1, 2, rows, 8) for rows in (2, 200, 200))
        algorithm = "auto" if group.rank == 0 else "pass_kv"
        options = {"mask": rs.full(), "layout": layout, "kv_layout": kv_layout, "algorithm": algorithm}
        with pytest.raises(rs.TransportError) as raised:
            rs.attention(q, k, v, **options, group=group)
        # The group is usable again.
        rs.attention(q, k, v, **options | {"algorithm": "pass_q"}, group=group)
        return raised.value

    (message,) = {str(error) for error in rs.run_in_process(attend, 2, timeout_s=20)}
    assert "calibrate" in message


def test_one_rank_with_another_type_that_has_not_been_measured() -> None:
    """The rank would measure the machine first, which the others have done: they still learn about the dtype."""
    layout, kv_layout = rs.contiguous(4, 2), rs.contiguous(400, 2)

    def attend(group: InProcessRank) -> str:
        q, k, v = (torch.randn(1, 2, rows, 8) for rows in (2, 200, 200))
        options = {"mask": rs.full(), "layout": layout, "kv_layout": kv_layout, "group": group}
        rs.attention(q, k, v, **options)
        dtype = torch.float32 if group.rank == 0 else torch.bfloat16
        with pytest.raises(rs.TransportError) as raised:
            rs.attention(q.to(dtype), k.to(dtype), v.to(dtype), **options)
        return str(raised.value)

    (message,) = set(rs.run_in_process(attend, 2, timeout_s=20))
    assert "dtype: rank 0 has torch.float32, rank 1 has torch.bfloat16" in message

"""K and V sent as bytes, and algorithms chosen by the rates of a machine."""

import logging
from functools import partial

import pytest
import torch

import ringspan as rs
import ringspan.runtime.plan
from ringspan.algorithms.choose import Choice, RingMachine, RingWork, choose_by_time
from ringspan.program.execute import Event
from ringspan.runtime.quantize import FORMATS, encode, output_bound
from ringspan.transports.base import CountingTransport
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.attention_cases import make_job
from support.conversations import Story, attend, live_through

CAUSAL = ("causal",)
HEADS = rs.Heads(4, 2)
FAST_LINK = RingMachine(1e9, 1e12, 0.0)
SLOW_LINK = RingMachine(1e12, 1e6, 0.0)


@pytest.mark.parametrize("wire", list(FORMATS))
@pytest.mark.parametrize("algorithm", ["pass_kv", "all_gather", "ulysses", "auto"])
def test_attention_with_encoded_keys(wire: str, algorithm: str) -> None:
    """Each element is within the bound computed from the scales, and not exact by accident."""
    job = make_job("wire", CAUSAL, rs.zigzag(50, 2), HEADS, algorithm=algorithm, dtype=torch.float32)
    form = FORMATS[wire]
    with torch.no_grad():
        parts = rs.run_in_process(lambda group: job.attend(group, group.rank, wire=wire), 2)
    out = job.layout.unshard([part.out for part in parts], 2)
    error = (out.double() - job.out).abs().amax((0, 2, 3))
    scales = [encode(x, form)[1].double().amax((0, 2, 3)) for x in (job.k, job.v)]
    bound = output_bound(job.q, *scales, form, job.q.shape[-1] ** -0.5)
    assert (error <= bound + 1e-6).all()
    assert (error > 1e-4).all()
    keys, values = ((x.to(torch.float64) * s.double()) for x, s in (encode(y, form) for y in (job.k, job.v)))
    positions = job.layout.all_positions()
    rounded, _ = oracle.dense_attention(job.q, keys, values, oracle.dense_mask(CAUSAL, positions, positions))
    torch.testing.assert_close(out, torch.from_numpy(rounded).float())


@pytest.mark.parametrize("wire", list(FORMATS))
def test_values_without_a_dim(wire: str) -> None:
    """The output is empty, and the lse that of the encoded keys."""
    layout = rs.zigzag(8, 2)
    x = torch.randn(1, 2, 8, 4, generator=torch.Generator().manual_seed(0))

    def lse(group: InProcessRank, v: torch.Tensor) -> torch.Tensor:
        q, v = (layout.shard(whole, group.rank, dim=2) for whole in (x, v))
        result = rs.attention(q, q, v, mask=rs.causal(), layout=layout, group=group, wire=wire, return_lse=True)
        assert isinstance(result, tuple)
        assert result[0].shape == (1, 2, 4, v.shape[-1])
        return result[1]

    with_v, without = (rs.run_in_process(partial(lse, v=v), 2) for v in (x, x[..., :0]))
    torch.testing.assert_close(without, with_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_encoded_keys(counted: dict[int, CountingTransport], dtype: torch.dtype) -> None:
    """Counted where messages leave: int8 is at most 27 % of float32's bytes and 53 % of bfloat16's."""
    q, k, v = (torch.randn(1, heads, 64, 64).to(dtype) for heads in (4, 2, 2))
    layout = rs.contiguous(128, 2)
    sent = {}
    for wire in (None, "int8"):
        rs.run_in_process(
            lambda group, wire=wire: rs.attention(
                q, k, v, mask=rs.full(), layout=layout, group=group, algorithm="pass_kv", wire=wire
            ),
            2,
        )
        sent[wire] = sum(counted[0].bytes_sent)
    assert sent[None] == (k.nbytes + v.nbytes)
    assert sent["int8"] <= {torch.float32: 0.27, torch.bfloat16: 0.53}[dtype] * sent[None]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wire": "int4"}, "int8, float8_e4m3"),
        ({"wire": "int8", "algorithm": "pass_q"}, "do not travel"),
        ({"wire": "int8", "grad": True}, "no_grad"),
    ],
)
def test_a_wire_that_cannot_be(options: dict[str, object], text: str) -> None:
    x = torch.randn(1, 1, 8, 4, requires_grad=bool(options.pop("grad", False)))
    with pytest.raises(rs.UnsupportedError, match=text):
        rs.attention(x, x, x, mask=rs.causal(), layout=rs.contiguous(8, 1), **options)


def test_a_wire_is_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if "auto" would leave the keys in place without rounding."""
    monkeypatch.setattr(ringspan.runtime.plan, "choose_by_time", lambda *_: Choice("pass_q", "fewer bytes"))
    layout, kv_layout = rs.contiguous(2, 2), rs.contiguous(200, 2)
    keys = torch.randn(2, 1, 1, 100, 64, generator=torch.Generator().manual_seed(0))
    call = partial(rs.attention, mask=rs.full(), layout=layout, kv_layout=kv_layout)

    def on_rank(group: InProcessRank) -> list[torch.Tensor]:
        k = keys[group.rank]
        q = k[:, :, :1]
        return [
            call(q, k, k, group=group, **options)
            for options in ({"wire": "int8"}, {"wire": "int8", "algorithm": "pass_kv"}, {"algorithm": "pass_kv"})
        ]

    for chosen, encoded, exact in rs.run_in_process(on_rank, 2):
        assert torch.equal(chosen, encoded)
        assert not torch.equal(chosen, exact)


@pytest.mark.parametrize("storage", [None, "int8"])
def test_a_turn_with_encoded_keys(storage: str | None) -> None:
    """The error is within `Turn.error_bound`, in prefill from nothing and over a cache."""
    story = Story(4, HEADS, [CAUSAL], torch.float32, storage=storage)
    story.turn({0: 20, 1: 9}).turn({1: 6, 0: 30})

    def bounded(group: InProcessRank) -> None:
        cache = story.cache(group)
        for act in story.acts:
            with cache.begin(act.lengths, algorithm="pass_kv", wire="int8") as turn:
                *qkv, expected = (turn.layout.shard(x, group.rank, 2) for x in act.tensors[0])
                got = attend(turn, qkv, 0)
                error = (got.double() - expected).abs().amax((0, 2, 3))
                bound = turn.error_bound(qkv[0], layer=0)
                assert (error <= bound).all()
                assert (error > 1e-5).all()
                assert (bound < 1).all()

    rs.run_in_process(bounded, 2)


def test_exact_turns_have_no_error() -> None:
    cache = rs.KVCache(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    with cache.begin([3]) as turn:
        q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 3, 4)
        turn.prefill(q, k, k, layer=0)
        assert not turn.error_bound(q, layer=0).any()


def test_the_choice_by_time(subtests: pytest.Subtests) -> None:
    """Few queries over many keys: pass-Q on a slow link, pass-KV on a free one."""
    work = RingWork(flops=1e9, kv_bytes=10**8, q_bytes=10**5, out_bytes=10**5)
    for world_size in (2, 3, 8):
        with subtests.test(f"{world_size}"):
            slow = choose_by_time(work, SLOW_LINK, world_size)
            fast = choose_by_time(work, FAST_LINK, world_size)
            assert slow is not None
            assert fast is not None
            assert (slow.algorithm, fast.algorithm) == ("pass_q", "pass_kv")
            assert "MB/s" in slow.reason
            assert choose_by_time(work, None, world_size) is None
    large = choose_by_time(work._replace(q_bytes=10**8), None, 2)
    assert large is not None
    assert large.algorithm == "pass_kv"
    # By hand: compute 1 ms per step; K and V 100 ms, queries and results 0.1 ms each at 1 GB/s.
    by_hand = choose_by_time(work, RingMachine(5e11, 1e9, 0.0), 2)
    assert by_hand is not None
    assert "pass_kv should take 101 ms and pass_q 2.1 ms" in by_hand.reason


@pytest.mark.parametrize(("machine", "algorithm"), [(SLOW_LINK, "pass_q"), (FAST_LINK, "pass_kv")])
def test_turns_follow_the_machine(machine: RingMachine, algorithm: str) -> None:
    story = Story(5, HEADS, [CAUSAL, ("and", CAUSAL, ("sliding_window", 90, 0))]).turn({0: 80}).turn({0: 3})

    def follow(group: InProcessRank) -> tuple[str, str]:
        rs.use_machine(machine, group)
        cache = live_through(story, group)
        turn = cache.begin([3])
        return turn.algorithm, turn.reason

    told = rs.run_in_process(follow, 2)
    assert told[0] == told[1]
    assert told[0][0] == algorithm
    assert told[0][1].startswith(f"{algorithm}: pass_kv should take")


def test_a_call_made_before_follows_the_machine_too() -> None:
    job = make_job("auto", ("full",), rs.contiguous(4, 2), HEADS, kv_layout=rs.contiguous(90, 2), algorithm="auto")

    def travelling(group: InProcessRank, machine: RingMachine) -> set[str]:
        rs.use_machine(machine, group)
        events: list[Event] = []
        job.check(group.rank, job.attend(group, group.rank, record=events.append))
        return {block.kind for event in events if event.action == "send" for block in event.blocks}

    def follow(group: InProcessRank) -> list[set[str]]:
        return [travelling(group, machine) for machine in (SLOW_LINK, FAST_LINK, SLOW_LINK)]

    for told in rs.run_in_process(follow, 2):
        assert told == [{"q", "out"}, {"kv"}, {"q", "out"}]


def test_what_is_measured_is_the_same_on_all_ranks_and_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    job = make_job("auto", ("full",), rs.contiguous(4, 3), HEADS, kv_layout=rs.contiguous(90, 3), algorithm="auto")
    with caplog.at_level(logging.INFO, "ringspan"):

        def measure(group: InProcessRank) -> tuple[RingMachine, RingMachine]:
            first = rs.measure_machine(group, dtype=torch.float64, head_dim=job.q.shape[3])
            job.check(group.rank, job.attend(group, group.rank))
            return first, rs.measure_machine(group, dtype=torch.float64, head_dim=job.q.shape[3])

        figures = rs.run_in_process(measure, 3)
    assert len(set(figures)) == 1
    assert figures[0][0] is figures[0][1]
    *rates_and_latency, busy_s_per_byte = figures[0][0]
    assert min(rates_and_latency) > 0
    assert busy_s_per_byte >= 0  # a copy may take too little compute to be measured
    assert "should take" in caplog.text

"""The Chrome trace of a run: what viewers need, and that it says what happened."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringspan.bench.result import Activity
from ringspan.cli.plan.files import activities_of, trace_plan
from ringspan.cli.trace import build_trace
from ringspan.planner.catalog import Link, load_model, parse_devices
from ringspan.planner.plan import Request, Setup, build_plan
from ringspan.planner.timeline import END, Load, Round, Timeline, run_timeline

HOP = (
    Activity(0, 0, "send", "kv0", 10.0, 10.001, 0, 1, 4096),
    Activity(0, 0, "attend", "q0×kv0", 10.001, 10.005),
    Activity(0, 0, "merge", "q0×kv0", 10.005, 10.0051),
    Activity(0, 0, "sent", "kv0", 10.006, 10.0065, 0, 1),
    Activity(1, 0, "attend", "q1×kv1", 10.001, 10.003),
    Activity(1, 0, "receive", "kv0", 10.003, 10.004, 0, 1),
    Activity(1, 1, "attend", "q1×kv0", 10.004, 10.006),
)


def events(phase: str, *activities: Activity) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(build_trace(activities, {})))
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_rank_is_a_process_with_two_named_rows() -> None:
    names = {(it["name"], it["pid"], it.get("tid")): it["args"] for it in events("M", *HOP)}
    for rank in (0, 1):
        assert names["process_name", rank, None] == {"name": f"rank {rank}"}
        assert names["thread_name", rank, 0] == {"name": "compute"}
        assert names["thread_name", rank, 1] == {"name": "communication"}


def test_every_activity_is_a_slice_in_microseconds_from_the_beginning() -> None:
    slices = {(it["pid"], it["name"]): it for it in events("X", *HOP)}
    assert len(slices) == len(HOP)
    sent, computed = slices[0, "send kv0 to 1"], slices[1, "q1×kv0"]
    assert (sent["ts"], sent["dur"], sent["tid"]) == (0, pytest.approx(1000), 1)
    assert (computed["ts"], computed["dur"], computed["tid"]) == (pytest.approx(4000), pytest.approx(2000), 0)
    assert sent["args"] == {"step": 0, "bytes": 4096}
    assert computed["args"] == {"step": 1}
    rows = {name: it["tid"] for (_, name), it in slices.items()}
    assert rows["merge q0×kv0"] == 0
    assert rows["wait for kv0 from 0"] == rows["wait until kv0 has left for 1"] == 1


def test_an_arrow_leads_from_the_send_into_the_wait_for_it() -> None:
    (begin,), (end,) = events("s", *HOP), events("f", *HOP)
    assert (begin["name"], begin["cat"], begin["id"]) == (end["name"], end["cat"], end["id"])
    assert (begin["pid"], begin["tid"], begin["ts"]) == (0, 1, 0)
    assert (end["pid"], end["tid"], end["bp"]) == (1, 1, "e")
    assert 3000 < end["ts"] < 4000


def test_arrows_keep_blocks_steps_and_peers_apart() -> None:
    hops = [(step, block, src, dst) for step in (0, 1) for block in ("kv0", "out1") for src, dst in ((0, 1), (1, 2))]
    sends = [Activity(src, step, "send", block, i, i + 0.1, src, dst) for i, (step, block, src, dst) in enumerate(hops)]
    waits = [
        Activity(dst, step, "receive", block, 50 + i, 50.5 + i, src, dst)
        for i, (step, block, src, dst) in enumerate(hops)
    ]
    ends = {it["id"]: it for it in events("f", *sends, *waits[::-1])}
    assert len(ends) == len(hops)
    for i, begin in enumerate(events("s", *sends, *waits[::-1])):
        assert begin["ts"] == pytest.approx(1e6 * i)
        assert ends[begin["id"]]["ts"] == pytest.approx(1e6 * (50.25 + i))


def test_no_arrow_points_back_though_the_receiver_waited_first() -> None:
    late = (
        Activity(1, 0, "receive", "kv0", 1.0, 3.0, 0, 1),
        Activity(0, 0, "send", "kv0", 2.8, 2.9, 0, 1),
    )
    (begin,), (end,) = events("s", *late), events("f", *late)
    assert begin["ts"] < end["ts"] < 2e6


def test_what_took_no_time_is_still_seen() -> None:
    (it,) = events("X", Activity(0, 0, "merge", "out0", 1.0, 1.0))
    assert it["dur"] > 0


def test_the_trace_says_what_was_run() -> None:
    trace = build_trace(HOP, {"algorithm": "pass_kv"})
    assert trace["otherData"] == {"algorithm": "pass_kv"}
    assert trace["displayTimeUnit"] == "ms"


def test_a_single_rank_has_no_arrows_and_nothing_is_a_trace_too() -> None:
    alone = Activity(0, 0, "attend", "q0×kv0", 1.0, 2.0)
    assert not events("s", alone)
    assert build_trace((), {})["traceEvents"] == []


def planned(compute_s: list[float], link: Link, *rounds: Round) -> Timeline:
    """Two ranks that compute so long in each step; the messages start with the first one."""
    loads = [Load(np.full(2, seconds), rounds if t == 0 else (), ["q×kv"] * 2) for t, seconds in enumerate(compute_s)]
    return run_timeline(loads, 2, link, link, record=True)


def message(name: str, nbytes: float, reads_at: int = 0) -> Round:
    ranks = np.arange(2)
    return Round(ranks, 1 - ranks, nbytes, np.zeros(2, bool), reads_at, names=[name] * 2)


def slices(timeline: Timeline, kind: str) -> list[tuple[str, float, float]]:
    """The events of rank 0, in seconds."""
    found = [it for it in activities_of(timeline) if it.rank == 0 and it.kind == kind]
    return [(it.name, it.start_s, it.end_s) for it in found]


LINK = Link("link", 10.0, 0.0, 10.0, 0.0, 10.0)


def test_a_planned_wait_is_as_long_as_the_rank_is_blocked() -> None:
    """A message of 3 s behind 1 s of compute blocks for 2 s; behind 5 s of compute it does not."""
    blocked = planned([1.0, 1.0], LINK, message("kv", 30.0))
    assert slices(blocked, "receive") == [("kv", 1.0, 3.0)]
    assert slices(blocked, "attend") == [("q×kv", 0.0, 1.0), ("q×kv", 3.0, 4.0)]
    assert slices(planned([5.0, 1.0], LINK, message("kv", 30.0)), "receive") == [("kv", 5.0, 5.0)]
    late = planned([1.0, 1.0], LINK, message("dkv", 30.0, END))
    assert slices(late, "receive") == [("dkv", 2.0, 3.0)]


def test_planned_waits_for_several_messages_follow_one_another() -> None:
    """One link takes 2 s for the first and then 3 s for the second; the sends have their bytes."""
    timeline = planned([1.0, 1.0], LINK, message("k", 20.0), message("v", 30.0))
    assert slices(timeline, "receive") == [("k", 1.0, 2.0), ("v", 2.0, 5.0)]
    assert [it.nbytes for it in activities_of(timeline) if it.kind == "send" and it.rank == 0] == [20, 30]
    assert len(events("s", *activities_of(timeline))) == len(events("f", *activities_of(timeline))) == 4


def test_planned_compute_lasts_as_long_as_it_takes_beside_messages() -> None:
    """Carrying a message of 2 s out and one in costs half as long, so that 4 s of compute take 5 s."""
    timeline = planned([4.0, 1.0], LINK._replace(steals=0.5), message("kv", 20.0))
    assert slices(timeline, "attend") == [("q×kv", 0.0, 5.0), ("q×kv", 5.0, 6.0)]
    assert timeline.compute_s.tolist() == [6.0, 6.0]


@pytest.mark.parametrize(("wire", "row_bytes"), [("bf16", 128 * 2), ("int8", 128 + 2), ("fp8", 128 + 2)])
def test_a_planned_trace_has_the_bytes_of_the_wire(wire: str, row_bytes: int) -> None:
    """K and V of 8 heads and 4,096 tokens per rank; quantised, a row of 128 bytes has a scale of 2."""
    request = Request(load_model("llama-3.1-8b"), parse_devices("8xh100"), "prefill", 2**15, tp=1, wire=wire)
    plan = build_plan(request)
    ring = next(it for it in plan.options if it.setup == Setup("pass_kv", "zigzag", 1, 8))
    trace = trace_plan(replace(plan, options=(ring,)), {})
    sent = {it["args"]["bytes"] for it in trace["traceEvents"] if it["ph"] == "X" and it["cat"] == "send"}
    assert sent == {2 * 8 * 4096 * row_bytes}

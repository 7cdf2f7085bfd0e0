"""Where the time of a run went, from what its ranks did, and the bottleneck that is named."""

import pytest

from ringspan.bench.breakdown import Interval, break_down, judge
from ringspan.bench.result import Activity, Breakdown, Ratio, Timing

PARTS = ("attention_s", "merge_s", "communication_s", "waiting_s", "other_s")


def of(breakdown: Breakdown) -> tuple[float, ...]:
    return tuple(getattr(breakdown, part) for part in PARTS)


def test_parts_are_distinguished_and_add_up_to_the_time_of_the_call() -> None:
    activities = [
        Activity(0, 0, "send", "kv0", 0.0, 0.1, 0, 1),
        Activity(0, 0, "attend", "q0×kv0", 0.1, 4.1),
        Activity(0, 0, "merge", "q0×kv0", 4.1, 4.3),
        Activity(0, 0, "receive", "kv1", 4.3, 5.3, 1, 0),
        Activity(0, 0, "sent", "kv0", 5.3, 5.4, 0, 1),
        Activity(1, 0, "send", "kv1", 0.5, 0.6, 1, 0),
    ]
    first, second = break_down(activities, [Interval(0.0, 6.0), Interval(0.4, 8.0)])
    assert of(first) == pytest.approx((4.0, 0.2, 0.1 + 1.0 + 0.1, 2.0, 0.6))
    assert of(second) == pytest.approx((0, 0, 0.1, 0.4, 7.5))
    assert first.total_s == pytest.approx(8.0)
    assert second.total_s == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("sent_at_s", "waiting_s"), [(0.0, 0.0), (2.5, 1.5), (4.0, 3.0), (9.0, 3.0)], ids=["before", "amid", "end", "after"]
)
def test_a_receive_waits_for_its_peer_until_that_sends_and_for_the_link_after(
    sent_at_s: float, waiting_s: float
) -> None:
    activities = [
        Activity(0, 0, "receive", "kv1", 1.0, 4.0, 1, 0),
        Activity(1, 0, "send", "kv1", sent_at_s, sent_at_s, 1, 0),
    ]
    receiver, _ = break_down(activities, [Interval(0.0, 10.0)] * 2)
    assert receiver.waiting_s == pytest.approx(waiting_s)
    assert receiver.communication_s == pytest.approx(3.0 - waiting_s)


@pytest.mark.parametrize(
    ("breakdowns", "ideal_s", "bottleneck", "words", "rank", "share"),
    [
        ([Breakdown(95, 1, 2, 1, 1), Breakdown(97, 1, 1, 1, 0)], 94.0, "attention", "attention,", 1, "97 %"),
        ([Breakdown(60, 1, 30, 5, 4), Breakdown(60, 1, 34, 1, 4)], 60.0, "communication", "communication", 1, "34 %"),
        ([Breakdown(50, 1, 4, 40, 5), Breakdown(90, 1, 4, 0, 5)], 90.0, "waiting", "waiting", 0, "40 %"),
        ([Breakdown(50, 30, 10, 5, 5)], 50.0, "merge", "merging", 0, "30 %"),
        ([Breakdown(50, 10, 0, 10, 30)], 50.0, "other", "overhead", 0, "30 %"),
        ([Breakdown(96, 1, 1, 1, 1), Breakdown(95, 2, 1, 1, 1)], 50.0, "contention", "that attention", 0, "46 %"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bottleneck_is_named_with_the_rank_it_hits_hardest(
    breakdowns: list[Breakdown], ideal_s: float, bottleneck: str, words: str, rank: int, share: str
) -> None:
    verdict = judge(breakdowns, ideal_s)
    assert verdict.bottleneck == bottleneck
    assert verdict.text.startswith(f"The bottleneck is {words}")
    assert f"rank {rank}" in verdict.text
    assert share in verdict.text


def test_a_layout_is_suspected_only_where_attention_is_uneven() -> None:
    even = judge([Breakdown(60, 1, 4, 30, 5), Breakdown(62, 1, 4, 28, 5)], 60.0)
    assert even.bottleneck == "waiting"
    assert "All spend the same time on attention" in even.text
    assert "layout" not in even.text
    uneven = judge([Breakdown(50, 1, 4, 40, 5), Breakdown(90, 1, 4, 0, 5)], 90.0)
    assert "Attention takes 50 to 90 % of the time of a rank: either work is uneven" in uneven.text
    assert "or some ranks are slower" in uneven.text


def test_ratios_are_of_neighbouring_repeats() -> None:
    slow, fast = Timing.of([2.0, 40.0, 6.0]), Timing.of([1.0, 10.0, 4.0])
    assert (slow.median_s, slow.fastest_s, slow.slowest_s) == (6.0, 2.0, 40.0)
    assert Ratio.of(slow, fast) == Ratio(2.0, 1.5, 4.0)

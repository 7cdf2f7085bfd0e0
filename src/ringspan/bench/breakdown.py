"""Where did the time go, and what is the bottleneck?

A rank that is blocked in a receive waits for one of two things: for its peer to send, or for the message to travel. The
sender's own record tells them apart: until the message was started the rank waited for the peer, which no faster link
would change; after that it waited for the link.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ringspan.bench.result import Activity, Breakdown

MOST = 0.9  # share of the time from which on attention is the bottleneck, as it should be
EVEN = 1.1  # ratio between two ranks up to which their attention time counts as equal


class Interval(NamedTuple):
    """Begin and end of a rank's call, on the clock of the activities."""

    start_s: float
    end_s: float


def break_down(activities: Sequence[Activity], calls: Sequence[Interval]) -> tuple[Breakdown, ...]:
    """The breakdown of each rank's time; `calls` holds one interval per rank."""
    begin_s, finish_s = min(call.start_s for call in calls), max(call.end_s for call in calls)
    sent_at = {_message(it): it.start_s for it in activities if it.kind == "send"}
    by_rank: list[list[Activity]] = [[] for _ in calls]
    for it in activities:
        by_rank[it.rank].append(it)
    return tuple(_of_rank(mine, call, sent_at, finish_s - begin_s) for mine, call in zip(by_rank, calls, strict=True))


def _of_rank(
    activities: Sequence[Activity], call: Interval, sent_at: dict[tuple[object, ...], float], total_s: float
) -> Breakdown:
    seconds = dict.fromkeys(("attend", "merge", "send", "receive", "sent"), 0.0)
    late_s = 0.0
    for it in activities:
        seconds[it.kind] += it.end_s - it.start_s
        if it.kind == "receive":
            late_s += max(0.0, min(sent_at[_message(it)], it.end_s) - it.start_s)
    own_s = call.end_s - call.start_s
    return Breakdown(
        attention_s=seconds["attend"],
        merge_s=seconds["merge"],
        communication_s=seconds["send"] + seconds["sent"] + seconds["receive"] - late_s,
        waiting_s=late_s + total_s - own_s,
        other_s=own_s - sum(seconds.values()),
    )


def _message(it: Activity) -> tuple[object, ...]:
    return it.step, it.name, it.src, it.dst


class Verdict(NamedTuple):
    """The largest loss, or attention if the losses are small, and a sentence about it."""

    bottleneck: str
    text: str


def judge(ranks: Sequence[Breakdown], ideal_s: float) -> Verdict:
    """Name the bottleneck and the remedy; `ideal_s` is the time of attention when nothing else runs."""
    attention = [rank.attention_s / rank.total_s for rank in ranks]
    losses = {name: [getattr(rank, f"{name}_s") / rank.total_s for rank in ranks] for name in _LOSSES}
    # A part of attention_s: how much longer attention takes than alone.
    losses["contention"] = [max(0.0, rank.attention_s - ideal_s) / rank.total_s for rank in ranks]
    name = max(losses, key=lambda name: sum(losses[name]))
    shares = losses[name]
    if sum(attention) >= MOST * len(ranks) and sum(losses["contention"]) <= (1 - MOST) * len(ranks):
        name, shares = "attention", attention
    worst = max(range(len(ranks)), key=lambda rank: shares[rank])
    text = _SENTENCES[name].format(rank=worst, share=f"{100 * shares[worst]:.0f} %")
    if name == "waiting":
        text += _why_waiting(min(attention), max(attention))
    return Verdict(name, text)


def _why_waiting(least: float, most: float) -> str:
    """The likely reason. The speeds of the ranks are unknown, so uneven work is never named alone."""
    if most <= EVEN * least:
        return (
            " All spend the same time on attention, so they delay each other, or other programs do: give every rank "
            "its own core."
        )
    return (
        f" Attention takes {100 * least:.0f} to {100 * most:.0f} % of the time of a rank: either work is uneven, which "
        "another layout (zigzag, balanced) corrects, or some ranks are slower; give every rank its own core."
    )


_LOSSES = ("merge", "communication", "waiting", "other")

_SENTENCES = {
    "attention": "The bottleneck is attention, as it should be: {share} of the time on rank {rank}.",
    "merge": "The bottleneck is merging partial results: {share} of the time on rank {rank}. Longer shards help.",
    "communication": (
        "The bottleneck is communication: rank {rank} is blocked for {share} of the time by messages under way. "
        "More tokens, fewer ranks, fewer KV heads or a faster link hide them."
    ),
    "waiting": (
        "The bottleneck is waiting: rank {rank} is idle for {share} of the time, until others begin, send or finish."
    ),
    "other": (
        "The bottleneck is overhead outside kernels and messages: {share} of the time on rank {rank}. "
        "More tokens in a call make it small."
    ),
    "contention": (
        "The bottleneck is that attention is slower than alone, which costs rank {rank} {share} of the time: messages, "
        "ranks or other programs compete for cores, caches and memory."
    ),
}

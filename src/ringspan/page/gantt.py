"""A timeline as bars that the page can draw: what every rank computes, which messages travel, and where ranks wait.

Bars are lists [lane, kind, start_s, stop_s, label, note]. A predicted timeline and a measured trace end up alike.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from ringspan.page.units import format_bytes
from ringspan.planner.timeline import Timeline

Bar = tuple[int, str, float, float, str, str]

COMPUTE, MESSAGE, WAIT = "compute", "message", "wait"
START = "start"  # of a message: what it costs the sender; only traces have it


def describe_timeline(timeline: Timeline, title: str) -> dict[str, Any]:
    """A recorded timeline; a lane is a rank."""
    bars = sorted(bars_of(timeline), key=lambda bar: (bar[2], bar[0]))
    return {
        "title": title,
        "lanes": [f"rank {rank}" for rank in range(len(timeline.compute_s))],
        "total_s": timeline.makespan_s,
        "bars": [[lane, kind, *map(_round, span), label, note] for lane, kind, *span, label, note in bars],
    }


def bars_of(timeline: Timeline) -> Iterator[Bar]:
    """Compute, messages on the lane of their receiver, and the waits between."""
    free_s = np.zeros(len(timeline.compute_s))
    for t, (begin_s, busy_s, load, messages) in enumerate(timeline.moments):
        for rank, (begin, busy) in enumerate(zip(begin_s.tolist(), busy_s.tolist(), strict=True)):
            if begin > free_s[rank]:
                yield rank, WAIT, float(free_s[rank]), begin, "waits", f"before step {t}"
            if busy:
                label = load.names[rank] if load.names else ""
                yield rank, COMPUTE, begin, begin + busy, label or "merges", f"step {t}"
            free_s[rank] = begin + busy
        for one, (start_s, arrival_s) in zip(load.rounds, messages, strict=True):
            sizes = np.broadcast_to(one.nbytes, one.src.shape)
            for i, (src, dst) in enumerate(zip(one.src.tolist(), one.dst.tolist(), strict=True)):
                name = one.names[i] if one.names else ""
                note = f"step {t}, from rank {src} to rank {dst}, {format_bytes(float(sizes[i]))}"
                yield dst, MESSAGE, float(start_s[i]), float(arrival_s[i]), name, note
    for rank, free in enumerate(free_s.tolist()):
        if free < timeline.makespan_s * (1 - 1e-9):
            yield rank, WAIT, free, timeline.makespan_s, "waits", "for the others to finish"


def _round(seconds: Any) -> float:
    return float(f"{seconds:.5g}")

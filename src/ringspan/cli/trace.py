"""How is a run written as a Chrome trace, for ui.perfetto.dev or chrome://tracing?

A rank is a process with two rows: what it computes, and where it starts messages or is blocked by them. Every message
is an arrow from its start to the end of the wait for it, so it shows hops and the computation that hides them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringspan.bench.result import Activity

_ROWS = {"compute": 0, "communication": 1}
_ROW_OF = {
    "attend": "compute",
    "merge": "compute",
    "send": "communication",
    "receive": "communication",
    "sent": "communication",
}
_SHORTEST_US = 0.001  # viewers attach no arrow to a slice of length 0

Event = dict[str, Any]


def build_trace(activities: Sequence[Activity], about: Mapping[str, object]) -> dict[str, Any]:
    """The trace as an object to be written as JSON; `about` says what was run."""
    begin_s = min((it.start_s for it in activities), default=0.0)
    return {
        "traceEvents": [
            *_names(sorted({it.rank for it in activities})),
            *(_slice(it, begin_s) for it in activities),
            *_arrows(activities, begin_s),
        ],
        "displayTimeUnit": "ms",
        "otherData": dict(about),
    }


def _names(ranks: Sequence[int]) -> Iterator[Event]:
    for rank in ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for row, tid in _ROWS.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": row}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}


def _slice(it: Activity, begin_s: float) -> Event:
    args: dict[str, object] = {"step": it.step}
    if it.nbytes:
        args["bytes"] = it.nbytes
    return {
        "ph": "X",
        "name": _NAMES[it.kind].format(name=it.name, src=it.src, dst=it.dst),
        "cat": it.kind,
        **_place(it, it.start_s, begin_s),
        "dur": max(_SHORTEST_US, _microseconds(it.end_s - it.start_s)),
        "args": args,
    }


_NAMES = {
    "attend": "{name}",
    "merge": "merge {name}",
    "send": "send {name} to {dst}",
    "receive": "wait for {name} from {src}",
    "sent": "wait until {name} has left for {dst}",
}


def _arrows(activities: Sequence[Activity], begin_s: float) -> Iterator[Event]:
    receives = {_message(it): it for it in activities if it.kind == "receive"}
    for number, send in enumerate(it for it in activities if it.kind == "send"):
        receive = receives[_message(send)]
        # An arrow must end inside the wait and after its start.
        arrived_s = (max(receive.start_s, send.start_s) + max(receive.end_s, send.start_s)) / 2
        common = {"name": send.name, "cat": "hop", "id": number}
        yield {"ph": "s", **common, **_place(send, send.start_s, begin_s)}
        yield {"ph": "f", "bp": "e", **common, **_place(receive, arrived_s, begin_s)}


def _message(it: Activity) -> tuple[object, ...]:
    return it.step, it.name, it.src, it.dst


def _place(it: Activity, time_s: float, begin_s: float) -> Event:
    return {"pid": it.rank, "tid": _ROWS[_ROW_OF[it.kind]], "ts": _microseconds(time_s - begin_s)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

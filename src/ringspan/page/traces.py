"""A Chrome trace, predicted or measured, as bars; and a measured one laid over a predicted one.

A trace may come from anywhere. What is not a trace is refused with the reason, what is too long to draw is refused with
its size, and every name in it is data.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from ringspan.errors import ShapeError
from ringspan.page.gantt import COMPUTE, MESSAGE, START, WAIT
from ringspan.page.report import Section, build_report, facts, gantt, table
from ringspan.page.units import format_seconds

MOST_EVENTS = 200_000
MOST_LANES = 1024
MOST_BYTES = 200_000_000
LONGEST_NAME = 200  # characters that are kept of a name

Trace = dict[str, Any]
Chart = dict[str, Any]
_STEP = re.compile(r"step (\d{1,9})\b")


def read_trace(path: Path) -> Trace:
    """The trace in a file. Reading stops at the limit, so that an endless file ends in a message too."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise _refusal(str(path), f"the file cannot be read: {reason}", "name a trace file") from None
    if len(text) > MOST_BYTES:
        rule = f"the file has more than {MOST_BYTES:,} bytes, which is the most that the page shows"
        raise _refusal(str(path), rule, "trace fewer steps")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(str(path), f"the file is not JSON: {error}", "name a Chrome trace") from None
    return check_trace(found, str(path))


def check_trace(trace: Any, name: str = "trace") -> Trace:
    """The trace, if it is one and not too long."""
    events = trace.get("traceEvents") if isinstance(trace, dict) else trace
    if not isinstance(events, list):
        raise _refusal(name, "a Chrome trace is an object with a list `traceEvents`", "write one with --trace")
    if len(events) > MOST_EVENTS:
        rule = f"the trace has {len(events):,} events; the page shows at most {MOST_EVENTS:,}"
        raise _refusal(name, rule, "trace fewer steps")
    about = trace.get("otherData") if isinstance(trace, dict) else None
    checked: Trace = {"traceEvents": events, "otherData": about if isinstance(about, dict) else {}}
    whole = _complete_slices(checked)
    pids = {_pid(event) for event, _, _ in whole}
    if not whole or len(pids) > MOST_LANES:
        rule = f"the trace has {len(whole):,} complete slices (ph X, with ts and dur) in {len(pids):,} processes"
        raise _refusal(name, rule, f"show a trace with 1 to {MOST_LANES:,} processes")
    return checked


def describe_trace(trace: Trace, title: str) -> dict[str, Any]:
    """The slices of a checked trace as bars; a lane is a process, which is a rank."""
    whole = _complete_slices(trace)
    pids = sorted({_pid(event) for event, _, _ in whole})
    lane_of = {pid: lane for lane, pid in enumerate(pids)}
    begin = min(ts for _, ts, _ in whole)
    bars: list[list[Any]] = [
        [
            lane_of[_pid(event)],
            _kind(event),
            _short((ts - begin) / 1e6),
            _short((ts + dur - begin) / 1e6),
            _name(event),
            _note(event),
        ]
        for event, ts, dur in whole
    ]
    bars += _messages(trace["traceEvents"], lane_of, begin)
    bars.sort(key=lambda bar: bar[2])
    return {
        "title": title,
        "lanes": [f"rank {pid}" for pid in pids],
        "total_s": max(bar[3] for bar in bars) or 1e-9,
        "bars": bars,
    }


def _complete_slices(trace: Trace) -> list[tuple[dict[str, Any], float, float]]:
    """The events that have a begin and a length, in microseconds."""
    slices = [event for event in trace["traceEvents"] if isinstance(event, dict) and event.get("ph") == "X"]
    spans = [(event, _number(event, "ts"), _number(event, "dur")) for event in slices]
    return [(event, ts, dur) for event, ts, dur in spans if ts is not None and dur is not None and dur >= 0]


def build_trace_page(measured: Trace, predicted: Trace | None = None, command: str = "") -> str:
    """A page of one trace; with a predicted one, its tiles are outlined on the measured ones and compared with them."""
    trace = check_trace(measured)
    other = None if predicted is None else describe_trace(check_trace(predicted), "predicted")
    sections = timeline_sections(describe_trace(trace, "measured" if other else "trace"), other)
    about = [(str(key)[:LONGEST_NAME], _told(value)) for key, value in trace["otherData"].items()]
    if about:
        sections.append(facts("about", "What was run", about))
    return build_report("A run over time", ["What every rank computed, sent and waited for."], sections, command)


def _told(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)[:LONGEST_NAME]


def timeline_sections(measured: Chart, predicted: Chart | None = None) -> list[Section]:
    """A timeline with the seconds of each rank; a predicted one is laid over it and compared step by step."""
    charts, lead = [measured], list[str]()
    if predicted is not None:
        measured["overlay"] = [
            bar for bar in predicted["bars"] if bar[1] == COMPUTE and bar[0] < len(measured["lanes"])
        ]
        measured["total_s"] = predicted["total_s"] = max(measured["total_s"], predicted["total_s"])
        charts.append(predicted)
        lead.append("The dashed outlines on the measured timeline are the predicted tiles. Both have one scale.")
    sections = [gantt("time", "Timeline", charts, lead), _spent(charts)]
    if predicted is not None:
        sections.append(_compare_steps(measured, predicted))
    return sections


def _spent(charts: list[Chart]) -> Section:
    """Seconds by rank and kind."""
    rows = []
    for chart in charts:
        totals = [dict.fromkeys((COMPUTE, START, WAIT, MESSAGE), 0.0) for _ in chart["lanes"]]
        for lane, kind, start, stop, *_ in chart["bars"]:
            totals[lane][kind] += stop - start
        for lane, total in zip(chart["lanes"], totals, strict=True):
            kinds = (COMPUTE, START, WAIT)
            rows.append([chart["title"], lane, *((format_seconds(total[kind]), total[kind]) for kind in kinds)])
    columns = ["timeline", "rank", ">computing", ">starting messages", ">waiting"]
    return table("spent", "The timeline in seconds", columns, rows)


def _compare_steps(measured: Chart, predicted: Chart) -> Section:
    """The computing of every rank in every step that both timelines have."""
    found, expected = _seconds_by_step(measured), _seconds_by_step(predicted)
    rows = []
    for lane, step in sorted(found.keys() & expected.keys()):
        was, should = found[lane, step], expected[lane, step]
        ratio = (f"{was / should:.2f}", was / should) if should else ("", -1.0)
        shown = [(format_seconds(seconds), seconds) for seconds in (was, should)]
        rows.append([measured["lanes"][lane], (str(step), step), *shown, ratio])
    columns = ["rank", ">step", ">measured", ">predicted", ">measured over predicted"]
    caption = "Computing only; waiting and messages are in the table above. Choose a heading to sort by it."
    return table("compared", "Step by step: measured over predicted", columns, rows, caption)


def _seconds_by_step(chart: Chart) -> dict[tuple[int, int], float]:
    seconds: defaultdict[tuple[int, int], float] = defaultdict(float)
    for lane, kind, start, stop, _, note in chart["bars"]:
        step = _STEP.match(note)
        if kind == COMPUTE and step:
            seconds[lane, int(step[1])] += stop - start
    return dict(seconds)


def _messages(events: list[Any], lane_of: dict[Any, int], begin: float) -> list[list[Any]]:
    """Messages on their way, from the arrows of the trace: on the receiver's lane, from their start to their end."""
    starts: dict[object, tuple[float, dict[str, Any]]] = {}
    bars: list[list[Any]] = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") not in ("s", "f") or _pid(event) not in lane_of:
            continue
        at, key = _number(event, "ts"), f"{event.get('cat')}|{event.get('id')}"
        if at is None or at < begin:
            continue
        if event["ph"] == "s":
            starts[key] = at, event
        elif key in starts and starts[key][0] <= at:
            sent_at, send = starts.pop(key)
            span = [_short((time - begin) / 1e6) for time in (sent_at, at)]
            bars.append([lane_of[_pid(event)], MESSAGE, *span, _name(send), f"from rank {_pid(send)}"])
    return bars


def _kind(event: dict[str, Any]) -> str:
    name = str(event.get("name", ""))
    return WAIT if name.startswith("wait") else START if name.startswith("send") else COMPUTE


def _name(event: dict[str, Any]) -> str:
    return str(event.get("name", ""))[:LONGEST_NAME]


def _note(event: dict[str, Any]) -> str:
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return ""
    return ", ".join(f"{key} {value}" for key, value in list(arguments.items())[:4])[:LONGEST_NAME]


def _pid(event: dict[str, Any]) -> int:
    pid = event.get("pid")
    return pid if isinstance(pid, int) else 0


def _number(event: dict[str, Any], key: str) -> float | None:
    value = event.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _short(seconds: float) -> float:
    return float(f"{seconds:.7g}")


def _refusal(name: str, rule: str, remedy: str) -> ShapeError:
    return ShapeError(rule, argument="trace", value=name, remedy=remedy)

"""The files of `ringspan plan`: diagrams, and the timeline of the attention as a Chrome trace.

The trace has the schema of measured runs. It follows the real schedule, which is built for it, so the number of ranks
is limited. A wait is as long as its message blocks the rank; one that compute hides takes no time.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringspan.algorithms import END, Round
from ringspan.algorithms.loads import Seconds
from ringspan.bench.result import Activity
from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.cli.trace import build_trace
from ringspan.page.plan_curves import curves_by_devices, curves_by_length
from ringspan.page.plan_timeline import setup_timeline
from ringspan.planner.plan import Answer, Plan
from ringspan.planner.timeline import Timeline


def plot_plan(plan: Plan) -> str:
    request = plan.request
    by_length = [Line(*curve) for curve in curves_by_length(plan)]
    nodes, per_node, device = request.cluster
    where = f"{nodes}x{per_node}x{device.id}, {request.software.name}"
    charts = [Chart(f"{request.model.id}, {request.phase} on {where}", "tokens", "time", by_length, request.tokens)]
    by_devices = [Line(*curve) for curve in curves_by_devices(plan)]
    if by_devices:
        title = f"{request.model.id}, {request.phase} of {request.tokens:,} tokens on {device.id}"
        charts.append(Chart(title, "devices", "time", by_devices, request.cluster.num_devices))
    return draw_charts(charts)


def plot_sweep(answers: Sequence[Answer]) -> str:
    """An SVG diagram of a sweep: time by length, a line for each cluster; or by devices if there is one length."""
    request = answers[0].request
    title = f"{request.model.id}, {request.phase}, the best way for each, {request.software.name}"
    fitting = [answer for answer in answers if answer.option.fits]
    if len({answer.request.tokens for answer in answers}) > 1:
        lines: dict[str, list[tuple[float, float]]] = {}
        for answer in fitting:
            nodes, per_node, device = answer.request.cluster
            point = answer.request.tokens, answer.option.prediction.total_s
            lines.setdefault(f"{nodes}x{per_node}x{device.id}", []).append(point)
        return draw_charts([Chart(title, "tokens", "time", [Line(name, sorted(at)) for name, at in lines.items()])])
    lines = {}
    for answer in fitting:
        point = answer.request.cluster.num_devices, answer.option.prediction.total_s
        lines.setdefault(answer.request.cluster.device.id, []).append(point)
    title = f"{title}, {request.tokens:,} tokens"
    return draw_charts([Chart(title, "devices", "time", [Line(name, sorted(at)) for name, at in lines.items()])])


MOST_RANKS = 64


def trace_plan(plan: Plan, about: Mapping[str, object]) -> dict[str, Any]:
    """One layer's attention of the best way, forward."""
    setup = plan.best.setup
    described = {
        **about,
        "model": plan.request.model.id,
        "setup": str(setup),
        "layout": setup.layout,
        "predicted": True,
    }
    return build_trace(list(activities_of(setup_timeline(plan.request, setup))), described)


def activities_of(timeline: Timeline) -> Iterator[Activity]:
    """Every rank's activities with their times."""
    moments = timeline.moments
    due: defaultdict[tuple[int, int], list[tuple[float, Activity]]] = defaultdict(list)  # by reading step and rank
    for t, (begin_s, busy_s, load, messages) in enumerate(moments):
        for rank, name in enumerate(load.names):
            if busy_s[rank]:
                end_s = float(begin_s[rank] + busy_s[rank])
                yield Activity(rank, t, "attend", name or "merge", float(begin_s[rank]), end_s)
        for one, (_, arrival_s) in zip(load.rounds, messages, strict=True):
            reads_at = len(moments) if one.reads_at == END else one.reads_at or t + 1
            for i, send in enumerate(_sends(t, one, begin_s)):
                yield send
                due[reads_at, int(one.dst[i])].append((float(arrival_s[i]), send))
    for (t, rank), sends in due.items():
        before = moments[t - 1]
        yield from _waits(rank, float(before.begin_s[rank] + before.busy_s[rank]), sends)


def _sends(t: int, one: Round, begin_s: Seconds) -> Iterator[Activity]:
    """A rank's sends, which start with its step."""
    sizes = np.broadcast_to(one.nbytes, one.src.shape)
    for src, dst, name, nbytes in zip(one.src.tolist(), one.dst.tolist(), one.names, sizes.tolist(), strict=True):
        posted_s = float(begin_s[src])
        yield Activity(src, t, "send", name, posted_s, posted_s, src, dst, int(nbytes))


def _waits(rank: int, free_s: float, sends: list[tuple[float, Activity]]) -> Iterator[Activity]:
    """A rank's waits, one after the other; a message that arrived before the rank needed it takes no time."""
    for arrival_s, send in sorted(sends):
        until_s = max(free_s, arrival_s)
        yield send._replace(rank=rank, kind="receive", start_s=free_s, end_s=until_s)
        free_s = until_s

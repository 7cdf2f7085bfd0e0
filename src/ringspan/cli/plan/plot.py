"""A plan as two diagrams: time against the length of the sequence, and against the number of devices."""

from collections.abc import Sequence

from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.page.plan_curves import curves_by_devices, curves_by_length
from ringspan.planner.plan import Answer, Plan


def plot_plan(plan: Plan) -> str:
    """The SVG file."""
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
    """The SVG file of a sweep: time against length, a line for each cluster; or against devices for one length."""
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

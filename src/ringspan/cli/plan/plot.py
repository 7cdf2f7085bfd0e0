"""A plan as two diagrams: time against the length of the sequence, and against the number of devices."""

from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.page.plan_curves import curves_by_devices, curves_by_length
from ringspan.planner.plan import Plan


def plot_plan(plan: Plan) -> str:
    """The SVG file."""
    request = plan.request
    by_length = [Line(*curve) for curve in curves_by_length(plan)]
    charts = [Chart(f"{request.model.id}, {request.phase}", "tokens", "time", by_length, request.tokens)]
    by_devices = [Line(*curve) for curve in curves_by_devices(plan)]
    if by_devices:
        title = f"{request.tokens:,} tokens"
        charts.append(Chart(title, "devices", "time", by_devices, request.cluster.num_devices))
    return draw_charts(charts)

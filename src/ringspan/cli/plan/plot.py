"""A plan as two diagrams: time against the length of the sequence, and against the number of devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.errors import RingspanError
from ringspan.planner.plan import Answer, Plan, Request, Setup, predict
from ringspan.planner.plan.candidates import list_setups
from ringspan.planner.plan.request import MOST_TOKENS

HALVINGS = 6  # of the length, and as many doublings by twos
ALONE = "no context parallelism"
MOST_LINES = 4  # of a diagram: the fastest, and what there is without context parallelism


def plot_plan(plan: Plan) -> str:
    """The SVG file."""
    request = plan.request
    most = MOST_TOKENS - request.cached_tokens
    lengths = sorted({min(most, max(1, int(request.tokens * 2.0**k))) for k in range(-HALVINGS, 3)})
    by_length = [
        Line(name, [(length, predict(replace(request, tokens=length), setup).total_s) for length in lengths])
        for name, setup in _best_of_each(plan).items()
    ]
    nodes, per_node, device = request.cluster
    where = f"{nodes}x{per_node}x{device.id}, {request.software.name}"
    charts = [Chart(f"{request.model.id}, {request.phase} on {where}", "tokens", "time", by_length, request.tokens)]
    by_devices = _by_devices(plan)
    if by_devices:
        title = f"{request.model.id}, {request.phase} of {request.tokens:,} tokens on {device.id}"
        charts.append(Chart(title, "devices", "time", by_devices, request.cluster.num_devices))
    return draw_charts(charts)


def _best_of_each(plan: Plan) -> dict[str, Setup]:
    """The fastest option of every algorithm, in their order, and one group of devices without context parallelism."""
    best: dict[str, Setup] = {}
    for option in plan.options:
        if len(best) < MOST_LINES or _name(option.setup) == ALONE:
            best.setdefault(_name(option.setup), option.setup)
    best.setdefault(ALONE, Setup(DEFAULT_ALGORITHM, "contiguous", plan.best.setup.tp, 1, plan.best.setup.copies))
    return best


def _name(setup: Setup) -> str:
    return setup.algorithm.replace("_", "-") if setup.cp > 1 else ALONE


def _by_devices(plan: Plan) -> list[Line]:
    """The same tensor parallelism on fewer and more devices, every algorithm at its best."""
    times: dict[str, list[tuple[float, float]]] = {}
    for request in _other_clusters(plan.request):
        if request.cluster.num_devices % plan.best.setup.tp:
            continue
        setups, _ = list_setups(request, [plan.best.setup.tp])
        best: dict[str, float] = {}
        for setup in setups:
            seconds = predict(request, setup).total_s
            best[_name(setup)] = min(best.get(_name(setup), seconds), seconds)
        for name, seconds in best.items():
            times.setdefault(name, []).append((request.cluster.num_devices, seconds))
    shown = _best_of_each(plan)
    return [Line(name, points) for name, points in times.items() if len(points) > 1 and name in shown]


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


def _other_clusters(request: Request) -> Iterator[Request]:
    nodes, per_node, device = request.cluster
    sizes = sorted({max(1, int(nodes * per_node * 2.0**k)) for k in range(-4, 3)})
    for size in sizes:
        inside = min(per_node, size)
        if size % inside:
            continue
        cluster = request.cluster._replace(nodes=size // inside, per_node=inside, device=device)
        try:
            yield replace(request, cluster=cluster)
        except RingspanError:
            continue  # the tensor parallelism that was asked for does not divide so few devices

"""A plan as two diagrams: time against the length of the sequence, and against the number of devices."""

from collections.abc import Iterator
from dataclasses import replace

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.errors import RingspanError
from ringspan.planner.plan import Plan, Request, Setup, predict
from ringspan.planner.plan.candidates import list_setups
from ringspan.planner.plan.request import MOST_TOKENS

HALVINGS = 6  # of the length, and as many doublings by twos
ALONE = "no context parallelism"


def plot_plan(plan: Plan) -> str:
    """The SVG file."""
    request = plan.request
    most = MOST_TOKENS - request.cached_tokens
    lengths = sorted({min(most, max(1, int(request.tokens * 2.0**k))) for k in range(-HALVINGS, 3)})
    by_length = [
        Line(name, [(length, predict(replace(request, tokens=length), setup).total_s) for length in lengths])
        for name, setup in _best_of_each(plan).items()
    ]
    charts = [Chart(f"{request.model.id}, {request.phase}", "tokens", "time", by_length, request.tokens)]
    by_devices = _by_devices(plan)
    if by_devices:
        title = f"{request.tokens:,} tokens"
        charts.append(Chart(title, "devices", "time", by_devices, request.cluster.num_devices))
    return draw_charts(charts)


def _best_of_each(plan: Plan) -> dict[str, Setup]:
    """The fastest option of every algorithm, in their order, and one group of devices without context parallelism."""
    best: dict[str, Setup] = {}
    for option in plan.options:
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
    return [Line(name, points) for name, points in times.items() if len(points) > 1]


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

"""A plan as two diagrams: time against the length of the sequence, and against the number of devices."""

from collections.abc import Iterator
from dataclasses import replace

from ringspan.errors import RingspanError
from ringspan.plan import Option, Plan, Request, Setup, predict
from ringspan.plan.candidates import list_setups
from ringspan.report.svg import Chart, Line, draw_charts

MOST_LINES = 6
HALVINGS = 6  # of the length, and as many doublings by twos


def plot_plan(plan: Plan) -> str:
    """The SVG file."""
    request = plan.request
    chosen = list(_best_of_each(plan))
    lengths = sorted({max(1, int(request.tokens * 2.0**k)) for k in range(-HALVINGS, 3)})
    by_length = [
        Line(name, [(length, predict(replace(request, tokens=length), setup).total_s) for length in lengths])
        for name, setup in chosen
    ]
    alone = Setup("pass_kv", "contiguous", plan.best.setup.tp, 1, plan.best.setup.copies)
    if plan.best.setup.cp > 1:
        points = [(length, predict(replace(request, tokens=length), alone).total_s) for length in lengths]
        by_length.append(Line("no context parallelism", points))
    charts = [Chart(f"{request.model.id}, {request.phase}", "tokens", "time", by_length, request.tokens)]
    by_devices = _by_devices(plan)
    if by_devices:
        title = f"{request.tokens:,} tokens"
        charts.append(Chart(title, "devices", "time", by_devices, request.cluster.num_devices))
    return draw_charts(charts)


def _best_of_each(plan: Plan) -> Iterator[tuple[str, Setup]]:
    """The fastest option of every algorithm, in their order."""
    seen: dict[str, Option] = {}
    for option in plan.options:
        seen.setdefault(option.setup.algorithm, option)
    for name, option in list(seen.items())[:MOST_LINES]:
        yield name.replace("_", "-"), option.setup


def _by_devices(plan: Plan) -> list[Line]:
    """The same tensor parallelism on fewer and more devices, every algorithm at its best."""
    times: dict[str, list[tuple[float, float]]] = {}
    for request in _other_clusters(plan.request):
        if request.cluster.num_devices % plan.best.setup.tp:
            continue
        setups, _ = list_setups(request, [plan.best.setup.tp])
        best: dict[str, float] = {}
        for setup in setups:
            name = setup.algorithm.replace("_", "-") if setup.cp > 1 else "no context parallelism"
            best[name] = min(best.get(name, float("inf")), predict(request, setup).total_s)
        for name, seconds in best.items():
            times.setdefault(name, []).append((request.cluster.num_devices, seconds))
    return [Line(name, points) for name, points in times.items() if len(points) > 1][:MOST_LINES]


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

"""Time against the length of the sequence and against the number of devices, for the fastest algorithms of a plan."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.errors import RingspanError
from ringspan.planner.plan import Plan, Request, Setup, predict
from ringspan.planner.plan.candidates import list_setups
from ringspan.planner.plan.request import MOST_TOKENS

HALVINGS = 6  # of the length, and as many doublings by twos
ALONE = "no context parallelism"
MOST_CURVES = 4  # the fastest algorithms; the curve without context parallelism may be one more


class Curve(NamedTuple):
    """Seconds by a count."""

    name: str
    points: list[tuple[float, float]]


def curves_by_length(plan: Plan) -> list[Curve]:
    """The best way of the fastest algorithms at other lengths."""
    request = plan.request
    most = MOST_TOKENS - request.cached_tokens
    lengths = sorted({min(most, max(1, int(request.tokens * 2.0**k))) for k in range(-HALVINGS, 3)})
    return [
        Curve(name, [(length, predict(replace(request, tokens=length), setup).total_s) for length in lengths])
        for name, setup in _best_of_each(plan).items()
    ]


def curves_by_devices(plan: Plan) -> list[Curve]:
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
    return [Curve(name, points) for name, points in times.items() if len(points) > 1 and name in shown]


def _best_of_each(plan: Plan) -> dict[str, Setup]:
    """The fastest option of every algorithm, in their order, and one group of devices without context parallelism."""
    best: dict[str, Setup] = {}
    for option in plan.options:
        if len(best) < MOST_CURVES or _name(option.setup) == ALONE:
            best.setdefault(_name(option.setup), option.setup)
    best.setdefault(ALONE, Setup(DEFAULT_ALGORITHM, "contiguous", plan.best.setup.tp, 1, plan.best.setup.copies))
    return best


def _name(setup: Setup) -> str:
    return setup.algorithm.replace("_", "-") if setup.cp > 1 else ALONE


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

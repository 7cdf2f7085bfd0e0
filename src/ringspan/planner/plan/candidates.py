"""Which ways to split the work are there, and which are not possible, and why?"""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.algorithms.ulysses import check_heads
from ringspan.errors import UnsupportedError
from ringspan.planner.plan.request import Request, Setup, legal_tps
from ringspan.schedule import Heads

LAYOUTS = ("zigzag", "striped", "contiguous")
MANY_RANKS = 2048  # beyond, only what all ranks do alike is run, and in steps of neighbours


class Illegal(NamedTuple):
    """A way that cannot be gone."""

    what: str
    reason: str


def list_setups(request: Request, tps: list[int]) -> tuple[list[Setup], list[Illegal]]:
    """All legal setups that use every device, and what none of them is, with the reason."""
    setups: list[Setup] = []
    illegal: dict[str, str] = {}
    for tp in tps:
        ranks = request.cluster.num_devices // tp
        for copies in _divisors(request.batch):
            if ranks % copies:
                continue
            found = _of_ranks(request, tp, ranks // copies, illegal)
            setups += [setup._replace(copies=copies) for setup in found]
    legal = {setup.algorithm.replace("_", "-") for setup in setups}
    return setups, [Illegal(what, reason) for what, reason in illegal.items() if what not in legal]


def usual_tps(request: Request) -> list[int]:
    """The one asked for, or all within a node."""
    if request.tp is not None:
        return [request.tp]
    legal = legal_tps(request.model, request.cluster)
    return [tp for tp in legal if tp <= request.cluster.per_node]


def _of_ranks(request: Request, tp: int, cp: int, illegal: dict[str, str]) -> Iterator[Setup]:
    if cp == 1:
        yield Setup("pass_kv", "contiguous", tp, 1)
        return
    if request.phase == "decode":
        yield from (Setup(name, "striped", tp, cp) for name in ("all_merge", "pass_q"))
        return
    layouts: tuple[str, ...] = LAYOUTS if request.model.is_causal else ("contiguous",)
    names: tuple[str, ...] = ("pass_kv", "pass_q", "all_gather")
    if cp > MANY_RANKS:
        layouts, names = layouts[:2], names[:2]
        illegal["all-gather"] = f"not planned beyond {MANY_RANKS:,} ranks: as many blocks of K and V on every device"
    for layout in layouts:
        for name in names:
            yield Setup(name, layout, tp, cp)
        if not (layout == "contiguous" and request.model.is_causal):
            inner = max(1, request.cluster.per_node // tp)
            if 1 < inner < cp and cp % inner == 0:
                yield Setup("double_ring", layout, tp, cp, inner=inner)
    if request.cluster.nodes == 1 or cp <= request.cluster.per_node // tp:
        illegal["double-ring"] = "all ranks are in one node; a ring between nodes needs two nodes"
    yield from _with_heads(request, tp, cp, layouts, illegal)


def _with_heads(
    request: Request, tp: int, cp: int, layouts: tuple[str, ...], illegal: dict[str, str]
) -> Iterator[Setup]:
    heads = Heads(request.model.num_heads // tp, max(1, request.model.num_kv_heads // tp))
    if request.model.latent is not None:
        illegal["ulysses, hybrid"] = "latent K and V are one vector for all heads and cannot be split by heads"
        return
    for degree in _divisors(cp)[1:]:
        name = f"ulysses {degree}" if degree == cp else f"hybrid {cp // degree}×{degree}"
        try:
            check_heads(heads, degree)
        except UnsupportedError as error:
            if degree <= 64 or degree == cp:
                illegal[f"{name} (tp {tp})" if tp > 1 else name] = str(error)
            continue
        if degree == cp:
            yield Setup("ulysses", "contiguous", tp, cp, inner=degree)
        else:
            yield from (Setup("hybrid", layout, tp, cp, inner=degree) for layout in layouts)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 2**20) + 1) if number % n == 0]

"""Which setups are possible, and why are the others impossible?"""

from collections.abc import Iterator
from typing import NamedTuple

from ringspan.algorithms import ALGORITHMS, BY_QUERY, Algorithm
from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.algorithms.ulysses import check_heads
from ringspan.errors import UnsupportedError
from ringspan.planner.plan.passes import shard_of
from ringspan.planner.plan.request import Request, Setup, legal_tps
from ringspan.planner.timeline import check_priced
from ringspan.schedule import Heads

LAYOUTS = ("zigzag", "striped", "contiguous")
MANY_RANKS = 2048  # beyond, only what all ranks do alike is run, and in steps of neighbours


class Illegal(NamedTuple):
    """An impossible setup, with the reason."""

    what: str
    reason: str


def list_setups(request: Request, tps: list[int]) -> tuple[list[Setup], list[Illegal]]:
    """All legal setups that use every device, and the illegal ones with their reasons."""
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
    """The requested tensor parallelism, or all that fit into a node."""
    if request.tp is not None:
        return [request.tp]
    legal = legal_tps(request.model, request.cluster)
    return [tp for tp in legal if tp <= request.cluster.per_node]


def _of_ranks(request: Request, tp: int, cp: int, illegal: dict[str, str]) -> Iterator[Setup]:
    if cp == 1:
        yield Setup(DEFAULT_ALGORITHM, "contiguous", tp, 1)
        return
    if request.phase == "decode":
        yield from (Setup(record.name, "striped", tp, cp) for record in BY_QUERY.values())
        return
    layouts: tuple[str, ...] = LAYOUTS if request.model.is_causal else ("contiguous",)
    if cp > MANY_RANKS:
        layouts = layouts[:2]
    planned = list(_planned(request, tp, cp, illegal))
    for layout in layouts:
        yield from _of_layout(request, tp, cp, layout, planned)
    if request.cluster.nodes == 1 or cp <= request.cluster.per_node // tp:
        for record in planned:
            if _is_nested(record):
                illegal[_spell(record)] = "all ranks are in one node; a ring between nodes needs two nodes"
    yield from _with_heads(request, tp, cp, layouts, [one for one in planned if "heads" in one.options], illegal)


def _planned(request: Request, tp: int, cp: int, illegal: dict[str, str]) -> Iterator[Algorithm]:
    """The algorithms that can be priced for so many ranks."""
    has = request.software.algorithms
    for record in ALGORITHMS.values():
        if has and record.name not in has:
            illegal[_spell(record)] = f"{request.software.name} has none"
            continue
        if record.most_ranks is not None and cp > record.most_ranks:
            illegal[_spell(record)] = f"not planned beyond {record.most_ranks:,} ranks: its buffers grow with the group"
            continue
        try:
            check_priced(record, cp, shard_of(request, Setup(record.name, "contiguous", tp, cp)))
        except UnsupportedError as error:
            illegal[f"{_spell(record)} over {cp} ranks"] = str(error)
            continue
        yield record


def _of_layout(request: Request, tp: int, cp: int, layout: str, records: list[Algorithm]) -> Iterator[Setup]:
    """Algorithms that leave heads whole: on ranks in one dimension, or in nodes of all the ranks that a node holds."""
    for record in records:
        if not record.options & {"heads", "mesh"}:
            yield Setup(record.name, layout, tp, cp)
    inner = max(1, request.cluster.per_node // tp)
    is_uneven = layout == "contiguous" and request.model.is_causal
    if is_uneven or not 1 < inner < cp or cp % inner:
        return
    yield from (Setup(record.name, layout, tp, cp, inner=inner) for record in records if _is_nested(record))


def _is_nested(record: Algorithm) -> bool:
    """Whether its mesh is nodes of ranks, rather than groups that exchange heads."""
    return "mesh" in record.options and "heads" not in record.options


def _with_heads(
    request: Request, tp: int, cp: int, layouts: tuple[str, ...], records: list[Algorithm], illegal: dict[str, str]
) -> Iterator[Setup]:
    """Without a mesh all ranks exchange heads; with one, groups of every size do."""
    heads = Heads(request.model.num_heads // tp, max(1, request.model.num_kv_heads // tp))
    if request.model.latent is not None:
        reason = "latent K and V are one vector for all heads and cannot be split by heads"
        illegal[", ".join(map(_spell, records))] = reason
        return
    for degree in _divisors(cp)[1:]:
        for record in records:
            has_mesh = "mesh" in record.options
            if has_mesh == (degree == cp):
                continue
            name = f"{_spell(record)} {cp // degree}×{degree}" if has_mesh else f"{_spell(record)} {degree}"
            try:
                check_heads(heads, degree)
            except UnsupportedError as error:
                if degree <= 64 or degree == cp:
                    illegal[f"{name} (tp {tp})" if tp > 1 else name] = str(error)
                continue
            for layout in layouts if has_mesh else ("contiguous",):
                yield Setup(record.name, layout, tp, cp, inner=degree)


def _spell(record: Algorithm) -> str:
    return record.name.replace("_", "-")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, min(number, 2**20) + 1) if number % n == 0]

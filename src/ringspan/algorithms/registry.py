"""Algorithms: pure functions from what sees what to a Schedule. One file each; `build_schedule` finds them by name."""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple, get_args

from ringspan.algorithms.all_gather import build_all_gather
from ringspan.algorithms.decode import Query, build_decode
from ringspan.algorithms.double_ring import build_double_ring
from ringspan.algorithms.hybrid import build_hybrid
from ringspan.algorithms.mesh import Mesh, as_mesh
from ringspan.algorithms.pass_kv import build_pass_kv
from ringspan.algorithms.pass_q import build_pass_q
from ringspan.algorithms.ring import Direction, Side
from ringspan.algorithms.ulysses import build_ulysses
from ringspan.errors import UnsupportedError
from ringspan.schedule import Heads, Route, Schedule, Visible

__all__ = [
    "ALGORITHMS",
    "Direction",
    "Mesh",
    "Query",
    "Side",
    "as_mesh",
    "build_decode",
    "build_schedule",
    "check_algorithm",
]


class Algorithm(NamedTuple):
    """A builder and the options it takes beside `visible` and `backward`."""

    build: Callable[..., Schedule]
    options: frozenset[str] = frozenset()


ALGORITHMS = {
    "pass_kv": Algorithm(build_pass_kv, frozenset({"direction", "route"})),
    "pass_q": Algorithm(build_pass_q, frozenset({"direction", "route"})),
    "all_gather": Algorithm(build_all_gather),
    "ulysses": Algorithm(build_ulysses, frozenset({"heads"})),
    "hybrid": Algorithm(build_hybrid, frozenset({"heads", "mesh", "direction"})),
    "double_ring": Algorithm(build_double_ring, frozenset({"mesh", "route"})),
}


def check_algorithm(algorithm: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not among the choices; the command line also takes `-` for `_`."""
    choices = list(choices)
    if algorithm in choices:
        return
    spelled = algorithm.lower().replace("-", "_") if isinstance(algorithm, str) else None
    way_out = f'write "{spelled}"' if spelled in choices else f"use one of {', '.join(choices)}"
    raise UnsupportedError(f"algorithm={algorithm!r}: there is no such algorithm; {way_out}")


def build_schedule(
    algorithm: str,
    visible: Visible,
    *,
    heads: tuple[int, int] | None = None,
    mesh: tuple[int, int] | None = None,
    direction: Direction | None = None,
    backward: Side | None = None,
    route: Route = "follow",
) -> Schedule:
    """The schedule of an algorithm by name, forward or, with the side that is to travel, backward.

    `route` is how gradients get home round a ring; where there is no ring they go straight.
    `heads` (query heads, KV heads) is needed where heads are exchanged; `mesh` and `direction` are refused where the
    algorithm has no use for them.
    """
    check_algorithm(algorithm, ALGORITHMS)
    if backward not in (None, "kv", "q"):
        raise UnsupportedError(f'backward={backward!r}: the side that travels is "kv" or "q"; None builds the forward')
    if route not in get_args(Route):
        raise UnsupportedError(f"route={route!r}: gradients get home by one of {', '.join(get_args(Route))}")
    takes = ALGORITHMS[algorithm].options
    for name, value in (("mesh", mesh), ("direction", direction)):
        if value is not None and name not in takes:
            users = [other for other, (_, options) in ALGORITHMS.items() if name in options]
            raise UnsupportedError(
                f"{name}={value!r}: {algorithm} takes no {name}; leave it out, or use {', '.join(users)}"
            )
    if mesh is None and "mesh" in takes:
        raise UnsupportedError(
            f"mesh=None: {algorithm} runs on ranks in two dimensions; give mesh=(outer, inner) with "
            f"outer × inner = {visible.world_size}"
        )
    if heads is None and "heads" in takes:
        raise UnsupportedError(f"heads=None: {algorithm} exchanges heads; give heads=(query heads, KV heads)")
    return _build(algorithm, visible, heads and Heads(*heads), as_mesh(mesh), direction, backward, route)


@lru_cache(maxsize=256)
def _build(
    algorithm: str,
    visible: Visible,
    heads: Heads | None,
    mesh: Mesh | None,
    direction: Direction | None,
    backward: Side | None,
    route: Route,
) -> Schedule:
    build, takes = ALGORITHMS[algorithm]
    given = {"heads": heads, "mesh": mesh, "direction": direction, "route": route}
    options = {name: value for name, value in given.items() if name in takes and value is not None}
    return build(visible, **options, backward=backward)

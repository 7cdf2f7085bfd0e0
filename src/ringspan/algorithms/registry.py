"""Which algorithms are there, and which schedule does a name stand for?

`ALGORITHMS` has those of the package, in the order of reports, and behind them those that `register` added.
"""

import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, get_args

from ringspan.algorithms.all_gather import ALL_GATHER
from ringspan.algorithms.decode import ALL_MERGE
from ringspan.algorithms.double_ring import DOUBLE_RING
from ringspan.algorithms.hybrid import HYBRID
from ringspan.algorithms.mesh import Mesh, as_mesh
from ringspan.algorithms.pass_kv import PASS_KV
from ringspan.algorithms.pass_q import PASS_Q
from ringspan.algorithms.record import Algorithm
from ringspan.algorithms.ring import Direction, Side
from ringspan.algorithms.ulysses import ULYSSES
from ringspan.arguments import TEXT, WHOLE, Kind, check_arguments, list_of, optional
from ringspan.errors import UnsupportedError
from ringspan.schedule import Heads, Route, Schedule, Visible
from ringspan.schedule.visible import A_VISIBLE

BUILT_IN = (PASS_KV, PASS_Q, ALL_GATHER, ULYSSES, HYBRID, DOUBLE_RING)
OPTIONS = frozenset({"direction", "heads", "mesh", "route"})
ENTRY_POINTS = "ringspan.algorithms"
_RESERVED = {"auto", "one_shot", ALL_MERGE.name}

_records = {record.name: record for record in BUILT_IN}
_ever = dict(_records)  # prepared programs are cached by name, so a name means one record for the whole process
ALGORITHMS = MappingProxyType(_records)


def register(record: Algorithm) -> None:
    """Add an algorithm to every call, command and report that takes one by name.

    Every rank of a group must register the same record. The command line registers the entry points of the group
    `ringspan.algorithms` when it starts.

    Raises:
        UnsupportedError: `record` is not an Algorithm, its name is taken or bad, or `build` does not take its options.
    """
    _check_record(record)
    _ever[record.name] = record
    _records[record.name] = record


def unregister(name: str) -> None:
    """Undo `register`. The name stays bound to its record, because programs prepared for it are cached."""
    check_arguments(name=(TEXT, name))
    if name in {record.name for record in BUILT_IN}:
        raise UnsupportedError(
            "an algorithm of the package stays", argument="name", value=name, remedy="name one that you registered"
        )
    find_algorithm(name)
    del _records[name]


_HEADS = Kind(
    "two whole numbers",
    "give (query heads, KV heads)",
    lambda value: list_of(WHOLE).holds(value) and len(value) == 2,
)


def register_entry_points() -> None:
    """Register the algorithms that installed packages offer as entry points."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            record = point.load()
        except Exception as error:
            raise _in_entry_point(point.value, f"{type(error).__name__}: {error}") from error
        if ALGORITHMS.get(getattr(record, "name", "")) is record:
            continue
        try:
            register(record)
        except UnsupportedError as error:
            raise _in_entry_point(point.value, str(error)) from error


def find_algorithm(name: str) -> Algorithm:
    """The record of a name; `all_merge`, which only decode uses, has one too."""
    check_arguments(name=(TEXT, name))
    if name == ALL_MERGE.name:
        return ALL_MERGE
    check_algorithm(name, ALGORITHMS)
    return ALGORITHMS[name]


def list_takers(option: str) -> list[str]:
    """The names of the algorithms that take an option."""
    check_arguments(option=(TEXT, option))
    return [record.name for record in ALGORITHMS.values() if option in record.options]


def check_algorithm(algorithm: str, choices: Iterable[str]) -> None:
    """Refuse a name that is not among the choices; the command line also takes `-` for `_`."""
    choices = list(choices)
    if isinstance(algorithm, str) and algorithm in choices:
        return
    spelled = algorithm.lower().replace("-", "_") if isinstance(algorithm, str) else None
    way_out = f'write "{spelled}"' if spelled in choices else f"use one of {', '.join(choices)}"
    raise UnsupportedError("there is no such algorithm", argument="algorithm", value=algorithm, remedy=way_out)


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
    check_arguments(
        algorithm=(TEXT, algorithm),
        visible=(A_VISIBLE, visible),
        heads=(optional(_HEADS), heads),
        direction=(optional(TEXT), direction),
        backward=(optional(TEXT), backward),
        route=(TEXT, route),
    )
    check_algorithm(algorithm, ALGORITHMS)
    if backward not in (None, "kv", "q"):
        raise UnsupportedError(
            'the side that travels is "kv" or "q"; None builds the forward', argument="backward", value=backward
        )
    if route not in get_args(Route):
        raise UnsupportedError(
            f"gradients get home by one of {', '.join(get_args(Route))}", argument="route", value=route
        )
    record = ALGORITHMS[algorithm]
    takes = record.options
    for name, value in (("mesh", mesh), ("direction", direction)):
        if value is not None and name not in takes:
            raise UnsupportedError(
                f"{algorithm} takes no {name}",
                argument=name,
                value=value,
                remedy=f"leave it out, or use {', '.join(list_takers(name))}",
            )
    if mesh is None and "mesh" in takes:
        raise UnsupportedError(
            f"{algorithm} runs on ranks in two dimensions",
            argument="mesh",
            value=None,
            remedy=f"give mesh=(outer, inner) with outer × inner = {visible.world_size}",
        )
    if heads is None and "heads" in takes:
        raise UnsupportedError(
            f"{algorithm} exchanges heads", argument="heads", value=None, remedy="give heads=(query heads, KV heads)"
        )
    return _build(record, visible, heads and Heads(*heads), as_mesh(mesh), direction, backward, route)


@lru_cache(maxsize=256)
def _build(
    record: Algorithm,
    visible: Visible,
    heads: Heads | None,
    mesh: Mesh | None,
    direction: Direction | None,
    backward: Side | None,
    route: Route,
) -> Schedule:
    given = {"heads": heads, "mesh": mesh, "direction": direction, "route": route}
    options = {name: value for name, value in given.items() if name in record.options and value is not None}
    schedule = record.build(visible, **options, backward=backward)
    if not isinstance(schedule, Schedule):
        raise UnsupportedError(f"{record.name}: build returned {type(schedule).__name__}", remedy="return a Schedule")
    return schedule


def _check_record(record: Algorithm) -> None:
    """Refuse what would fail later, at the first call or in a report."""
    if not isinstance(record, Algorithm):
        raise _refusal("record", type(record).__name__, "expected a ringspan.algorithms.Algorithm", "make one")
    name = record.name
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise _refusal("name", name, "a name is lower-case letters, digits and underscores", 'such as "pair_ring"')
    if name in _RESERVED or name in _records:
        raise _refusal("name", name, "the name is taken", "choose another one")
    if _ever.get(name, record) != record:
        raise _refusal("name", name, "the name stood for another record in this process", "choose another one")
    for field in ("label", "idea"):
        value = getattr(record, field)
        if not isinstance(value, str) or not value.strip():
            raise _refusal(field, value, "reports print it", "give a non-empty string")
    for field in ("build", "buffer_bytes", *([] if record.loads is None else ["loads"])):
        if not callable(getattr(record, field)):
            raise _refusal(field, getattr(record, field), "must be callable", "give a function")
    if not isinstance(record.options, frozenset) or not record.options <= OPTIONS:
        known = f"give a frozenset of {', '.join(sorted(OPTIONS))}"
        raise _refusal("options", record.options, "an option is not known, or the value is not a frozenset", known)
    _check_signature(record)


def _check_signature(record: Algorithm) -> None:
    takes = inspect.signature(record.build).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        return
    missing = sorted({"backward", *record.options} - set(takes))
    if missing:
        rule = f"build has no parameter {', '.join(missing)}"
        raise _refusal("build", record.build, rule, "define build(visible, *, backward=None, ...) with all its options")


def _refusal(argument: str, value: Any, rule: str, remedy: str) -> UnsupportedError:
    return UnsupportedError(rule, argument=argument, value=value, remedy=remedy)


def _in_entry_point(value: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"entry point {value} of group {ENTRY_POINTS}: {why}", remedy="mend or uninstall the package that offers it"
    )

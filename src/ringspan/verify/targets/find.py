"""Which target does a name or an object stand for?"""

from collections.abc import Collection, Mapping
from typing import Any

from ringspan.errors import UnsupportedError
from ringspan.verify.targets.base import FunctionTarget, RanksAs, Target, load_object
from ringspan.verify.targets.peers import PEERS, load_peer
from ringspan.verify.targets.ringspan import RingspanTarget


def find_target(
    target: Any,
    *,
    features: Collection[str] | None = None,
    layouts: Collection[str] | None = None,
    ranks: RanksAs | None = None,
) -> Target:
    """A target from a Target or its class, a function, the name of a library, or `module:name`.

    Raises:
        UnsupportedError: there is no such target, or it is not a function and an option of functions was given.
    """
    path, given = None, {"features": features, "layouts": layouts, "ranks": ranks}
    if isinstance(target, str):
        if target == "ringspan" or target.startswith("ringspan:"):
            _refuse_options(given)
            return RingspanTarget(target.partition(":")[2] or None)
        if target in PEERS:
            _refuse_options(given)
            return load_peer(target)
        if ":" not in target:
            raise UnsupportedError(
                f"a target is module:function, module:TargetClass, or one of ringspan, {', '.join(PEERS)}",
                argument="target",
                value=target,
            )
        path, target = target, load_object(target)
    if isinstance(target, type) and issubclass(target, Target):
        target = target()
    if isinstance(target, Target):
        _refuse_options(given)
        return target
    if not callable(target):
        raise UnsupportedError("a target is a function or a Target", argument="target", value=target)
    return FunctionTarget(
        target, name=path, features=features, layouts=layouts or ("contiguous",), ranks=ranks or "threads"
    )


def _refuse_options(given: Mapping[str, object]) -> None:
    """Refuse options that describe a function; a Target states its own."""
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                "this describes a function; the target states its own",
                argument=name,
                value=value,
                remedy="leave it out",
            )

"""Which target does a name or an object stand for?"""

from collections.abc import Collection, Mapping
from typing import Any, get_args

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.verify.cases import LAYOUTS
from ringspan.verify.targets.base import FunctionTarget, RanksAs, Target, check_features, load_object
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
        module, _, name = target.partition(":")
        if not module or not name:
            raise UnsupportedError(
                f"a target is module:function, module:TargetClass, or one of ringspan, {', '.join(PEERS)}",
                argument="target",
                value=target,
            )
        path, target = target, load_object(target)
    if isinstance(target, type) and issubclass(target, Target):
        target = _make(target)
    if isinstance(target, Target):
        _refuse_options(given)
        return _checked(target)
    if not callable(target):
        raise UnsupportedError("a target is a function or a Target", argument="target", value=target)
    return _checked(
        FunctionTarget(
            target,
            name=path,
            features=features,
            layouts=("contiguous",) if layouts is None else layouts,
            ranks=ranks or "threads",
        )
    )


def _make(kind: type[Target]) -> Target:
    try:
        return kind()
    except Exception as error:
        raise UnsupportedError(
            f"the class cannot be called without arguments: {type(error).__name__}: {error}",
            argument="target",
            value=kind.__qualname__,
            remedy="give an instance, or defaults to its arguments",
        ) from error


def _checked(target: Target) -> Target:
    """The target, if its attributes are among the choices."""
    prefix = "" if isinstance(target, FunctionTarget) else f"{type(target).__name__}."
    check_features(target.features, f"{prefix}features")
    if not target.layouts or not set(target.layouts) <= set(LAYOUTS):
        raise ShapeError(
            f"a target is sharded in some of {', '.join(LAYOUTS)}", argument=f"{prefix}layouts", value=target.layouts
        )
    if target.ranks not in get_args(RanksAs):
        raise ShapeError("ranks are threads or processes", argument=f"{prefix}ranks", value=target.ranks)
    return target


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

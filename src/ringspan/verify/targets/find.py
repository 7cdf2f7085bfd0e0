"""Which target does a name or an object stand for?"""

from collections.abc import Collection
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
    """A target from a Target or its class, a function, the name of a library, or `module:name`."""
    path = None
    if isinstance(target, str):
        if target == "ringspan" or target.startswith("ringspan:"):
            return RingspanTarget(target.partition(":")[2] or None)
        if target in PEERS:
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
        return target
    if not callable(target):
        raise UnsupportedError("a target is a function or a Target", argument="target", value=target)
    return FunctionTarget(
        target, name=path, features=features, layouts=layouts or ("contiguous",), ranks=ranks or "threads"
    )

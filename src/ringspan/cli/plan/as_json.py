"""A plan as plain data: what `ringspan plan --json` prints. Seconds, bytes and tokens, no formatting."""

from dataclasses import fields, is_dataclass
from typing import Any

from ringspan.planner.plan import Option, Plan


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything, options in their order."""
    request = plan.request
    model = as_plain(request.model) | {"counted_parameters": request.model.counted_parameters}
    return {
        **as_plain(plan),
        "request": as_plain(request) | {"model": model},
        "options": [_option(option) for option in plan.options],
    }


def _option(option: Option) -> dict[str, Any]:
    return {
        **as_plain(option.prediction),
        "bottleneck": option.prediction.bottleneck,
        "memory_bytes": {**as_plain(option.memory), "total": option.memory.total},
        "fits": option.fits,
    }


def as_plain(value: Any) -> Any:
    """Dataclasses and named tuples by the names of their fields, all the way down."""
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: as_plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [as_plain(item) for item in value]
    return value

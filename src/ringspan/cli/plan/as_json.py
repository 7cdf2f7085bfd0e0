"""A plan as plain data: what `ringspan plan --json` prints. Seconds, bytes and tokens, no formatting."""

from dataclasses import fields, is_dataclass
from typing import Any

from ringspan.planner.plan import Option, Plan


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything, options in their order."""
    request = plan.request
    model = as_plain(request.model) | {"counted_parameters": request.model.counted_parameters}
    return {
        **{name: value for name, value in as_plain(plan).items() if name not in ("options", "tied")},
        "request": as_plain(request) | {"model": model},
        "options": [option_as_json(option) for option in plan.options],
        "tied": [as_plain(option.setup) for option in plan.tied],
    }


def option_as_json(option: Option) -> dict[str, Any]:
    """One way."""
    return {
        **as_plain(option.prediction),
        "total_s": option.prediction.total_s,
        "low_s": option.low_s,
        "high_s": option.high_s,
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

"""A plan as plain data: what `ringspan plan --json` prints. Seconds, bytes and tokens, no formatting."""

from dataclasses import asdict
from typing import Any

from ringspan.plan import Option, Plan


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """Everything, options in their order."""
    request = plan.request
    return {
        "model": asdict(request.model) | {"counted_parameters": request.model.counted_parameters},
        "devices": {
            "nodes": request.cluster.nodes,
            "per_node": request.cluster.per_node,
            "device": asdict(request.cluster.device)
            | {key: getattr(request.cluster.device, key)._asdict() for key in ("attention", "near", "far")},
        },
        "work": {
            "phase": request.phase,
            "tokens": request.tokens,
            "cached_tokens": request.cached_tokens,
            "batch": request.batch,
            "wire": request.wire,
            "weights": request.weights,
        },
        "time_range": {"low": plan.low, "high": plan.high},
        "options": [_option(option) for option in plan.options],
        "illegal": [item._asdict() for item in plan.illegal],
        "longest_tokens": plan.longest_tokens,
        "break_even_tokens": plan.break_even_tokens,
        "crossing": None if plan.crossing is None else plan.crossing._asdict(),
        "settings": [recipe._asdict() for recipe in plan.recipes],
        "explanation": [line._asdict() for line in plan.explanation],
    }


def _option(option: Option) -> dict[str, Any]:
    prediction = asdict(option.prediction)
    prediction["setup"] = option.setup._asdict()
    return {
        **prediction,
        "bottleneck": option.prediction.bottleneck,
        "memory_bytes": {**option.memory._asdict(), "total": option.memory.total},
        "fits": option.fits,
    }

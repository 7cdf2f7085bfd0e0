"""Ringspan: exact attention over sequences longer than one device can hold.

Masks and layouts say who sees whom and who holds what; `simulate_attention` runs any algorithm on NumPy arrays in one
process, `attention` on the ranks of a group. Only what needs torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ringspan import algorithms, schedule
from ringspan.algorithms import Mesh
from ringspan.algorithms.choose import RingMachine
from ringspan.errors import (
    CacheError,
    LayoutError,
    MaskError,
    RingspanError,
    ScheduleError,
    ShapeError,
    TransportError,
    UnsupportedError,
)
from ringspan.layout import Layout, Work, balanced, contiguous, striped, zigzag
from ringspan.mask import (
    Coverage,
    Mask,
    blocks,
    causal,
    chunks,
    documents,
    frame_causal,
    full,
    per_row,
    prefix,
    sliding_window,
)
from ringspan.program.reproducible.tree import TILE
from ringspan.schedule import Heads, Schedule, Visible
from ringspan.simulate import (
    Gradients,
    RankStep,
    Simulation,
    ring_attention_context_parallel,
    ring_attention_simulate,
    simulate_attention,
)
from ringspan.span import Span

if TYPE_CHECKING:
    from ringspan import adapters, compat, reproducible, verify
    from ringspan.cache import KVCache, Turn
    from ringspan.compat.torch_context_parallel import context_parallel, context_parallel_unshard, set_rotate_method
    from ringspan.planner.plan import plan
    from ringspan.runtime.api import attention
    from ringspan.runtime.calibrate import measure_machine, use_machine
    from ringspan.runtime.engine import Attention
    from ringspan.training import (
        check_positions,
        cross_rank_mean_loss,
        gather,
        next_token_labels,
        position_ids,
        shard,
        shard_batch,
    )
    from ringspan.transports.in_process import run_in_process

__version__ = "0.1.0.dev0"

_NEED_TORCH = {
    "Attention": "ringspan.runtime.engine",
    "KVCache": "ringspan.cache",
    "Turn": "ringspan.cache",
    "attention": "ringspan.runtime.api",
    "check_positions": "ringspan.training",
    "context_parallel": "ringspan.compat.torch_context_parallel",
    "context_parallel_unshard": "ringspan.compat.torch_context_parallel",
    "cross_rank_mean_loss": "ringspan.training",
    "gather": "ringspan.training",
    "measure_machine": "ringspan.runtime.calibrate",
    "next_token_labels": "ringspan.training",
    "position_ids": "ringspan.training",
    "reproducible": "ringspan.reproducible",
    "run_in_process": "ringspan.transports.in_process",
    "set_rotate_method": "ringspan.compat.torch_context_parallel",
    "shard": "ringspan.training",
    "shard_batch": "ringspan.training",
    "use_machine": "ringspan.runtime.calibrate",
    "verify": "ringspan.verify",
}

__all__ = [
    "TILE",
    "Attention",
    "CacheError",
    "Coverage",
    "Gradients",
    "Heads",
    "KVCache",
    "Layout",
    "LayoutError",
    "Mask",
    "MaskError",
    "Mesh",
    "RankStep",
    "RingMachine",
    "RingspanError",
    "Schedule",
    "ScheduleError",
    "ShapeError",
    "Simulation",
    "Span",
    "TransportError",
    "Turn",
    "UnsupportedError",
    "Visible",
    "Work",
    "__version__",
    "adapters",
    "algorithms",
    "attention",
    "balanced",
    "blocks",
    "causal",
    "check_positions",
    "chunks",
    "compat",
    "context_parallel",
    "context_parallel_unshard",
    "contiguous",
    "cross_rank_mean_loss",
    "documents",
    "frame_causal",
    "full",
    "gather",
    "measure_machine",
    "next_token_labels",
    "per_row",
    "plan",
    "position_ids",
    "prefix",
    "reproducible",
    "ring_attention_context_parallel",
    "ring_attention_simulate",
    "run_in_process",
    "schedule",
    "set_rotate_method",
    "shard",
    "shard_batch",
    "simulate_attention",
    "sliding_window",
    "striped",
    "use_machine",
    "verify",
    "zigzag",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name in ("adapters", "compat"):
        return import_module(f"ringspan.{name}")
    if name == "plan":
        return import_module("ringspan.planner.plan").plan
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'ringspan' has no attribute {name!r}")
    try:
        module = import_module(_NEED_TORCH[name])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"ringspan.{name} needs torch; install it, for example from a checkout with: pip install '.[torch]'"
        ) from None
    value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value  # looked up once, not at every call
    return value

"""Ringspan: exact attention over sequences longer than one device can hold.

Masks and layouts say who sees whom and who holds what; `simulate_attention` runs any algorithm on NumPy arrays in one
process, `attention` on the ranks of a group. Only what needs torch is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ringspan.algorithms import Mesh, build_decode, build_schedule
from ringspan.balance import balanced
from ringspan.errors import (
    LayoutError,
    MaskError,
    RingspanError,
    ScheduleError,
    ShapeError,
    TransportError,
    UnsupportedError,
)
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import Coverage, Mask, causal, documents, frame_causal, full, per_row, prefix, sliding_window
from ringspan.schedule import Heads, Schedule, Visible, format_schedule, parse_schedule, validate, visible_blocks
from ringspan.simulate import Gradients, RankStep, Simulation, simulate_attention
from ringspan.span import Span
from ringspan.teaching import ring_attention_context_parallel, ring_attention_simulate
from ringspan.work import Work

if TYPE_CHECKING:
    from ringspan.attend import Attention
    from ringspan.call import attention
    from ringspan.collectives import gather, shard
    from ringspan.training import cross_rank_mean_loss, next_token_labels, position_ids, shard_batch
    from ringspan.transports.in_process import run_in_process

__version__ = "0.1.0.dev0"

_NEED_TORCH = {
    "Attention": "ringspan.attend",
    "attention": "ringspan.call",
    "cross_rank_mean_loss": "ringspan.training",
    "gather": "ringspan.collectives",
    "next_token_labels": "ringspan.training",
    "position_ids": "ringspan.training",
    "run_in_process": "ringspan.transports.in_process",
    "shard": "ringspan.collectives",
    "shard_batch": "ringspan.training",
}

__all__ = [
    "Attention",
    "Coverage",
    "Gradients",
    "Heads",
    "Layout",
    "LayoutError",
    "Mask",
    "MaskError",
    "Mesh",
    "RankStep",
    "RingspanError",
    "Schedule",
    "ScheduleError",
    "ShapeError",
    "Simulation",
    "Span",
    "TransportError",
    "UnsupportedError",
    "Visible",
    "Work",
    "__version__",
    "attention",
    "balanced",
    "build_decode",
    "build_schedule",
    "causal",
    "contiguous",
    "cross_rank_mean_loss",
    "documents",
    "format_schedule",
    "frame_causal",
    "full",
    "gather",
    "next_token_labels",
    "parse_schedule",
    "per_row",
    "position_ids",
    "prefix",
    "ring_attention_context_parallel",
    "ring_attention_simulate",
    "run_in_process",
    "shard",
    "shard_batch",
    "simulate_attention",
    "sliding_window",
    "striped",
    "validate",
    "visible_blocks",
    "zigzag",
]


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'ringspan' has no attribute {name!r}")
    try:
        value = getattr(import_module(_NEED_TORCH[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"ringspan.{name} needs torch; install it, for example with: pip install 'ringspan[torch]'"
        ) from None
    globals()[name] = value  # looked up once, not at every call
    return value

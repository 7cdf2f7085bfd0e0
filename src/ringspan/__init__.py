"""Ringspan: exact attention over sequences longer than one device can hold.

Masks and layouts say who sees whom and who holds what; `simulate_attention` runs any algorithm on NumPy arrays in one
process. What is imported here needs no torch.
"""

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
from ringspan.layout import Layout, Work, contiguous, striped, zigzag
from ringspan.mask import Coverage, Mask, causal, documents, frame_causal, full, per_row, prefix, sliding_window
from ringspan.schedule import Heads, Schedule, Visible, format_schedule, parse_schedule, validate, visible_blocks
from ringspan.simulate import Gradients, RankStep, Simulation, simulate_attention
from ringspan.span import Span
from ringspan.teaching import ring_attention_context_parallel, ring_attention_simulate

__version__ = "0.1.0.dev0"

__all__ = [
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
    "balanced",
    "build_decode",
    "build_schedule",
    "causal",
    "contiguous",
    "documents",
    "format_schedule",
    "frame_causal",
    "full",
    "parse_schedule",
    "per_row",
    "prefix",
    "ring_attention_context_parallel",
    "ring_attention_simulate",
    "simulate_attention",
    "sliding_window",
    "striped",
    "validate",
    "visible_blocks",
    "zigzag",
]

"""Who may attend to whom."""

from ringspan.mask._bands import MOST_BANDS, Band, Coverage
from ringspan.mask._kinds import blocks, causal, chunks, documents, frame_causal, full, prefix, sliding_window
from ringspan.mask._masks import Allowed, Mask, per_row

__all__ = [
    "MOST_BANDS",
    "Allowed",
    "Band",
    "Coverage",
    "Mask",
    "blocks",
    "causal",
    "chunks",
    "documents",
    "frame_causal",
    "full",
    "per_row",
    "prefix",
    "sliding_window",
]

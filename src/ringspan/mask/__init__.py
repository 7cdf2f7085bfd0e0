"""Who may attend to whom."""

from ringspan.mask.bands import MOST_BANDS, Band, Coverage
from ringspan.mask.masks import (
    Allowed,
    Mask,
    causal,
    documents,
    frame_causal,
    full,
    per_row,
    prefix,
    sliding_window,
)

__all__ = [
    "MOST_BANDS",
    "Allowed",
    "Band",
    "Coverage",
    "Mask",
    "causal",
    "documents",
    "frame_causal",
    "full",
    "per_row",
    "prefix",
    "sliding_window",
]

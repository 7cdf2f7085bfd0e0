"""Who holds which token: layouts, their builders, load balance, and counting visible pairs."""

from ringspan.layout.balance import balanced
from ringspan.layout.layouts import Layout, contiguous, striped, zigzag
from ringspan.layout.pairs import Work, count_pairs

__all__ = [
    "Layout",
    "Work",
    "balanced",
    "contiguous",
    "count_pairs",
    "striped",
    "zigzag",
]

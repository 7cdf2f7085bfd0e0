"""Who holds which token: layouts, their builders, load balance, and counting visible pairs."""

from ringspan.layout._balance import balanced
from ringspan.layout._layouts import Layout, contiguous, striped, zigzag
from ringspan.layout._pairs import Work, count_pairs

__all__ = [
    "Layout",
    "Work",
    "balanced",
    "contiguous",
    "count_pairs",
    "striped",
    "zigzag",
]

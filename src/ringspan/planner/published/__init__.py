"""Predictions held against published measurements."""

from ringspan.planner.published.check import (
    MEDIAN_LIMIT,
    SOURCE_LIMIT,
    WINNERS_LIMIT,
    CheckResult,
    Judged,
    SourceError,
    Winner,
    run_check,
)

__all__ = [
    "MEDIAN_LIMIT",
    "SOURCE_LIMIT",
    "WINNERS_LIMIT",
    "CheckResult",
    "Judged",
    "SourceError",
    "Winner",
    "run_check",
]

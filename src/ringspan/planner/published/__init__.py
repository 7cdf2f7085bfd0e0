"""Predictions held against published measurements."""

from ringspan.planner.published.check import (
    COVERAGE_LIMITS,
    MEDIAN_LIMIT,
    SOURCE_LIMIT,
    TIES_LIMIT,
    WIDTH_LIMIT,
    WINNERS_LIMIT,
    CheckResult,
    Judged,
    SourceError,
    Winner,
    run_check,
)

__all__ = [
    "COVERAGE_LIMITS",
    "MEDIAN_LIMIT",
    "SOURCE_LIMIT",
    "TIES_LIMIT",
    "WIDTH_LIMIT",
    "WINNERS_LIMIT",
    "CheckResult",
    "Judged",
    "SourceError",
    "Winner",
    "run_check",
]

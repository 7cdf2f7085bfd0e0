"""Schedules as data: actions, completion, validation, compilation and text.

`build_schedule` and `build_decode` live one layer up, in `ringspan.algorithms`, and are loaded when first used.
"""

from importlib import import_module
from typing import Any

from ringspan.schedule.actions import (
    ALL,
    SUMS,
    Actions,
    AllMerge,
    Attend,
    Block,
    Heads,
    Kind,
    Schedule,
    Step,
    Transfer,
)
from ringspan.schedule.compile import AllMerged, Arrived, Do, Drop, Post, Program, Sent, compile_rank, first_reads
from ringspan.schedule.complete import Route, complete
from ringspan.schedule.text import format_schedule, parse_schedule
from ringspan.schedule.validate import validate
from ringspan.schedule.visible import Visible, visible_blocks

__all__ = [
    "ALL",
    "SUMS",
    "Actions",
    "AllMerge",
    "AllMerged",
    "Arrived",
    "Attend",
    "Block",
    "Do",
    "Drop",
    "Heads",
    "Kind",
    "Post",
    "Program",
    "Route",
    "Schedule",
    "Sent",
    "Step",
    "Transfer",
    "Visible",
    "build_decode",
    "build_schedule",
    "compile_rank",
    "complete",
    "first_reads",
    "format_schedule",
    "parse_schedule",
    "validate",
    "visible_blocks",
]


def __getattr__(name: str) -> Any:
    if name in ("build_decode", "build_schedule"):
        return getattr(import_module("ringspan.algorithms"), name)
    raise AttributeError(f"module 'ringspan.schedule' has no attribute {name!r}")

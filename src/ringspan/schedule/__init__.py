"""Schedules as data: actions, completion, validation, compilation and text."""

from ringspan.schedule.actions import (
    ALL,
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
    "compile_rank",
    "complete",
    "first_reads",
    "format_schedule",
    "parse_schedule",
    "validate",
    "visible_blocks",
]

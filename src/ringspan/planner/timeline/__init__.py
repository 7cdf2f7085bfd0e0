"""When does everything happen, and what waits for what? `run.py` follows the steps that the others supply."""

from ringspan.algorithms import END, Load, Ring, Round, Sequence
from ringspan.planner.timeline.attention import (
    attention_timeline,
    check_priced,
    is_quick,
    real_timeline,
    schedule_loads,
    schedule_timeline,
)
from ringspan.planner.timeline.run import Moment, Timeline, run_timeline

__all__ = [
    "END",
    "Load",
    "Moment",
    "Ring",
    "Round",
    "Sequence",
    "Timeline",
    "attention_timeline",
    "check_priced",
    "is_quick",
    "real_timeline",
    "run_timeline",
    "schedule_loads",
    "schedule_timeline",
]

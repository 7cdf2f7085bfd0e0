"""When does everything happen, and what waits for what? `run.py` follows the steps that the others supply."""

from ringspan.planner.timeline.loads import Ring, Sequence
from ringspan.planner.timeline.rings import attention_timeline
from ringspan.planner.timeline.run import END, Load, Moment, Round, Timeline, run_timeline
from ringspan.planner.timeline.schedules import schedule_loads, schedule_timeline

__all__ = [
    "END",
    "Load",
    "Moment",
    "Ring",
    "Round",
    "Sequence",
    "Timeline",
    "attention_timeline",
    "run_timeline",
    "schedule_loads",
    "schedule_timeline",
]

"""When does everything happen, and what waits for what? `run.py` follows the steps that the others supply."""

from ringspan.timeline.loads import Ring, Sequence
from ringspan.timeline.rings import attention_timeline
from ringspan.timeline.run import END, Load, Moment, Round, Timeline, run_timeline
from ringspan.timeline.schedules import schedule_loads, schedule_timeline

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

"""A schedule as a table for notebooks: steps down, ranks across, in the words of the text grid."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.schedule.actions import Schedule

MOST_STEPS, MOST_RANKS, MOST_WORDS = 32, 16, 6


def draw_schedule(schedule: "Schedule") -> str:
    """An HTML table."""
    ranks, steps = range(min(schedule.world_size, MOST_RANKS)), range(min(schedule.num_steps, MOST_STEPS))
    head = "".join(f"<th>rank {rank}</th>" for rank in ranks)
    rows = [f"<tr><th>{t}</th>{''.join(f'<td>{_cell(schedule, rank, t)}</td>' for rank in ranks)}</tr>" for t in steps]
    is_whole = len(ranks) == schedule.world_size and len(steps) == schedule.num_steps
    shown = "" if is_whole else f", {len(ranks)} ranks and {len(steps)} steps shown"
    caption = f"Schedule of {schedule.num_steps} steps on {schedule.world_size} ranks{shown}"
    head = f"<thead><tr><th>step</th>{head}</tr></thead>"
    return f"<table><caption>{caption}</caption>{head}<tbody>{''.join(rows)}</tbody></table>"


def _cell(schedule: "Schedule", rank: int, t: int) -> str:
    attends, sends, _, merges = schedule.actions(rank, t)
    words = list(map(str, (*attends, *sends, *merges)))
    more = [f"and {len(words) - MOST_WORDS} more"] if len(words) > MOST_WORDS else []
    return "<br>".join(map(escape, words[:MOST_WORDS] + more))

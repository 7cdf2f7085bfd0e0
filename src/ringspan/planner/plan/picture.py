"""A plan as a table for notebooks: the best ways with their time and memory."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.planner.plan.build import Option, Plan

MOST_ROWS = 10


def draw_plan(plan: "Plan") -> str:
    """An HTML table of the first options."""
    request = plan.request
    rows = [_row(plan, option) for option in plan.options[:MOST_ROWS]]
    caption = (
        f"{request.model.id}, {request.phase}, {request.tokens:,} tokens on {request.cluster.num_devices} × "
        f"{request.cluster.device.id}: {min(MOST_ROWS, len(plan.options))} of {len(plan.options)} ways"
    )
    head = "<tr><th>algorithm</th><th>layout</th><th>tp</th><th>cp</th><th>seconds</th><th>GB</th><th>fits</th></tr>"
    return f"<table><caption>{escape(caption)}</caption><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _row(plan: "Plan", option: "Option") -> str:
    setup, seconds = option.setup, option.prediction.total_s
    cells = (
        str(setup),
        setup.layout,
        setup.tp,
        setup.cp,
        f"{seconds * plan.low:.3g} to {seconds * plan.high:.3g}",
        f"{option.memory.total / 1e9:.3g}",
        "yes" if option.fits else "no",
    )
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"

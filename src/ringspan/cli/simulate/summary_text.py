"""Print the short report of a simulation: the settings, one schedule as a grid, and the check of the results."""

from rich.console import Console

from ringspan.algorithms import find_algorithm
from ringspan.cli.page import Page, explain_grid, new_table
from ringspan.cli.simulate.text import (
    RANK_LETTERS,
    format_check,
    print_title,
    print_verdict,
    token_strip,
)
from ringspan.simulate.lesson import Lesson

NEXT = (
    ("learn", "ringspan simulate --lesson"),
    ("plan", "ringspan plan --model llama-3.1-8b --devices 8xh100 --tokens 128K"),
    ("measure", "ringspan bench attention"),
)


def print_summary(lesson: Lesson, console: Console) -> None:
    """Print the report; with the default settings it fits into 40 lines of 80 columns."""
    page, parameters, prefill = Page(console), lesson.parameters, lesson.prefill
    print_title(page, parameters)
    if len(prefill.shards) <= len(RANK_LETTERS):
        page.prose("The rank that holds each token, from the first to the last:")
        page.show(token_strip(prefill.shards, parameters.seq_len))
    first = prefill.runs[0]
    record = find_algorithm(first.algorithm)
    page.prose(
        f"{record.label}: {record.idea}.",
        *(sentence for _, sentence in explain_grid(first.grid)),
    )
    page.grid(first.grid)
    times = ", ".join(f"{work.layout} {work.imbalance:.2f}" for work in prefill.work)
    page.prose(f"Time of a KV ring by layout, if 1 is without any waiting: {times}.")
    _print_runs(page, lesson)
    print_verdict(page, lesson)
    page.facts(NEXT)


def _print_runs(page: Page, lesson: Lesson) -> None:
    table = new_table("algorithm", ">messages", ">bytes sent", "largest difference from dense attention")
    for run in lesson.prefill.runs:
        label = find_algorithm(run.algorithm).label
        num_messages = sum(traffic.num_messages for traffic in run.traffic)
        table.add_row(label, f"{num_messages:,}", f"{run.sent_bytes:,}", format_check(run.check))
    page.show(table)

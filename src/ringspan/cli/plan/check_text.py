"""Predictions beside published measurements, on the terminal: by source, the winners, and row by row."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ringspan.cli.formats import format_percent
from ringspan.cli.page import Page, new_table
from ringspan.planner.catalog.constants import priors
from ringspan.planner.published import (
    COVERAGE_LIMITS,
    MEDIAN_LIMIT,
    SOURCE_LIMIT,
    TIES_LIMIT,
    WIDTH_LIMIT,
    WINNERS_LIMIT,
    CheckResult,
    Judged,
    SourceError,
)

HEADINGS = {
    "judged": "Judged: each source by constants fitted without it",
    "apart": "Shown apart: erratic, inconsistent, printed twice, ratios near 1, formulas",
}


def print_check(result: CheckResult, console: Console) -> None:
    """Print everything."""
    page = Page(console)
    console.print(Text("Predictions held against published measurements", "bold"))
    page.prose(
        "An error is predicted / published - 1. A source is a paper or a repository with all its tables; its rows are "
        "predicted by constants that were fitted to the other sources alone. Covered: rows within the range of the "
        "middle 80 % that a plan would print."
    )
    for use in ("judged", "apart"):
        page.section(HEADINGS[use])
        _print_sources(page, [source for source in result.sources if source.use == use])
        _print_rows(page, [row for row in result.rows if row.use == use and row.predicted is not None])
    _print_refused(page, result)
    _print_winners(page, result)
    _print_constants(page, result)
    _print_verdict(page, result)


def _print_sources(page: Page, sources: Sequence[SourceError]) -> None:
    table = new_table("source", ">rows", ">median error", ">bias", ">worst", ">covered", ">range")
    for it in sources:
        table.add_row(
            it.source,
            str(it.num_rows),
            format_percent(it.median_error),
            f"{100 * it.bias:+.1f} %",
            format_percent(it.worst_error),
            format_percent(it.coverage, 0),
            f"{it.width:.2f}",
        )
    page.show(table)


def _print_rows(page: Page, rows: Sequence[Judged]) -> None:
    table = new_table("row", "", ">published", ">predicted", ">error", "")
    for row in rows:
        numbers = f"{row.published:.4g}", f"{row.predicted:.4g}", f"{100 * row.error:+.1f} %"
        table.add_row(row.id, row.quantity, *numbers, row.why)
    page.console.print()
    page.show(table)


def _print_refused(page: Page, result: CheckResult) -> None:
    reasons: dict[str, list[str]] = {}
    for row in result.rows:
        if row.predicted is None:
            reasons.setdefault(row.why or row.refused, []).append(row.id)
    if not reasons:
        return
    page.section("Refused: rows that no plan expresses")
    for reason, ids in reasons.items():
        page.prose(f"{len(ids)} rows, {ids[0]} to {ids[-1]}: {reason}.")


def _print_winners(page: Page, result: CheckResult) -> None:
    page.section("Winners")
    wrong = [winner for winner in result.winners if winner.is_wrong]
    right = sum(winner.is_right for winner in result.winners)
    page.prose(
        f"Of {len(result.winners)} pairs that differ by more than 3 %, {right} were called right, {len(wrong)} wrong, "
        f"and {sum(winner.is_tied for winner in result.winners)} a tie; a tie is wrong where times differ by more "
        "than 25 %."
    )
    if wrong:
        table = new_table("called wrong", "", ">published time ratio", ">predicted", "")
        for it in wrong:
            numbers = f"{it.published_ratio:.3f}", f"{it.predicted_ratio:.3f}"
            table.add_row(it.first, it.second, *numbers, "tie" if it.is_tied else "")
        page.show(table)


def _print_constants(page: Page, result: CheckResult) -> None:
    page.section(f"The {len(result.constants)} fitted constants")
    table = new_table("name", ">value", ">before", "what is believed without the rows", "fitted to")
    for name, value in result.constants.items():
        prior = priors()[name]
        table.add_row(name, f"{value:.4g}", f"{prior.value:.4g}", prior.source, prior.rows)
    page.show(table)


def _print_verdict(page: Page, result: CheckResult) -> None:
    page.section("The limits")
    low, high = COVERAGE_LIMITS
    worst = max((it for it in result.sources if it.use == "judged"), key=lambda it: it.median_error)
    table = new_table("", ">reached", ">limit", "")
    for what, reached, limit, is_kept in (
        (
            "median over sources of the median error, left out",
            format_percent(result.median_error),
            format_percent(MEDIAN_LIMIT, 0),
            result.median_error <= MEDIAN_LIMIT,
        ),
        (
            f"worst source: {worst.source}",
            format_percent(worst.median_error),
            format_percent(SOURCE_LIMIT, 0),
            all(it.is_kept for it in result.sources if it.use == "judged"),
        ),
        (
            "winners called right, ties apart",
            format_percent(result.winners_right),
            format_percent(WINNERS_LIMIT, 0),
            result.winners_right >= WINNERS_LIMIT,
        ),
        ("ties", format_percent(result.ties), format_percent(TIES_LIMIT, 0), result.ties <= TIES_LIMIT),
        (
            "rows in the 80 % range, sources counting the same",
            format_percent(result.coverage),
            f"{100 * low:.0f} to {100 * high:.0f} %",
            low <= result.coverage <= high,
        ),
        (
            "range, high over low, of measured kernels",
            f"{result.width:.2f}",
            f"{WIDTH_LIMIT:.0f}",
            result.width <= WIDTH_LIMIT,
        ),
    ):
        mark = Text("✓" if is_kept else "✗", "green" if is_kept else "bold red")
        table.add_row(what, reached, limit, mark)
    page.show(table)
    text = "✓ All limits are kept." if result.is_passed else "✗ A limit is not kept."
    page.console.print(Text(text, "bold green" if result.is_passed else "bold red"))

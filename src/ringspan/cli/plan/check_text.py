"""Predictions beside published measurements, on the terminal: by source, the winners, and row by row."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from ringspan.cli.formats import format_percent
from ringspan.cli.page import Page
from ringspan.cli.tables import new_table
from ringspan.planner.published import MEDIAN_LIMIT, SOURCE_LIMIT, WINNERS_LIMIT, CheckResult, Judged, SourceError

HEADINGS = {
    "judged": "Judged: rows that no parameter was fitted to",
    "fitted": "Fitted: rows the curves come from",
    "apart": "Shown apart: erratic, inconsistent, printed twice, ratios near 1, formulas",
}


def print_check(result: CheckResult, console: Console) -> None:
    """Print everything."""
    page = Page(console)
    console.print(Text("Predictions held against published measurements", "bold"))
    page.prose("An error is predicted / published - 1. No row is both fitted and judged.")
    for use in ("judged", "fitted", "apart"):
        page.section(HEADINGS[use])
        _print_sources(page, [source for source in result.sources if source.use == use])
        _print_rows(page, [row for row in result.rows if row.use == use])
    _print_winners(page, result)
    _print_parameters(page, result)
    _print_verdict(page, result)


def _print_sources(page: Page, sources: Sequence[SourceError]) -> None:
    table = new_table("source", ">rows", ">median error", ">bias", ">worst")
    for it in sources:
        cells = (format_percent(it.median_error), f"{100 * it.bias:+.1f} %", format_percent(it.worst_error))
        table.add_row(it.source, str(it.num_rows), *cells)
    page.show(table)


def _print_rows(page: Page, rows: Sequence[Judged]) -> None:
    table = new_table("row", "", ">published", ">predicted", ">error", "")
    for row in rows:
        if row.predicted is not None:
            numbers = f"{row.published:.4g}", f"{row.predicted:.4g}", f"{100 * row.error:+.1f} %"
            table.add_row(row.id, row.quantity, *numbers, row.why)
    page.console.print()
    page.show(table)


def _print_winners(page: Page, result: CheckResult) -> None:
    page.section("Winners")
    wrong = [winner for winner in result.winners if not winner.is_right]
    page.prose(
        f"Of {len(result.winners)} pairs that differ by more than 3 %, {len(result.winners) - len(wrong)} were called "
        f"right ({format_percent(result.winners_right)})."
    )
    if wrong:
        table = new_table("called wrong", "", ">published time ratio", ">predicted")
        for it in wrong:
            table.add_row(it.first, it.second, f"{it.published_ratio:.3f}", f"{it.predicted_ratio:.3f}")
        page.show(table)


def _print_parameters(page: Page, result: CheckResult) -> None:
    page.section(f"The {len(result.parameters)} fitted parameters")
    table = new_table("name", ">value")
    for name, value in result.parameters.items():
        table.add_row(name, f"{value:.4g}")
    page.show(table)


def _print_verdict(page: Page, result: CheckResult) -> None:
    page.section("The limits")
    table = new_table("", ">reached", ">limit", "")
    for what, reached, limit, is_kept in (
        ("median over sources of the median error", result.median_error, MEDIAN_LIMIT, None),
        ("worst source", result.worst_source_error, SOURCE_LIMIT, None),
        ("winners called right", result.winners_right, WINNERS_LIMIT, result.winners_right >= WINNERS_LIMIT),
    ):
        is_ok = reached <= limit if is_kept is None else is_kept
        mark = Text("✓" if is_ok else "✗", "green" if is_ok else "bold red")
        table.add_row(what, format_percent(reached), format_percent(limit, 0), mark)
    page.show(table)
    text = "✓ All limits are kept." if result.is_passed else "✗ A limit is not kept."
    page.console.print(Text(text, "bold green" if result.is_passed else "bold red"))

"""What `ringspan plan` prints beside a plan: answers to single questions, --check, and everything as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from ringspan.cli.console import format_count, format_percent, format_seconds
from ringspan.cli.page import Page, new_table
from ringspan.cli.plan.text import describe, describe_cost, describe_devices, format_range, gigabytes
from ringspan.planner.catalog.constants import priors
from ringspan.planner.plan import Answer, Option, Plan, Request, cost_of
from ringspan.planner.plan.questions import MOST_DEVICES
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


def print_answer(
    question: str, request: Request, answer: Answer | None, target: str | None, price: float | None, console: Console
) -> None:
    """One line first, then the way and its memory."""
    page = Page(console)
    device = request.cluster.device
    if answer is None:
        text = f"✗ not even a batch of 1 fits on these {device.id}"
        if question == "target_ttft":
            text = f"✗ no number of {device.id} up to {MOST_DEVICES:,} reaches {target}"
        elif question == "max_context":
            text = f"✗ not even one token fits on these {device.id}"
        console.print(Text(text, "bold red"))
        return
    asked, option = answer.request, answer.option
    video = asked.model.video
    batch = f"{asked.batch:,} is" if video is None else f"{format_count(asked.batch, 'forward')} are"
    found = {
        "target_ttft": f"{asked.cluster.num_devices} {device.id} reach {target}",
        "max_context": f"{asked.tokens:,} tokens is the longest sequence that fits",
        "max_batch": f"{batch} the largest batch that fits",
    }[question]
    console.print(Text(f"✓ {found}: {describe(option, asked)}, {format_range(option)}", "bold green"))
    is_barely = option.memory.fits_barely(device.memory_bytes)
    rows = [
        ("model", f"{asked.model.id}, {asked.phase}, {asked.tokens:,} tokens, batch {asked.batch:,}"),
        ("devices", describe_devices(asked.cluster)),
        ("software", f"{asked.software.name} with {asked.cluster.device.attention.kernel}"),
        ("estimate", format_seconds(option.prediction.total_s)),
        (
            "memory",
            f"{gigabytes(option.memory.total)} of {gigabytes(device.memory_bytes)} on each{', barely' * is_barely}",
        ),
    ]
    limit = asked.model.max_tokens
    if limit is not None and asked.tokens > limit:
        rows.append(("note", f"the model was made for {limit:,} tokens"))
    if question == "max_batch" and video is not None and video.forwards > 1:
        videos = format_count(asked.batch // video.forwards, "video")
        rows.append(("note", f"with guidance a video takes {video.forwards} of them: {videos}"))
    if price is not None:
        rows.append(("cost", describe_cost(cost_of(asked, option, price), asked)))
    page.facts(rows)


def print_sweep(answers: Sequence[Answer], prices: Mapping[str, float], console: Console) -> None:
    """A row for every length and cluster, with its cost if the devices have prices."""
    page = Page(console)
    request = answers[0].request
    console.print(Text(f"{request.model.id}: {request.phase}, the best way for each", "bold"))
    columns = ("devices", ">tokens", "way", ">time", ">memory", "fits", *((">cost",) if prices else ()))
    table = new_table(*columns)
    for asked, option in ((answer.request, answer.option) for answer in answers):
        cluster = asked.cluster
        cells = [
            f"{cluster.nodes}x{cluster.per_node}x{cluster.device.id}",
            f"{asked.tokens:,}",
            describe(option, asked),
            format_range(option) if option.fits else "",
            gigabytes(option.memory.total),
            "✓" if option.fits else "✗",
        ]
        if prices:
            cost = cost_of(asked, option, prices[cluster.device.id])
            cells.append(f"{cost.per_unit:.4g}" if option.fits else "")
        table.add_row(*cells)
    page.show(table)


def answer_as_json(answer: Answer, price: float | None) -> dict[str, Any]:
    """The request that answers, its best way, and what it costs."""
    asked = answer.request
    return {
        "tokens": asked.tokens,
        "batch": asked.batch,
        "nodes": asked.cluster.nodes,
        "per_node": asked.cluster.per_node,
        "device": asked.cluster.device.id,
        "option": option_as_json(answer.option),
        "cost": None if price is None else as_plain(cost_of(asked, answer.option, price)),
    }


HEADINGS = {
    "judged": "Judged: each source by constants fitted without it",
    "apart": "Shown apart: erratic, inconsistent, printed twice, ratios near 1, formulas",
}


def print_check(result: CheckResult, console: Console) -> None:
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


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The whole plan, with its options in their order."""
    request = plan.request
    model = as_plain(request.model) | {"counted_parameters": request.model.counted_parameters}
    return {
        **{name: value for name, value in as_plain(plan).items() if name not in ("options", "tied")},
        "request": as_plain(request) | {"model": model},
        "options": [option_as_json(option) for option in plan.options],
        "tied": [as_plain(option.setup) for option in plan.tied],
    }


def option_as_json(option: Option) -> dict[str, Any]:
    return {
        **as_plain(option.prediction),
        "total_s": option.prediction.total_s,
        "low_s": option.low_s,
        "high_s": option.high_s,
        "bottleneck": option.prediction.bottleneck,
        "memory_bytes": {**as_plain(option.memory), "total": option.memory.total},
        "fits": option.fits,
    }


def as_plain(value: Any) -> Any:
    """Dataclasses and named tuples by the names of their fields, all the way down."""
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if hasattr(value, "_asdict"):
        return {name: as_plain(item) for name, item in value._asdict().items()}
    if isinstance(value, tuple | list):
        return [as_plain(item) for item in value]
    return value

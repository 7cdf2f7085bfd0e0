"""`ringspan bench prefill` and `ringspan bench decode`: attention against a KV cache, timed and checked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.text import Text

from ringspan.algorithms import find_algorithm
from ringspan.algorithms.choose import RINGS
from ringspan.bench.result import PARTS, WAYS, InferenceResult, Timing
from ringspan.bench.settings import InferenceSettings, Job
from ringspan.cli.bench.options import (
    ModelSizes,
    RunPlace,
    Runs,
    html_option,
    json_option,
    print_json,
    rank_options,
    run_on_ranks,
    run_options,
    show_progress,
    size_options,
)
from ringspan.cli.console import format_count, format_percent, format_seconds, new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page import Page, new_table
from ringspan.cli.page_command import command_line
from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.page.report import Point, Section, build_report, chart, curves, facts, measured_point, table

PREFILL_EXAMPLE = """\b
Example:
  ringspan bench prefill --tokens 8K --heads 8 --kv-heads 2 --plot prefill.svg
"""
DECODE_EXAMPLE = """\b
Example:
  ringspan bench decode --tokens 64K --heads 8 --kv-heads 2 --batch 8
"""


class Shown(NamedTuple):
    """Where a result is written, in addition to the terminal or instead of it."""

    plot: Path | None
    html: Path | None
    as_json: bool


plot_option = click.option("--plot", type=OutputFile(".svg"), help="Write a diagram, an SVG file.")


@click.command(cls=Command, epilog=PREFILL_EXAMPLE, context_settings={"show_default": True})
@rank_options
@size_options(tokens="16384", batch=None, heads=1, about_tokens="New and cached tokens together")
@run_options(repeats=5)
@plot_option
@html_option
@json_option
@click.pass_context
def prefill(
    ctx: click.Context,
    *,
    place: RunPlace,
    sizes: ModelSizes,
    runs: Runs,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Time the first token, by the share that is cached.

    Compares pass-KV, pass-Q and the automatic choice at miss rates from 1 to 100 %, for one layer.
    """
    _measure(ctx, InferenceSettings("prefill", **sizes._asdict(), **runs._asdict()), place, Shown(plot, html, as_json))


@click.command(cls=Command, epilog=DECODE_EXAMPLE, context_settings={"show_default": True})
@rank_options
@size_options(tokens="16384", batch=4, heads=1, about_tokens="Longest context")
@run_options(repeats=5)
@plot_option
@html_option
@json_option
@click.pass_context
def decode(
    ctx: click.Context,
    *,
    place: RunPlace,
    sizes: ModelSizes,
    runs: Runs,
    plot: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Time one new token, by context length.

    Measures batches of 1 and of --batch sequences, for one layer: whole steps, and their parts alone.
    """
    _measure(ctx, InferenceSettings("decode", **sizes._asdict(), **runs._asdict()), place, Shown(plot, html, as_json))


def _measure(ctx: click.Context, settings: InferenceSettings, place: RunPlace, shown: Shown) -> None:
    with show_progress() as progress:
        job = Job("inference", place.carrier, place.world_size, place.timeout_s, inference=settings)
        result: InferenceResult | None = run_on_ranks(job, place.launched, progress)
    if result is None:
        return  # not rank 0
    if shown.html is not None:
        write_text(shown.html, build_inference_page(result, command_line(ctx)))
    show_inference(result, shown.plot, shown.as_json, new_console())
    if not result.is_verified:
        ctx.exit(1)


def show_inference(result: InferenceResult, plot: Path | None, as_json: bool, console: Any) -> None:
    """Print the result, and write the diagram and the page that were requested."""
    if plot is not None:
        write_text(plot, plot_inference(result))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        print_inference(result, console)


NAMES = {
    **{name: find_algorithm(name).label for name in RINGS},
    "auto": "auto",
    "attention": "attention",
    "sendrecv": "send and receive",
    "all_to_all": "all to all",
    "one_shot": "one shot",
}


def print_inference(result: InferenceResult, console: Console) -> None:
    page = Page(console)
    s = result.settings
    title = "Time to first token" if s.phase == "prefill" else "Time per token"
    console.print(Text(f"{title}, one layer, on {format_count(result.world_size, 'rank')}, measured", "bold"))
    heads = f"{format_count(s.num_heads, 'head')} over {format_count(s.num_kv_heads, 'KV head')}"
    page.facts(
        [
            ("size", f"{format_count(s.seq_len, 'token')}, {heads}, head_dim {s.head_dim}, {s.dtype}, seed {s.seed}"),
            ("ranks", f"transport {result.transport}, a thread per rank; measured {result.machine}"),
        ]
    )
    _print_prefill(page, result) if s.phase == "prefill" else _print_decode(page, result)
    verdict = "verified" if result.is_verified else "WRONG"
    error = "not finite" if result.error is None else f"{result.error:.1e}"
    page.section("Check")
    page.prose(f"Sampled rows against float64: largest difference {error}, {verdict} (limit {result.tolerance:g}).")


def plot_inference(result: InferenceResult) -> str:
    ranks = format_count(result.world_size, "rank")
    if result.settings.phase == "prefill":
        lines = [Line(NAMES[way], [(p.new_tokens, p.times[way].median_s) for p in result.prefill]) for way in WAYS]
        title = f"Time to first token, {result.settings.seq_len:,} tokens, {ranks}"
        return draw_charts([Chart(title, "new tokens", "time", lines)])
    charts = []
    for batch in dict.fromkeys(point.batch for point in result.decode):
        points = [point for point in result.decode if point.batch == batch]
        lines = [Line(NAMES[part], [(p.context, p.times[part].median_s) for p in points]) for part in PARTS]
        charts.append(Chart(f"Time per token, batch {batch}, {ranks}", "cached tokens", "time", lines))
    return draw_charts(charts)


def _print_prefill(page: Page, result: InferenceResult) -> None:
    page.section("New tokens against a cache")
    table = new_table(
        ">new", ">tokens", ">cached", ">pass-KV, ms", ">pass-Q, ms", ">auto, ms", "picks", ">over the better"
    )
    for point in result.prefill:
        times = (f"{1e3 * point.times[way].median_s:.2f}" for way in WAYS)
        picked = point.picked.replace("_", "-")
        table.add_row(
            f"{point.miss_percent} %",
            f"{point.new_tokens:,}",
            f"{point.cached_tokens:,}",
            *times,
            picked,
            format_percent(point.over_better),
        )
    page.show(table)
    reasons = {point.picked: point.reason for point in result.prefill}
    page.section("Why")
    for reason in reasons.values():
        page.prose(reason)


def _print_decode(page: Page, result: InferenceResult) -> None:
    page.section("One token per sequence")
    table = new_table(
        ">cached", ">batch", ">attention, ms", ">send/recv, ms", ">all-to-all, ms", ">pass-Q, ms", ">one shot, ms"
    )
    for point in result.decode:
        times = (f"{1e3 * point.times[part].median_s:.3f}" for part in PARTS)
        table.add_row(f"{point.context:,}", str(point.batch), *times)
    page.show(table)
    page.prose(
        "The first three are measured alone: a rank reading its part of the cache, a block of queries to the next "
        "rank, and partial results to all others. The last two are whole steps of a layer, with the queries sharded by "
        "sequence and with all of them on every rank."
    )


BANDS = "The bands reach from the fastest to the slowest run; the line is the median."


def build_inference_page(result: InferenceResult, command: str) -> str:
    settings, ranks = result.settings, format_count(result.world_size, "rank")
    what = "Time to the first token" if settings.phase == "prefill" else "Time per token"
    heads = f"{format_count(settings.num_heads, 'head')} over {format_count(settings.num_kv_heads, 'KV head')}"
    lead = [
        f"One layer, up to {format_count(settings.seq_len, 'token')}, {heads} of {settings.head_dim} elements, "
        f"{settings.dtype}, transport {result.transport}.",
        f"Speed of a rank, of a link and latency, measured: {result.machine}.",
    ]
    sections = _prefill(result) if settings.phase == "prefill" else _decode(result)
    return build_report(f"{what} on {ranks}, measured", lead, [_summary(result), *sections], command)


def _summary(result: InferenceResult) -> Section:
    error = "not finite" if result.error is None else f"{result.error:.1e}"
    verdict = "✓ right" if result.is_verified else "✗ WRONG"
    rows = [
        ("sampled rows against float64", f"{verdict}: largest difference {error}, {result.tolerance:g} is accepted")
    ]
    if result.prefill:
        worst = max(point.over_better for point in result.prefill)
        rows.append(("automatic choice over the better algorithm, at worst", format_percent(worst)))
    return facts("summary", "The answer", rows)


def _prefill(result: InferenceResult) -> Iterator[Section]:
    lines = [(NAMES[way], [_point(p.new_tokens, p.times[way]) for p in result.prefill]) for way in WAYS]
    title = f"{format_count(result.settings.seq_len, 'token')}, of which some are new"
    yield curves("curves", "Time by the number of new tokens", [chart(title, "new tokens", lines)], [BANDS])
    rows = [
        [
            (f"{point.miss_percent} %", point.miss_percent),
            (f"{point.new_tokens:,}", point.new_tokens),
            (f"{point.cached_tokens:,}", point.cached_tokens),
            *(_cell(point.times[way]) for way in WAYS),
            point.picked.replace("_", "-"),
            (format_percent(point.over_better), point.over_better),
        ]
        for point in result.prefill
    ]
    columns = [">new", ">new tokens", ">cached tokens", *(f">{NAMES[way]}" for way in WAYS), "auto picks"]
    yield table("points", "Every point", [*columns, ">auto over the better"], rows, "Choose a heading to sort by it.")
    reasons = {point.picked: point.reason for point in result.prefill}
    yield facts("reasons", "Why the automatic choice picks", [(NAMES[key], why) for key, why in reasons.items()])


def _decode(result: InferenceResult) -> Iterator[Section]:
    charts = []
    for batch in dict.fromkeys(point.batch for point in result.decode):
        points = [point for point in result.decode if point.batch == batch]
        lines = [(NAMES[part], [_point(p.context, p.times[part]) for p in points]) for part in PARTS]
        charts.append(chart(f"Batch {batch}", "cached tokens", lines))
    lead = [
        BANDS,
        "Three lines are parts of a step, measured alone. Attention: a rank reads its part of the cache. Send and "
        "receive: a block of queries goes to the next rank. All to all: partial results go to all other ranks.",
        "Two lines are whole steps of a layer. Pass-Q: each rank owns the queries of some sequences. One shot: every "
        "rank holds all queries.",
    ]
    yield curves("curves", "Time by the length of the context", charts, lead)
    rows = [
        [
            (f"{point.context:,}", point.context),
            (f"{point.batch:,}", point.batch),
            *(_cell(point.times[part]) for part in PARTS),
        ]
        for point in result.decode
    ]
    columns = [">cached tokens", ">batch", *(f">{NAMES[part]}" for part in PARTS)]
    yield table("points", "Every point", columns, rows, "Choose a heading to sort by it.")


def _point(x: float, timing: Timing) -> Point:
    return measured_point(x, timing.median_s, timing.fastest_s, timing.slowest_s)


def _cell(timing: Timing) -> tuple[str, float]:
    return format_seconds(timing.median_s), timing.median_s

"""`ringspan bench prefill --html` and `decode --html`: the times against a KV cache as curves and tables."""

from collections.abc import Iterator

from ringspan.bench.inference_result import PARTS, WAYS, InferenceResult
from ringspan.bench.result import Timing
from ringspan.cli.bench.inference_text import NAMES
from ringspan.cli.formats import format_count, format_percent, format_seconds
from ringspan.page.report import Point, Section, build_report, chart, curves, facts, measured_point, table

BANDS = "The bands reach from the fastest to the slowest run; the line is the median."


def build_inference_page(result: InferenceResult, command: str) -> str:
    """One HTML file."""
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

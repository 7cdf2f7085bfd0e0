"""`ringspan bench attention --html`: the measured call as a page, with the predicted one laid over it."""

from collections.abc import Iterator
from typing import Any

from ringspan.bench.result import Measured, MeasuredMemory, RankResult, Result, ResultCheck, Timing
from ringspan.cli.bench.attention_text import format_spread
from ringspan.cli.formats import format_count, format_seconds
from ringspan.page import describe_timeline, describe_trace, timeline_sections
from ringspan.page.report import Section, bars, build_report, facts, table
from ringspan.planner.timeline import Timeline

BREAKDOWN = ("attention", "merging", "communication", "waiting", "other")


def build_attention_page(measured: Measured, trace: dict[str, Any], predicted: Timeline | None, command: str) -> str:
    """One HTML file; `trace` is the Chrome trace of the measured call."""
    parameters = measured.result.parameters
    title = f"Attention of {parameters.seq_len:,} tokens on {format_count(parameters.world_size, 'rank')}, measured"
    lead = [
        f"Mask {parameters.mask}, {parameters.layout} layout, {parameters.algorithm.replace('_', '-')}, "
        f"{parameters.dtype}, transport {parameters.transport}.",
    ]
    return build_report(title, lead, _sections(measured.result, trace, predicted), command)


def _sections(result: Result, trace: dict[str, Any], predicted: Timeline | None) -> Iterator[Section]:
    yield _summary(result)
    yield _times(result)
    expected = None if predicted is None else describe_timeline(predicted, "predicted")
    yield from timeline_sections(describe_trace(trace, "measured"), expected)
    yield _breakdown(result)
    yield _bytes_sent(result.by_rank)
    memory = [(it.rank, it.memory) for it in result.by_rank]
    if all(it.above_inputs_bytes is not None for _, it in memory):
        yield bars("memory", "Memory of each rank", ("inputs", "call above them"), map(_memory_row, memory))
    yield facts("about", "What was run", _told(trace["otherData"]))


def _told(settings: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if value is not None:
            yield name.replace("_", " "), ("yes" if value else "no") if isinstance(value, bool) else value


def _summary(result: Result) -> Section:
    rows = [
        ("speedup over one device", format_spread(result.speedup, "{:.2f}")),
        ("share of the ideal", format_spread(result.share_of_ideal, "{:.0%}")),
        ("result", tell_check(result.check)),
        ("bytes sent", "those of the schedule" if result.has_exact_bytes else "✗ NOT those of the schedule"),
        ("bottleneck", result.bottleneck),
    ]
    if result.predicted_s is not None:
        off = result.predicted_s / result.ranks.median_s - 1
        rows.append(("prediction", f"{format_seconds(result.predicted_s)} ({100 * off:+.0f} %)"))
    return facts("summary", "The answer", rows)


def tell_check(check: ResultCheck) -> str:
    """Whether a result is right, in one line."""
    error = "not finite" if check.max_error is None else f"largest error {check.max_error:.1e}"
    bits = {None: "", True: ", the bits of one rank", False: ", NOT the bits of one rank"}[check.same_bits]
    return f"{'✓ right' if check.is_passed else '✗ WRONG'}: {error}, {check.tolerance:.1e} is accepted{bits}"


def _times(result: Result) -> Section:
    ranks = format_count(result.parameters.world_size, "rank")
    timings = [
        (f"one device, {result.one_device_method}", result.one_device),
        (ranks, result.ranks),
        ("ideal: every rank its own tiles, no messages, no merging", result.ideal),
    ]
    caption = f"Medians of {format_count(result.parameters.repeats, 'repeat')}, interleaved; one thread per rank."
    rows = [timing_row(name, timing) for name, timing in timings]
    return table("times", "How fast", ["what", ">median", ">fastest", ">slowest"], rows, caption)


def timing_row(name: str, timing: Timing) -> list[object]:
    """A row of a table: the name, median, fastest and slowest run."""
    times = (timing.median_s, timing.fastest_s, timing.slowest_s)
    return [name, *((format_seconds(seconds), seconds) for seconds in times)]


def _breakdown(result: Result) -> Section:
    parts = [it.breakdown for it in result.by_rank]
    rows = [
        (f"rank {rank}", (it.attention_s, it.merge_s, it.communication_s, it.waiting_s, it.other_s))
        for rank, it in enumerate(parts)
    ]
    lead = [
        "Communication: blocked by a message on its way. Waiting: for a rank that has not sent or finished yet.",
        result.verdict,
    ]
    return bars("breakdown", "Where the time goes", BREAKDOWN, rows, unit="seconds", lead=lead)


def _bytes_sent(ranks: tuple[RankResult, ...]) -> Section:
    rows = [
        [
            (f"rank {it.rank}", it.rank),
            (f"{it.sent_bytes:,}", it.sent_bytes),
            (f"{it.scheduled_bytes:,}", it.scheduled_bytes),
            "yes" if it.sent_bytes == it.scheduled_bytes else "NO",
        ]
        for it in ranks
    ]
    return table("bytes", "Bytes sent", ["rank", ">measured", ">in the schedule", "equal"], rows)


def _memory_row(of_rank: tuple[int, MeasuredMemory]) -> tuple[str, tuple[float, float]]:
    rank, memory = of_rank
    return f"rank {rank}", (memory.input_bytes, memory.above_inputs_bytes or 0)

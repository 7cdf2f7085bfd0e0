"""How is a measured attention call printed? Speed, where the time goes, bytes, memory, and whether it is right."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ringspan.bench.result import (
    BenchParameters,
    MachineInfo,
    Measured,
    MeasuredMemory,
    PathCheck,
    RankResult,
    Ratio,
    Result,
    ResultCheck,
    Timing,
)
from ringspan.cli.console import format_count, format_seconds
from ringspan.cli.page import TABLE_RANKS, Page, new_table
from ringspan.page import describe_timeline, describe_trace, timeline_sections
from ringspan.page.report import Section, bars, build_report, facts, table
from ringspan.planner.timeline import Timeline

STATUS_STYLES = {"ok": "green", "failed": "bold red", "not available": "dim"}


def print_bench(result: Result, console: Console) -> None:
    page = Page(console)
    _print_title(page, result.parameters, result.machine)
    _print_times(page, result)
    _print_breakdown(page, result)
    _print_ranks(page, result.by_rank)
    _print_check(page, result)


def _print_title(page: Page, parameters: BenchParameters, machine: MachineInfo) -> None:
    p = parameters
    what = "Exact attention and its gradients" if p.has_backward else "Exact attention"
    page.console.print(Text(f"{what} on {format_count(p.world_size, 'rank')}, measured", "bold"))
    heads = f"{format_count(p.num_heads, 'head')} over {format_count(p.num_kv_heads, 'KV head')}"
    size = f"{format_count(p.seq_len, 'token')}, batch {p.batch}, {heads}, head_dim {p.head_dim}, {p.dtype}"
    turn = "" if p.direction is None else f", direction {p.direction}"
    mesh = "" if p.mesh is None else f", mesh {p.mesh[0]}×{p.mesh[1]}"
    algorithm = p.algorithm.replace("_", "-") + (", reproducible" if p.reproducible else "")
    page.facts(
        [
            ("size", f"{size}, seed {p.seed}"),
            ("mask", f"{p.mask}, layout {p.layout}"),
            ("algorithm", f"{algorithm}{turn}{mesh}, kernel {p.kernel}, transport {p.transport}, a thread per rank"),
            ("machine", f"{machine.device}, {format_count(machine.cores, 'core')}, torch {machine.torch}"),
        ]
    )


def _print_times(page: Page, result: Result) -> None:
    page.section("How fast")
    table = new_table("", ">median", "from", "to")
    ranks = format_count(result.parameters.world_size, "rank")
    for name, timing in (
        (f"one device, {result.one_device_method}", result.one_device),
        (ranks, result.ranks),
        ("ideal: every rank its own tiles, no messages, no merging", result.ideal),
    ):
        table.add_row(name, *map(format_seconds, (timing.median_s, timing.fastest_s, timing.slowest_s)))
    if result.predicted_s is not None:
        off = result.predicted_s / result.ranks.median_s - 1
        table.add_row(f"{ranks}, predicted ({100 * off:+.0f} %)", format_seconds(result.predicted_s))
    page.show(table)
    page.facts(
        [
            ("speedup", format_spread(result.speedup, "{:.2f}") + f" over one device, with {ranks}"),
            ("of the ideal", format_spread(result.share_of_ideal, "{:.0%}")),
        ]
    )
    repeats = format_count(result.parameters.repeats, "repeat")
    page.prose(f"Medians of {repeats}, interleaved; each rank computes with one thread, and so does the one device.")


def format_spread(ratio: Ratio, form: str) -> str:
    """The median, and the lowest and highest value."""
    median, lowest, highest = map(form.format, (ratio.median, ratio.lowest, ratio.highest))
    return f"{median} ({lowest} to {highest})"


def _print_breakdown(page: Page, result: Result) -> None:
    page.section("Where the time goes")
    table = new_table("rank", ">attention", ">merge", ">communication", ">waiting", ">other", ">all")
    for it in result.by_rank[:TABLE_RANKS]:
        part = it.breakdown
        seconds = (part.attention_s, part.merge_s, part.communication_s, part.waiting_s, part.other_s)
        cells = [f"{format_seconds(second)} {second / part.total_s:4.0%}" for second in seconds]
        table.add_row(str(it.rank), *cells, format_seconds(part.total_s))
    page.show(table)
    page.note_hidden(len(result.by_rank))
    page.prose("communication: blocked by a message on its way. waiting: for a rank that has not sent or finished yet.")
    page.console.print(Text(result.verdict, "bold"))


def _print_ranks(page: Page, ranks: Sequence[RankResult]) -> None:
    page.section("Bytes and memory")
    table = new_table("rank", ">bytes sent", ">in the schedule", "", ">peak memory", ">inputs", ">call above them")
    for it in ranks[:TABLE_RANKS]:
        is_exact = it.sent_bytes == it.scheduled_bytes
        table.add_row(
            str(it.rank),
            f"{it.sent_bytes:,}",
            f"{it.scheduled_bytes:,}",
            Text("✓" if is_exact else "✗", "green" if is_exact else "bold red"),
            _format_bytes(it.memory.peak_bytes),
            _format_bytes(it.memory.input_bytes),
            _format_bytes(it.memory.above_inputs_bytes),
        )
    page.show(table)
    page.note_hidden(len(ranks))
    if any(it.memory.peak_bytes is None for it in ranks):
        page.prose("Ranks that are threads share a process, so their memory cannot be measured separately.")


def _print_check(page: Page, result: Result) -> None:
    page.console.print()
    check = result.check
    error = "not finite" if check.max_error is None else f"{check.max_error:.1e}"
    if check.same_bits is False:
        text = "✗ Wrong: the bits are not those of one rank in the same mode."
    elif not check.is_passed:
        text = f"✗ Wrong: {error} off {check.reference}; at most {check.tolerance:.1e} is accepted."
    elif not result.has_exact_bytes:
        text = "✗ Wrong: the ranks did not send the bytes of the schedule."
    else:
        text = f"✓ The result is right: {error} off {check.reference}; at most {check.tolerance:.1e} is accepted."
    page.console.print(Text(text, "bold green" if result.is_verified else "bold red"))
    if check.same_bits:
        gradients = " and of the gradients" if result.parameters.has_backward else ""
        same = f"✓ The bits of the output{gradients} are those of one rank in the same mode."
        page.console.print(Text(same, "bold green"))


def print_paths(paths: Sequence[PathCheck], machine: str, console: Console) -> None:
    """Print a Markdown table to paste into an issue; its lines are never wrapped."""
    rows = [("path", "status", "max error", "note"), ("---", "---", "---:", "---")]
    rows += [(it.path, it.status, "" if it.max_error is None else f"{it.max_error:.1e}", it.note) for it in paths]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    console.print(Text(f"{machine}\n"), soft_wrap=True)
    for row in rows:
        style = STATUS_STYLES.get(row[1], "")
        line = " | ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
        console.print(Text(f"| {line} | {row[-1]} |", style), soft_wrap=True)
    num_failed = sum(it.status == "failed" for it in paths)
    num_run = sum(it.status != "not available" for it in paths)
    console.print()
    if num_failed:
        console.print(Text(f"✗ {num_failed} of {num_run} paths that can run here failed.", "bold red"))
    else:
        console.print(Text(f"✓ All {num_run} paths that can run here are right.", "bold green"))


def _format_bytes(number: int | None) -> str:
    return "" if number is None else f"{number / 1e6:,.1f} MB"


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

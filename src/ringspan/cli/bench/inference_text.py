"""How are the times of a cache printed and drawn: time to first token, or time per token?"""

from rich.console import Console
from rich.text import Text

from ringspan.algorithms import find_algorithm
from ringspan.algorithms.choose import RINGS
from ringspan.bench.inference_result import PARTS, WAYS, InferenceResult
from ringspan.cli.formats import format_count, format_percent
from ringspan.cli.page import Page
from ringspan.cli.svg import Chart, Line, draw_charts
from ringspan.cli.tables import new_table

NAMES = {
    **{name: find_algorithm(name).label for name in RINGS},
    "auto": "auto",
    "attention": "attention",
    "sendrecv": "send and receive",
    "all_to_all": "all to all",
    "one_shot": "one shot",
}


def print_inference(result: InferenceResult, console: Console) -> None:
    """Print the whole report."""
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
    """The SVG file."""
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

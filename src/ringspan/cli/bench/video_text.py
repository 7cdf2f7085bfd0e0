"""How is a measured denoising step printed? Speed, where the time goes, memory, and whether it is right."""

from rich.console import Console
from rich.text import Text

from ringspan.bench.result import Breakdown
from ringspan.bench.video_result import PredictedStep, StepMemory, VideoResult
from ringspan.cli.bench.attention_text import format_spread
from ringspan.cli.formats import format_count, format_seconds
from ringspan.cli.page import TABLE_RANKS, Page
from ringspan.cli.tables import new_table

PARTS = ("attention", "MLP, projections", "communication", "waiting")
MEMORY = ("weights", "step, peak", "process, peak")
IDEAL = "Ideal: every rank its own rows and pieces of attention, with no messages."
ABOUT_PARTS = (
    "attention: with merging. MLP, projections: with whatever else works token by token, and what every rank does for "
    "the whole video before and after the blocks. communication: blocked by a message on its way. waiting: for a rank "
    "that has not sent or finished yet."
)
ABOUT_PREDICTED = (
    "Context parallelism alone in bf16, the same layers and batch. docs/plan.md says how far off such predictions are: "
    "work of less than some milliseconds takes several times as long."
)


def print_video(result: VideoResult, console: Console) -> None:
    """Print the whole report."""
    page = Page(console)
    page.console.print(Text(title_of(result), "bold"))
    page.facts(facts_of(result))
    _print_times(page, result)
    _print_breakdown(page, result)
    _print_memory(page, result)
    _print_predicted(page, result.predicted)
    page.console.print()
    mark, style = ("✓", "green") if result.is_verified else ("✗ Wrong:", "bold red")
    page.console.print(Text(f"{mark} {checked_of(result)}", style))


def title_of(result: VideoResult) -> str:
    """One line."""
    return f"A denoising step of {result.settings.model} on {format_count(result.world_size, 'rank')}, measured"


def facts_of(result: VideoResult) -> list[tuple[str, str]]:
    """What was measured, where."""
    s, machine = result.settings, result.machine
    shapes = s.shapes
    width = f"{format_count(shapes.num_heads, 'head')} of {shapes.head_dim}, width {shapes.hidden_size:,}"
    of = f"{s.layers} of {format_count(shapes.layers, 'layer')}"
    parameters = format_count(result.num_parameters, "parameter")
    video = f"{format_count(s.frames, 'frame')} of {s.height}×{s.width} pixels: {result.num_tokens:,} tokens"
    return [
        ("model", f"{of}, {width}; {parameters}, random, seed {s.seed}"),
        ("learned", f"{result.plan}; in {format_seconds(result.learned_s)}"),
        ("video", f"{video}, {s.video.text_tokens:,} of text, batch {s.batch}, {s.dtype}"),
        ("ranks", f"{s.algorithm.replace('_', '-')}, transport {result.transport}, a thread per rank"),
        ("machine", f"{machine.device}, {format_count(machine.cores, 'core')}, torch {machine.torch}"),
    ]


def times_of(result: VideoResult) -> tuple[list[str], list[list[str]]]:
    """The columns and the row of the times."""
    columns = [">one process", f">{format_count(result.world_size, 'rank')}", ">ideal", ">speedup", ">of the ideal"]
    medians = [format_seconds(it.median_s) for it in (result.one_process, result.ranks, result.ideal)]
    row = [*medians, format_spread(result.speedup, "{:.2f}"), format_spread(result.share_of_ideal, "{:.1%}")]
    if result.share_of_ideal_cpu is None:
        return columns, [row]
    return [*columns, ">in processor time"], [[*row, format_spread(result.share_of_ideal_cpu, "{:.1%}")]]


def parts_of(part: Breakdown) -> list[str]:
    """Seconds and shares."""
    seconds = (part.attention_s + part.merge_s, part.other_s, part.communication_s, part.waiting_s)
    return [f"{format_seconds(second)} {second / part.total_s:4.0%}" for second in seconds]


def memory_of(memory: StepMemory) -> list[str]:
    """Megabytes."""
    numbers = (memory.weights, memory.peak, memory.process_peak)
    return ["" if number is None else f"{number / 1e6:,.1f} MB" for number in numbers]


def predicted_of(it: PredictedStep) -> list[str]:
    """The row of one number of devices."""
    size = f"{it.device_bytes / 1e9:,.3g} GB"
    return [it.devices.replace("x", "×", 1), it.setup, format_seconds(it.seconds), size, "" if it.fits else "no"]


def checked_of(result: VideoResult) -> str:
    """Whether it is right, in a sentence."""
    check = result.check
    error = "not finite" if check.max_error is None else f"{check.max_error:.1e}"
    return (
        f"The output of every rank is {error} off {check.reference}, in units of the largest number; at most "
        f"{check.tolerance:.1e} is accepted."
    )


def about_times(result: VideoResult) -> str:
    """How the times were taken."""
    repeats = format_count(result.settings.repeats, "repeat")
    return (
        f"Medians of {repeats}, interleaved, with the lowest and the highest ratio; a rank computes with one thread, "
        f"and so does the one process, which runs the unmodified model. {IDEAL} Where other programs run too, compare "
        "processor time."
    )


def _print_times(page: Page, result: VideoResult) -> None:
    page.section("How fast")
    columns, rows = times_of(result)
    table = new_table(*columns)
    for row in rows:
        table.add_row(*row)
    page.show(table)
    page.prose(about_times(result))


def _print_breakdown(page: Page, result: VideoResult) -> None:
    page.section("Where the time goes")
    table = new_table("rank", *(f">{name}" for name in PARTS), ">all")
    for rank, part in enumerate(result.by_rank[:TABLE_RANKS]):
        table.add_row(str(rank), *parts_of(part), format_seconds(part.total_s))
    page.show(table)
    page.note_hidden(result.world_size)
    page.prose(ABOUT_PARTS)


def _print_memory(page: Page, result: VideoResult) -> None:
    page.section("Memory")
    table = new_table("", *(f">{name}" for name in MEMORY))
    table.add_row("one process", *memory_of(result.one_process_memory))
    for rank, memory in enumerate(result.memory_by_rank[:TABLE_RANKS]):
        table.add_row(f"rank {rank}", *memory_of(memory))
    page.show(table)
    page.note_hidden(result.world_size)
    page.prose("The peak of a step is counted in tensors, above the weights; the process's own includes all libraries.")


def _print_predicted(page: Page, predicted: tuple[PredictedStep, ...]) -> None:
    page.section("The same step on GPUs, as ringspan plan predicts it")
    table = new_table("devices", "fastest", ">time", ">bytes of a device", "fits")
    for it in predicted:
        table.add_row(*predicted_of(it))
    page.show(table)
    page.prose(ABOUT_PREDICTED)

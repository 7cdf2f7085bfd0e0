"""`ringspan bench video`: one denoising step of a video model on ranks, timed, taken apart and checked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from ringspan.bench.result import Breakdown, PredictedStep, StepMemory, VideoResult
from ringspan.bench.settings import SHORT_DTYPES, VIDEO_MODELS, Job, VideoSettings
from ringspan.cli.bench.attention_report import format_spread
from ringspan.cli.bench.options import (
    RunPlace,
    Runs,
    json_option,
    print_json,
    rank_options,
    run_on_ranks,
    run_options,
    show_progress,
)
from ringspan.cli.console import format_count, format_seconds, new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page import TABLE_RANKS, Page, new_table
from ringspan.cli.page_command import command_line
from ringspan.cli.values import FLAT_ALGORITHM, Spelled, parse_sides, parsed_by
from ringspan.page.report import Section, bars, build_report, facts, table
from ringspan.planner.catalog import load_model

EXAMPLES = """\b
Examples:
  ringspan bench video wan2.1-1.3b --frames 17 --size 240x416 --layers 2
  ringspan bench video hunyuanvideo --frames 5 --size 160x256 --ranks 4 --html video.html
"""
DTYPES = ["float32", "bfloat16"]


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("name", metavar="MODEL", type=click.Choice(VIDEO_MODELS))
@rank_options
@click.option("--frames", type=click.IntRange(1), help="Frames of the video.  [default: as the model's usual clip]")
@click.option(
    "--size",
    callback=parsed_by(parse_sides),
    metavar="HEIGHTxWIDTH",
    help="Size in pixels.  [default: as the model's usual clip]",
)
@click.option("--layers", type=click.IntRange(1), default=2, help="Blocks; the widths are the model's own.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Rows; 2 with guidance in one call.")
@click.option("--algorithm", type=FLAT_ALGORITHM, default="pass-kv", help="How attention runs.")
@click.option("--dtype", type=Spelled(DTYPES, SHORT_DTYPES), default="float32", help="Dtype; also bf16.")
@run_options(repeats=3)
@click.option("--html", type=OutputFile(".html"), help="Write the same as a page.")
@json_option
@click.pass_context
def video(
    ctx: click.Context,
    *,
    name: str,
    place: RunPlace,
    frames: int | None,
    size: tuple[int, int] | None,
    layers: int,
    batch: int,
    algorithm: str,
    dtype: str,
    runs: Runs,
    html: Path | None,
    as_json: bool,
) -> None:
    """Time one denoising step of a video model with random weights.

    The transformer of diffusers is parallelized as it is. Compares the ranks with one process and with the ideal
    without messages, and prints what ringspan plan expects of GPUs.
    """
    known = load_model(name).video
    assert known is not None
    assert known.usual is not None
    usual_frames, *usual_sides = known.usual
    height, width = size or usual_sides
    settings = VideoSettings(
        model=name,
        frames=frames or usual_frames,
        height=height,
        width=width,
        layers=layers,
        batch=batch,
        dtype=dtype,
        algorithm=algorithm.replace("-", "_"),
        timeout_s=place.timeout_s,
        **runs._asdict(),
    )
    with show_progress() as progress:
        job = Job("video", place.carrier, place.world_size, place.timeout_s, video=settings)
        result: VideoResult | None = run_on_ranks(job, place.launched, progress)
    if result is None:
        return  # not rank 0
    from ringspan.bench.predict import predict_step_on_gpus

    result = dataclasses.replace(result, predicted=predict_step_on_gpus(settings))
    if html is not None:
        write_text(html, build_video_page(result, command_line(ctx)))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        print_video(result, new_console())
    if not result.is_verified:
        ctx.exit(1)


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
    return f"A denoising step of {result.settings.model} on {format_count(result.world_size, 'rank')}, measured"


def facts_of(result: VideoResult) -> list[tuple[str, str]]:
    """The settings of the measurement and the machine."""
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
    seconds = (part.attention_s + part.merge_s, part.other_s, part.communication_s, part.waiting_s)
    return [f"{format_seconds(second)} {second / part.total_s:4.0%}" for second in seconds]


def memory_of(memory: StepMemory) -> list[str]:
    numbers = (memory.weights, memory.peak, memory.process_peak)
    return ["" if number is None else f"{number / 1e6:,.1f} MB" for number in numbers]


def predicted_of(it: PredictedStep) -> list[str]:
    """The table row of one number of devices."""
    size = f"{it.device_bytes / 1e9:,.3g} GB"
    return [it.devices.replace("x", "×", 1), it.setup, format_seconds(it.seconds), size, "" if it.fits else "no"]


def checked_of(result: VideoResult) -> str:
    """A sentence that says whether the output is right."""
    check = result.check
    error = "not finite" if check.max_error is None else f"{check.max_error:.1e}"
    return (
        f"The output of every rank is {error} off {check.reference}, in units of the largest number; at most "
        f"{check.tolerance:.1e} is accepted."
    )


def about_times(result: VideoResult) -> str:
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


def build_video_page(result: VideoResult, command: str) -> str:
    verdict = "Right" if result.is_verified else "WRONG"
    return build_report(title_of(result), [f"{verdict}: {checked_of(result)}"], _sections(result), command)


def _sections(result: VideoResult) -> Iterator[Section]:
    yield facts("measured", "What was measured", facts_of(result))
    yield table("times", "How fast", *times_of(result), about_times(result))
    rows = [
        (str(rank), *parts_of(part), (format_seconds(part.total_s), part.total_s))
        for rank, part in enumerate(result.by_rank)
    ]
    yield table("parts", "Where the time goes", ["rank", *(f">{name}" for name in PARTS), ">all"], rows, ABOUT_PARTS)
    memories = {"one process": result.one_process_memory}
    memories |= {f"rank {rank}": memory for rank, memory in enumerate(result.memory_by_rank)}
    stacked = [(name, (memory.weights, memory.peak)) for name, memory in memories.items()]
    yield bars("tensors", "Memory of a step", MEMORY[:2], stacked)
    rows_of_memory = [(name, *memory_of(memory)) for name, memory in memories.items()]
    yield table("memory", "Memory in numbers", ["", *(f">{name}" for name in MEMORY)], rows_of_memory)
    columns = ["devices", "fastest", ">time", ">bytes of a device", "fits"]
    yield table("gpus", "The same step on GPUs", columns, map(predicted_of, result.predicted), ABOUT_PREDICTED)

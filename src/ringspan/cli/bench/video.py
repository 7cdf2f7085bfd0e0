"""`ringspan bench video`: one denoising step of a video model on ranks, timed, taken apart and checked."""

import dataclasses
from pathlib import Path

import click

from ringspan.bench.settings import SHORT_DTYPES, Job
from ringspan.bench.video_result import VideoResult
from ringspan.bench.video_settings import VIDEO_MODELS, VideoSettings
from ringspan.cli.bench.options import RunPlace, Runs, json_option, rank_options, run_options
from ringspan.cli.bench.ranks import print_json, run_on_ranks, show_progress
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page_command import command_line
from ringspan.cli.values import Spelled, parse_sides, parsed_by
from ringspan.planner.catalog import load_model

EXAMPLES = """\b
Examples:
  ringspan bench video wan2.1-1.3b --frames 17 --size 240x416 --layers 2
  ringspan bench video hunyuanvideo --frames 5 --size 160x256 --ranks 4 --html video.html
"""
ALGORITHMS = ["pass-kv", "pass-q", "all-gather", "ulysses"]
DTYPES = ["float32", "bfloat16"]


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("name", metavar="MODEL", type=click.Choice(VIDEO_MODELS))
@rank_options
@click.option("--frames", type=click.IntRange(1), help="Of the video.  [default: as the model's usual clip]")
@click.option(
    "--size",
    callback=parsed_by(parse_sides),
    metavar="HEIGHTxWIDTH",
    help="In pixels.  [default: as the model's usual clip]",
)
@click.option("--layers", type=click.IntRange(1), default=2, help="Blocks; the widths are the model's own.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Rows; 2 with guidance in one call.")
@click.option("--algorithm", type=Spelled(ALGORITHMS), default="pass-kv", help="How attention runs.")
@click.option("--dtype", type=Spelled(DTYPES, SHORT_DTYPES), default="float32", help="Or bf16.")
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
    from ringspan.bench.on_gpus import predict_step_on_gpus

    result = dataclasses.replace(result, predicted=predict_step_on_gpus(settings))
    if html is not None:
        from ringspan.cli.bench.video_page import build_video_page

        write_text(html, build_video_page(result, command_line(ctx)))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        from ringspan.cli.bench.video_text import print_video

        print_video(result, new_console())
    if not result.is_verified:
        ctx.exit(1)

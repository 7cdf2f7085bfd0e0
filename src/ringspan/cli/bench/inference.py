"""`ringspan bench prefill` and `ringspan bench decode`: attention against a KV cache, timed and checked."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import click

from ringspan.bench.inference_result import InferenceResult
from ringspan.bench.settings import InferenceSettings, Job
from ringspan.cli.bench.options import (
    ModelSizes,
    RunPlace,
    Runs,
    html_option,
    json_option,
    rank_options,
    run_options,
    size_options,
)
from ringspan.cli.bench.ranks import print_json, run_on_ranks, show_progress
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page_command import command_line

PREFILL_EXAMPLE = """\b
Example:
  ringspan bench prefill --tokens 8K --heads 8 --kv-heads 2 --plot prefill.svg
"""
DECODE_EXAMPLE = """\b
Example:
  ringspan bench decode --tokens 64K --heads 8 --kv-heads 2 --batch 8
"""


class Shown(NamedTuple):
    """What becomes of a result, besides or instead of the report on the terminal."""

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
        from ringspan.cli.bench.inference_page import build_inference_page

        write_text(shown.html, build_inference_page(result, command_line(ctx)))
    show_inference(result, shown.plot, shown.as_json, new_console())
    if not result.is_verified:
        ctx.exit(1)


def show_inference(result: InferenceResult, plot: Path | None, as_json: bool, console: Any) -> None:
    """Print the result, and draw it if asked for."""
    from ringspan.cli.bench.inference_text import plot_inference, print_inference

    if plot is not None:
        write_text(plot, plot_inference(result))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        print_inference(result, console)

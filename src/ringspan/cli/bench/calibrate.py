"""`ringspan bench calibrate FILE`: how fast is this machine, in the terms of `ringspan plan`?"""

import dataclasses
from pathlib import Path

import click

from ringspan.bench.calibration import Calibration, format_calibration
from ringspan.bench.settings import CalibrationSettings, Job
from ringspan.cli.bench.options import ModelSizes, RunPlace, html_option, json_option, rank_options, size_options
from ringspan.cli.bench.ranks import print_json, run_on_ranks, show_progress
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page_command import command_line

EXAMPLES = """\b
Examples:
  ringspan bench calibrate mine.toml
  ringspan plan --model llama-3.1-8b --devices 2xmine.toml --tokens 16K
  ringspan bench attention --predict mine.toml
"""


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("file", type=OutputFile(".toml"))
@rank_options
@size_options(tokens="8192", batch=4, heads=1, about_tokens="Longest tile")
@html_option
@json_option
@click.pass_context
def calibrate(
    ctx: click.Context, *, file: Path, place: RunPlace, sizes: ModelSizes, html: Path | None, as_json: bool
) -> None:
    """Measure this machine as a device for ringspan plan.

    Writes the speed of tiles and messages to FILE, a .toml file. All ranks work at the same time, since
    cores share memory and power.
    """
    if place.launched is not None:
        raise click.UsageError(f"calibrate starts its own ranks; run it without {place.launched.by}")
    settings = CalibrationSettings(**sizes._asdict())
    with show_progress() as progress:
        job = Job("calibrate", place.carrier, place.world_size, place.timeout_s, calibration=settings)
        calibration: Calibration = run_on_ranks(job, None, progress)
    write_text(file, format_calibration(calibration))
    if html is not None:
        from ringspan.cli.bench.calibration_page import build_calibration_page

        write_text(html, build_calibration_page(calibration, settings, file, command_line(ctx)))
    if as_json:
        print_json(
            {"file": str(file)} | dataclasses.asdict(calibration) | {"attention": calibration.attention._asdict()}
        )
    else:
        from ringspan.cli.bench.calibration_text import print_calibration

        print_calibration(calibration, file, new_console())

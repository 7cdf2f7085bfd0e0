"""`ringspan bench calibrate FILE`: how fast is this machine, in the terms of `ringspan plan`?"""

import dataclasses
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from ringspan.bench.calibration import Calibration, format_calibration
from ringspan.bench.settings import DTYPES, CalibrationSettings, Job
from ringspan.cli.bench.options import (
    ModelSizes,
    RunPlace,
    html_option,
    json_option,
    print_json,
    rank_options,
    run_on_ranks,
    show_progress,
    size_options,
)
from ringspan.cli.console import format_seconds, new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page import Page
from ringspan.cli.page_command import command_line
from ringspan.page.report import Section, build_report, chart, curves, facts, text
from ringspan.planner.catalog import Device, load_device
from ringspan.planner.cost import Shard, message_s, tile_s
from ringspan.planner.software import RINGSPAN

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
        write_text(html, build_calibration_page(calibration, settings, file, command_line(ctx)))
    if as_json:
        print_json(
            {"file": str(file)} | dataclasses.asdict(calibration) | {"attention": calibration.attention._asdict()}
        )
    else:
        print_calibration(calibration, file, new_console())


def print_calibration(calibration: Calibration, file: Path, console: Console) -> None:
    """Print the curves of one rank and the commands that read the file."""
    page = Page(console)
    console.print(Text(f"One rank of this machine ({calibration.about}), measured", "bold"))
    rate, latency_s = calibration.link
    page.facts(
        [
            ("attention", f"{calibration.attention.flops_per_s / 1e9:,.3g} GFLOP/s ({calibration.attention.kernel})"),
            ("matrix products", f"{calibration.dense_flops_per_s / 1e9:,.3g} GFLOP/s"),
            ("memory", f"{calibration.memory_bytes_per_s / 1e9:,.3g} GB/s"),
            ("messages", f"{rate / 1e9:,.3g} GB/s after {format_seconds(latency_s)}"),
        ]
    )
    page.prose(
        "Plan for this machine, or compare the prediction with a measured run:",
    )
    page.show(
        Text(f"ringspan plan --model llama-3.1-8b --devices {calibration.node_size}x{file} --tokens 16K"),
        Text(f"ringspan bench attention --predict {file}"),
    )


def build_calibration_page(calibration: Calibration, settings: CalibrationSettings, file: Path, command: str) -> str:
    """One HTML file; `file` holds the calibrated device as ringspan plan reads it."""
    device = load_device(str(file))
    charts = [_tiles(calibration, settings, device)]
    if calibration.messages:
        charts.append(_messages(calibration, device))
    lead = ["Lines are what ringspan plan computes from the file; circles are what was measured."]
    sections = [
        _rates(calibration),
        curves("curves", "Measured against fitted", charts, lead),
        text(
            "use",
            "Plan with it",
            ["Plan for this machine, or compare the prediction with a measured run:"],
            _uses(calibration, file),
        ),
    ]
    return build_report("This machine, calibrated", [f"One rank of it: {calibration.about}."], sections, command)


def _rates(calibration: Calibration) -> Section:
    rate, latency_s = calibration.link
    rows = [
        ("attention", f"{calibration.attention.flops_per_s / 1e9:,.3g} GFLOP/s ({calibration.attention.kernel})"),
        ("matrix products", f"{calibration.dense_flops_per_s / 1e9:,.3g} GFLOP/s"),
        ("memory", f"{calibration.memory_bytes_per_s / 1e9:,.3g} GB/s"),
        ("messages", f"{rate / 1e9:,.3g} GB/s after {format_seconds(latency_s)}"),
    ]
    return facts("rates", "What one rank reaches while the others are busy too", rows)


def _tiles(calibration: Calibration, settings: CalibrationSettings, device: Device) -> Section:
    shard = Shard.dense(
        settings.batch,
        settings.num_heads,
        settings.num_kv_heads,
        settings.head_dim,
        DTYPES[settings.dtype].itemsize,
        RINGSPAN,
    )
    lines, dots = [], []
    for kind in dict.fromkeys(kind for kind, _, _ in calibration.tiles):
        measured = [(n, seconds) for one, n, seconds in calibration.tiles if one == kind]
        form = {"is_causal": kind.startswith("causal"), "is_backward": kind.endswith("backward")}
        fitted = [(n, tile_s(device, shard, n, n, **form)) for n, _ in measured]
        lines.append((f"{kind} tile", fitted))
        dots.append((f"{kind} tile", measured))
    return chart("A tile of n queries and n keys", "tokens", lines, dots=dots)


def _messages(calibration: Calibration, device: Device) -> Section:
    fitted = [(nbytes, message_s(device.near, nbytes)) for nbytes, _ in calibration.messages]
    measured = list(calibration.messages)
    return chart("A message to the next rank", "bytes", [("message", fitted)], dots=[("message", measured)])


def _uses(calibration: Calibration, file: Path) -> str:
    return (
        f"ringspan plan --model llama-3.1-8b --devices {calibration.node_size}x{file} --tokens 16K\n"
        f"ringspan bench attention --predict {file} --html bench.html"
    )

"""`ringspan bench attention`: one attention call on real ranks, timed, taken apart and checked."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from ringspan import __version__
from ringspan.algorithms import Direction, Mesh
from ringspan.bench.result import Measured
from ringspan.bench.settings import Job, Settings
from ringspan.cli.bench.options import (
    ModelSizes,
    RunPlace,
    Runs,
    html_option,
    json_option,
    print_json,
    rank_options,
    run_on_ranks,
    run_options,
    show_progress,
    size_options,
)
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_json, write_text
from ringspan.cli.page_command import command_line
from ringspan.cli.values import (
    ALGORITHM,
    check_layout,
    check_mask,
    check_options,
    direction_option,
    layout_option,
    mask_option,
    mesh_option,
)
from ringspan.errors import RingspanError
from ringspan.mask import Mask
from ringspan.planner.catalog import Device
from ringspan.program.reproducible.tree import TILE
from ringspan.simulate.lesson import LayoutChoice

EXAMPLES = """\b
Examples:
  ringspan bench attention --tokens 8K --heads 8 --kv-heads 2 --head-dim 128 --dtype bf16
  ringspan bench attention --mask "causal & window:1024" --layout balanced --trace trace.json
  ringspan bench attention --backward --reproducible --tokens 8K --heads 8
  ringspan bench attention --ranks 4 --algorithm double-ring --mesh 2x2
"""


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@rank_options
@size_options(tokens="16384", batch=4, heads=1)
@run_options(repeats=5)
@mask_option
@layout_option
@click.option("--algorithm", type=ALGORITHM, default="pass-kv", help="What to run.")
@direction_option
@mesh_option
@click.option("--backward", "has_backward", is_flag=True, help="Measure the gradients as well.")
@click.option("--reproducible", is_flag=True, help="Use the mode whose bits do not depend on the ranks; compare them.")
@click.option("--trace", type=OutputFile(), help="Write what every rank did, and when, as a trace for ui.perfetto.dev.")
@html_option
@click.option(
    "--predict",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Print what ringspan plan predicts with a file of ringspan bench calibrate.",
)
@json_option
@click.pass_context
def attention(
    ctx: click.Context,
    *,
    place: RunPlace,
    sizes: ModelSizes,
    runs: Runs,
    mask: Mask,
    layout: LayoutChoice,
    algorithm: str,
    direction: Direction | None,
    mesh: Mesh | None,
    has_backward: bool,
    reproducible: bool,
    trace: Path | None,
    html: Path | None,
    predict: Path | None,
    as_json: bool,
) -> None:
    """Time one attention call on several ranks.

    Prints the speedup over one device, the share of the ideal, where the time goes, the bytes sent and the memory used.
    """
    name = algorithm.replace("-", "_")
    check_options((name,), direction, mesh, place.world_size)
    check_mask(mask, sizes.seq_len)
    check_layout(layout, reproducible)
    device = None if predict is None else _load_device(predict, reproducible)
    settings = Settings(
        **sizes._asdict(),
        **runs._asdict(),
        mask=mask,
        layout=layout.build(mask, sizes.seq_len, place.world_size, align=TILE if reproducible else 1),
        layout_name=str(layout),
        algorithm=name,
        direction=direction,
        mesh=mesh,
        has_backward=has_backward,
        carrier=place.carrier,
        timeout_s=place.timeout_s,
        reproducible=reproducible,
    )
    with show_progress() as progress:
        job = Job("measure", place.carrier, place.world_size, place.timeout_s, settings)
        measured: Measured | None = run_on_ranks(job, place.launched, progress)
    if measured is None:
        return  # not rank 0
    predicted = None
    if device is not None:
        from ringspan.bench.predict import predict_pass

        passes = [predict_pass(settings, device, side) for side in settings.passes()]
        predicted_s = sum(timeline.makespan_s for timeline in passes)
        measured = measured._replace(result=dataclasses.replace(measured.result, predicted_s=predicted_s))
        predicted = None if has_backward else passes[0]  # a page lays one pass over the measured one
    if trace is not None:
        write_json(trace, _trace(measured))
    if html is not None:
        from ringspan.cli.bench.attention_report import build_attention_page

        write_text(html, build_attention_page(measured, _trace(measured), predicted, command_line(ctx)))
    if as_json:
        print_json({"is_verified": measured.result.is_verified} | dataclasses.asdict(measured.result))
    else:
        from ringspan.cli.bench.attention_report import print_bench

        print_bench(measured.result, new_console())
    if not measured.result.is_verified:
        ctx.exit(1)


def _load_device(path: Path, reproducible: bool) -> Device:
    """The calibrated device, refused before the measurement rather than after it."""
    from ringspan.planner.catalog import load_device

    if reproducible:
        raise click.UsageError("--predict covers the default mode only; leave out --reproducible")
    if path.suffix != ".toml":
        raise click.UsageError(f"--predict {path}: ringspan bench calibrate writes a .toml file; give that one")
    try:
        return load_device(str(path))
    except RingspanError as error:
        raise click.UsageError(f"--predict: {error}") from error


def _trace(measured: Measured) -> dict[str, Any]:
    from ringspan.cli.trace import build_trace

    about = {"ringspan": __version__, **dataclasses.asdict(measured.result.parameters)}
    return build_trace(measured.activities, about)

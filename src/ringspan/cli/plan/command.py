"""`ringspan plan`: will it fit, how long will it take, which algorithm, and why?"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ringspan import __version__
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_json, write_text
from ringspan.cli.page_command import command_line
from ringspan.cli.values import parse_tokens, parsed_by
from ringspan.errors import RingspanError

if TYPE_CHECKING:
    from ringspan.planner.catalog import Model
    from ringspan.planner.plan import Plan, Request

EXAMPLES = """\b
Examples:
  ringspan plan --model llama-3.1-405b --devices 16x8xh100 --tokens 1M --weights fp8
  ringspan plan --model llama-3.1-8b --devices 8xh100 --tokens 4K --cached 124K --explain
  ringspan plan --model wan2.1-14b --frames 81 --size 720x1280 --devices 8xh100
  ringspan plan --model ./config.json --devices 2x8xa100 --tokens 128K --phase train --fsdp
  ringspan plan --model dense:layers=16,heads=32,head_dim=128,mlp=16384 --batch 128 --tokens 100000 --devices 16xh100
  ringspan plan --model llama-3.1-8b --devices 2xmine.toml --tokens 16K    (mine.toml: ringspan bench calibrate)
  ringspan plan --check
"""


class _PlanCommand(Command):
    """Ends its help with the names of the catalogue, which is read only then."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, then the names."""
        super().format_epilog(ctx, formatter)
        from ringspan.planner.catalog import device_names, load_device, load_model, model_names

        for title, names in (
            ("Models", _usable(model_names(), load_model)),
            ("Devices", _usable(device_names(), load_device)),
        ):
            formatter.write_paragraph()
            formatter.write_text(f"{title}: {', '.join(names)}")


def _usable(names: Iterable[str], load: Callable[[str], object]) -> list[str]:
    """The names whose entries have all figures that a plan needs."""
    usable = []
    for name in names:
        try:
            load(name)
        except RingspanError:
            continue
        usable.append(name)
    return usable


@click.command(cls=_PlanCommand, epilog=EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--model", metavar="NAME", help="Of the catalogue, a path of a config.json, or dense:layers=...,heads=..."
)
@click.option("--devices", metavar="[NODESx]COUNTxDEVICE", help="Such as 8xh100, 16x8xh100 or 2xFILE.toml.")
@click.option(
    "--tokens",
    callback=parsed_by(parse_tokens),
    metavar="N",
    help="New tokens of a sequence; in decode, the length of its cache. 1M is 2^20.",
)
@click.option("--cached", callback=parsed_by(parse_tokens), metavar="P", help="In prefill: tokens cached already.")
@click.option("--frames", type=click.IntRange(1), help="Of a video, instead of --tokens.")
@click.option("--size", metavar="HEIGHTxWIDTH", help="Of a video, in pixels.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Sequences; 2 for a video with guidance.")
@click.option("--phase", type=click.Choice(["prefill", "decode", "train", "denoise"]), help="[default: by the model]")
@click.option("--tp", type=click.IntRange(1), help="Tensor parallelism.  [default: all that fit in a node are tried]")
@click.option("--wire", type=click.Choice(["bf16", "int8", "fp8"]), default="bf16", help="K and V on their way.")
@click.option("--weights", type=click.Choice(["bf16", "fp8", "int8", "int4"]), default="bf16", help="Of the model.")
@click.option("--kernel", type=click.Choice(["fa2", "fa3"]), help="Attention kernel.  [default: by the device]")
@click.option("--network", metavar="LINK", help="Between nodes, such as infiniband-hdr.  [default: by the device]")
@click.option("--recompute/--no-recompute", default=True, help="In training: activations anew in the backward pass.")
@click.option("--fsdp", is_flag=True, help="In training: spread weights and optimizer over all ranks.")
@click.option("--explain", is_flag=True, help="Show the formulas with the numbers put in.")
@click.option("--trace", type=OutputFile(), help="Write the timeline, for ui.perfetto.dev.")
@click.option("--plot", type=OutputFile(".svg"), help="Write time against length and devices, SVG.")
@click.option("--html", type=OutputFile(".html"), help="Write the plan as an interactive page.")
@click.option("--check", is_flag=True, help="Hold predictions against published measurements instead.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_context
def plan(ctx: click.Context, /, check: bool, as_json: bool, **options: Any) -> None:
    """Say what a model will need and how long it will take, before any device is rented.

    Memory of a device, time of every algorithm, layout and degree, the bottleneck by name, and where another way would
    win. Times are ranges, as wide as published measurements lie apart from predictions. Needs neither GPU nor torch.
    """
    if check:
        _refuse_others(ctx)
        _run_check(ctx, as_json)
        return
    for name in ("model", "devices"):
        if options[name] is None:
            raise click.UsageError(f"--{name} is missing; try --model llama-3.1-8b --devices 8xh100 --tokens 128K")
    from ringspan.planner.plan import build_plan

    request = _request(options)
    if request.phase != "train" and ctx.get_parameter_source("recompute") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--recompute and --no-recompute are for --phase train alone; leave them out")
    from rich.console import Console

    with Console(stderr=True).status("Planning"):  # a sign of life, if a terminal is watching
        answer = build_plan(request)
    if options["trace"] is not None:
        _write_trace(answer, options["trace"])
    if options["plot"] is not None:
        from ringspan.cli.plan.plot import plot_plan

        write_text(options["plot"], plot_plan(answer))
    if options["html"] is not None:
        from ringspan.page import build_plan_page

        write_text(options["html"], build_plan_page(answer, command_line(ctx)))
    if as_json:
        from ringspan.cli.plan.as_json import plan_as_json

        click.echo(json.dumps({"version": __version__, **plan_as_json(answer)}, indent=2, allow_nan=False))
        return
    from ringspan.cli.plan.text import print_plan

    print_plan(answer, new_console(), explains=options["explain"])


def _refuse_others(ctx: click.Context) -> None:
    """Refuse options that --check does not read."""
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if is_given and param.name not in ("check", "as_json"):
            raise click.UsageError(f"{param.opts[0]} has no meaning for --check; leave it out")


def _request(options: dict[str, Any]) -> "Request":
    from ringspan.planner.catalog import load_model, parse_devices
    from ringspan.planner.plan import Phase, Request

    model = load_model(options["model"])
    cluster = parse_devices(options["devices"], options["network"], options["kernel"])
    phase: Phase = options["phase"] or ("prefill" if model.video is None else "denoise")
    return Request(
        model=model,
        cluster=cluster,
        phase=phase,
        tokens=_tokens(model, options),
        cached_tokens=options["cached"] or 0,
        batch=options["batch"],
        tp=options["tp"],
        wire=options["wire"],
        weights=options["weights"],
        recomputes=options["recompute"],
        shards_weights=options["fsdp"],
    )


def _tokens(model: "Model", options: dict[str, Any]) -> int:
    """The tokens that were asked for, or those of the video that was."""
    if model.video is None:
        for name in ("frames", "size"):
            if options[name] is not None:
                raise click.UsageError(f"--{name}: {model.id} is not a video model; give --tokens")
        if options["tokens"] is None:
            raise click.UsageError("--tokens is missing; give the length of the sequence, such as --tokens 128K")
        return int(options["tokens"])
    if options["tokens"] is not None:
        if options["frames"] is not None or options["size"] is not None:
            raise click.UsageError("--tokens together with --frames or --size; give one of them")
        return int(options["tokens"])
    usual = model.video.usual
    if usual is None and (options["frames"] is None or options["size"] is None):
        raise click.UsageError(
            f"--frames and --size are missing, and no usual size of {model.id} is known; give both, or --tokens"
        )
    usual_frames, *usual_size = usual or (0, 0, 0)
    height, width = _parse_size(options["size"]) if options["size"] else usual_size
    return model.video.count_tokens(options["frames"] or usual_frames, height, width)


def _parse_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text.strip())
    if found is None:
        raise click.UsageError(f"--size {text}: expected a size; use HEIGHTxWIDTH, such as 720x1280")
    return int(found[1]), int(found[2])


def _write_trace(answer: "Plan", path: Path) -> None:
    from ringspan.cli.plan.trace import trace_plan

    write_json(path, trace_plan(answer, {"ringspan": __version__}))


def _run_check(ctx: click.Context, as_json: bool) -> None:
    from ringspan.planner.published import run_check

    result = run_check()
    if as_json:
        click.echo(json.dumps({"version": __version__, **dataclasses.asdict(result)}, indent=2, allow_nan=False))
    else:
        from ringspan.cli.plan.check_text import print_check

        print_check(result, new_console())
    if not result.is_passed:
        ctx.exit(1)

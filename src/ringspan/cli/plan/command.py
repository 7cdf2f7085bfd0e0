"""`ringspan plan`: will it fit, how long will it take, which algorithm, and why?"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ringspan import __version__
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import write_json, write_text
from ringspan.cli.page_command import command_line
from ringspan.cli.plan.options import (
    device_options,
    fill_in,
    output_options,
    parse_prices,
    parse_sweep,
    parse_time,
    question_options,
    request_of,
    split_options,
    work_options,
)
from ringspan.errors import RingspanError

if TYPE_CHECKING:
    from ringspan.planner.catalog import Cluster
    from ringspan.planner.plan import Plan, Request

NO_FIT = 3  # exit code: nothing fits, or nothing answers the question
QUESTIONS = ("target_ttft", "max_context", "max_batch", "sweep")

EXAMPLES = """\b
Examples:
  ringspan plan --model llama-3.1-405b --devices 16x8xh100 --tokens 1M --weights fp8
  ringspan plan --model llama-3.1-8b --devices 8xh100 --tokens 4K --cached 124K --explain
  ringspan plan --model wan2.1-14b --frames 81 --size 720x1280 --devices 8xh100 --software diffusers
  ringspan plan --model ./config.json --devices 2x8xa100 --tokens 128K --phase train --fsdp
  ringspan plan --model llama-3.1-70b --devices 8xh100 --tokens 128K --target-ttft 10s --price h100=2.5
  ringspan plan --model llama-3.1-8b --devices 8xh100 --tokens 128K --sweep tokens=64K,1M devices=8xh100,2x8xh100
  ringspan plan --model llama-3.1-8b --devices 2xmine.toml --tokens 16K    (mine.toml: ringspan bench calibrate)
  ringspan plan --check
"""


class _PlanCommand(Command):
    """A command whose help ends with the names in the catalogue."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, then the names."""
        super().format_epilog(ctx, formatter)
        from ringspan.planner.catalog import device_names, load_device, load_model, model_names
        from ringspan.planner.software import SOFTWARE

        for title, names in (
            ("Models", _usable(model_names(), load_model)),
            ("Devices", _usable(device_names(), load_device)),
            ("Software", list(SOFTWARE)),
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
@work_options
@device_options
@split_options
@question_options
@output_options
@click.argument("swept", nargs=-1, metavar="")
@click.pass_context
def plan(ctx: click.Context, /, check: bool, rows: str | None, as_json: bool, **options: Any) -> None:
    """Predict time and memory before you rent devices.

    Memory of a device, time of every algorithm, layout and degree, the bottleneck by name, and where another way would
    win. Times are ranges that hold 80 % of published runs; ways too close to call are called ties. Needs neither GPU
    nor torch. Exits with 3 where nothing fits.
    """
    if check:
        _refuse_others(ctx)
        _run_check(ctx, rows, as_json)
        return
    fill_in(options)
    _check_options(rows, options)
    request = request_of(options)
    if request.phase != "train" and ctx.get_parameter_source("recompute") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--recompute and --no-recompute are for --phase train alone; leave them out")
    if options["target_ttft"] and request.phase != "prefill":
        raise click.UsageError(f"--target-ttft is for prefill, and the phase is {request.phase}; leave it out")
    lengths, clusters = [request.tokens], [request.cluster]
    if options["sweep"] is not None:
        lengths, clusters = parse_sweep(options, request)
    devices = list(dict.fromkeys(cluster.device.id for cluster in clusters))
    prices = parse_prices(options["price"], devices) if options["price"] is not None else {}
    if options["sweep"] is not None:
        _sweep(request, lengths, clusters, options["plot"], prices, as_json)
    elif any(options[name] for name in QUESTIONS):
        _answer(ctx, request, options, prices.get(devices[0]), as_json)
    else:
        _plan(ctx, request, options, prices.get(devices[0]), as_json)


def _refuse_others(ctx: click.Context) -> None:
    """Refuse options that --check does not read."""
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if is_given and param.name not in ("check", "rows", "as_json"):
            raise click.UsageError(f"{param.opts[0]} has no meaning for --check; leave it out")


def _check_options(rows: str | None, options: dict[str, Any]) -> None:
    """Refuse missing options, options that exclude each other, and files that cannot be written."""
    if rows is not None:
        raise click.UsageError("--rows goes with --check")
    if options["swept"] and options["sweep"] is None:
        raise click.UsageError(f"unexpected argument {options['swept'][0]!r}; values to sweep follow --sweep")
    asked = [f"--{name.replace('_', '-')}" for name in QUESTIONS if options[name]]
    if len(asked) > 1:
        raise click.UsageError(f"{' and '.join(asked)} are two questions; ask one at a time")
    missing = "is missing; try --model llama-3.1-8b --devices 8xh100 --tokens 128K"
    if options["model"] is None:
        raise click.UsageError(f"--model {missing}")
    if options["devices"] is None:
        _check_model(options["model"])
        raise click.UsageError(f"--devices {missing}")
    for name in ("trace", "plot", "html", "explain"):
        if asked and options[name] and (name, asked) != ("plot", ["--sweep"]):
            raise click.UsageError(f"--{name} has no meaning for {asked[0]}; leave it out")


def _check_model(name: str) -> None:
    """Refuse an unknown model before a missing option."""
    from ringspan.planner.catalog import load_model

    load_model(name)


def _plan(ctx: click.Context, request: "Request", options: dict[str, Any], price: float | None, as_json: bool) -> None:
    from rich.console import Console

    from ringspan.planner.plan import build_plan, cost_of, fewest_devices

    with Console(stderr=True).status("Planning"):  # a sign of life, if a terminal is watching
        found = build_plan(request)
        enough = None if found.best.fits else fewest_devices(request)
    cost = cost_of(request, found.best, price) if price is not None else None
    if options["trace"] is not None:
        _write_trace(found, options["trace"])
    if options["plot"] is not None:
        from ringspan.cli.plan.files import plot_plan

        write_text(options["plot"], plot_plan(found))
    if options["html"] is not None:
        from ringspan.page import build_plan_page

        write_text(options["html"], build_plan_page(found, command_line(ctx)))
    if as_json:
        from ringspan.cli.plan.answers import as_plain, plan_as_json

        more = {"cost": as_plain(cost), "fewest_devices": enough and enough.request.cluster.num_devices}
        _echo_json({**plan_as_json(found), **more})
    else:
        from ringspan.cli.plan.text import print_plan

        print_plan(found, new_console(), explains=options["explain"], enough=enough, cost=cost)
    if not found.best.fits:
        ctx.exit(NO_FIT)


def _sweep(
    request: "Request",
    lengths: list[int],
    clusters: list["Cluster"],
    plot: Path | None,
    prices: dict[str, float],
    as_json: bool,
) -> None:
    """Print the best way for every length and cluster."""
    from rich.console import Console

    from ringspan.cli.plan.answers import answer_as_json, print_sweep
    from ringspan.planner.plan import sweep

    with Console(stderr=True).status("Planning"):
        answers = list(sweep(request, lengths, clusters))
    if plot is not None:
        from ringspan.cli.plan.files import plot_sweep

        write_text(plot, plot_sweep(answers))
    if as_json:
        found = [answer_as_json(one, prices.get(one.request.cluster.device.id)) for one in answers]
        _echo_json({"question": "sweep", "answers": found})
    else:
        print_sweep(answers, prices, new_console())


def _answer(
    ctx: click.Context, request: "Request", options: dict[str, Any], price: float | None, as_json: bool
) -> None:
    from rich.console import Console

    from ringspan.cli.plan.answers import answer_as_json, print_answer
    from ringspan.planner.plan import fewest_devices, largest_batch, longest_context

    with Console(stderr=True).status("Planning"):
        if options["target_ttft"] is not None:
            found = fewest_devices(request, parse_time("--target-ttft", options["target_ttft"]))
        else:
            found = (longest_context if options["max_context"] else largest_batch)(request)
    question = next(name for name in QUESTIONS if options[name])
    if as_json:
        _echo_json({"question": question, "answers": [] if found is None else [answer_as_json(found, price)]})
    else:
        print_answer(question, request, found, options["target_ttft"], price, new_console())
    if found is None or not found.option.fits:
        ctx.exit(NO_FIT)


def _echo_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps({"version": __version__, **value}, indent=2, allow_nan=False))


def _write_trace(found: "Plan", path: Path) -> None:
    from ringspan.cli.plan.files import trace_plan

    write_json(path, trace_plan(found, {"ringspan": __version__}))


def _run_check(ctx: click.Context, rows: str | None, as_json: bool) -> None:
    from ringspan.planner.published import run_check

    result = run_check(Path(rows) if rows is not None else None)
    if as_json:
        from ringspan.cli.plan.answers import as_plain

        _echo_json({**as_plain(result), "is_passed": result.is_passed})
    else:
        from ringspan.cli.plan.answers import print_check

        print_check(result, new_console())
    if not result.is_passed:
        ctx.exit(1)

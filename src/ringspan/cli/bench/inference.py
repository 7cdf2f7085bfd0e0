"""`ringspan bench --prefill` and `--decode`: what a cache takes, timed and checked."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from ringspan import __version__
from ringspan.bench.inference_result import InferenceResult
from ringspan.bench.settings import InferenceSettings
from ringspan.cli.values import check_writable

_OPTIONS = {
    "ranks", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "kernel", "carrier", "repeats", "seed",
    "timeout_s", "prefill", "decode", "plot", "as_json",
}  # fmt: skip


def refuse_others(ctx: click.Context, allowed: Collection[str], rule: str) -> None:
    """Refuse options on the command line that this way of measuring has no use for."""
    for param in ctx.command.params:
        name = param.name or ""
        if name not in allowed and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{param.opts[0]} {rule}")


def inference_settings(
    ctx: click.Context, prefill: bool, decode: bool, plot: Path | None, *sizes: Any
) -> InferenceSettings:
    """What to measure; options of other measurements are refused."""
    if prefill and decode:
        raise click.UsageError("--prefill and --decode are two measurements; give one of them")
    if not (prefill or decode):
        raise click.UsageError(f"--plot {plot}: it goes with --prefill or --decode")
    phase: Literal["prefill", "decode"] = "prefill" if prefill else "decode"
    allowed = _OPTIONS - ({"batch"} if phase == "prefill" else set())
    refuse_others(ctx, allowed, f"has no meaning for --{phase}; leave it out")
    check_writable(ctx, "--plot", plot)
    return InferenceSettings(phase, *sizes)


def show_inference(result: InferenceResult, plot: Path | None, as_json: bool, console: Any) -> bool:
    """Print, and draw if asked for; whether everything was right."""
    from ringspan.cli.bench.inference_text import plot_inference, print_inference

    if plot is not None:
        plot.write_text(plot_inference(result), encoding="utf-8")
    if as_json:
        report = {"version": __version__, "is_verified": result.is_verified} | dataclasses.asdict(result)
        click.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        print_inference(result, console)
    return result.is_verified

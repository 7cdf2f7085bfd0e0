"""`ringspan bench --transformer`: a whole model, timed, taken apart and checked."""

import dataclasses
import json
from typing import Any

import click
from click.core import ParameterSource

from ringspan import __version__
from ringspan.bench.settings import TransformerSettings
from ringspan.bench.transformer_result import TransformerResult
from ringspan.cli.bench.inference import refuse_others

DEFAULTS = {"tokens": 4096, "batch": 1, "heads": 4, "head_dim": 64, "repeats": 3}
"""Sizes that two cores get through in a minute, where the command's own are for attention alone."""

LAYERS = 4
MLP_RATIO = 4
_OPTIONS = {
    "ranks", "tokens", "batch", "heads", "kv_heads", "head_dim", "dtype", "kernel", "carrier", "repeats", "seed",
    "timeout_s", "transformer", "layers", "mlp", "as_json",
}  # fmt: skip


def refuse_sizes(layers: int | None, mlp: int | None) -> None:
    """Sizes of a model are for a model."""
    for option, value in (("--layers", layers), ("--mlp", mlp)):
        if value is not None:
            raise click.UsageError(f"{option} {value}: it goes with --transformer")


def transformer_settings(ctx: click.Context) -> TransformerSettings:
    """What to measure; options of other measurements are refused."""
    refuse_others(ctx, _OPTIONS, "has no meaning for --transformer; leave it out")
    own = {name: DEFAULTS[name] for name in DEFAULTS if ctx.get_parameter_source(name) is ParameterSource.DEFAULT}
    given = ctx.params | own
    return TransformerSettings(
        layers=given["layers"] or LAYERS,
        num_heads=given["heads"],
        num_kv_heads=given["kv_heads"] or given["heads"],
        head_dim=given["head_dim"],
        mlp_size=given["mlp"] or MLP_RATIO * given["heads"] * given["head_dim"],
        batch=given["batch"],
        seq_len=given["tokens"],
        dtype=given["dtype"],
        kernel=given["kernel"],
        repeats=given["repeats"],
        seed=given["seed"],
        timeout_s=given["timeout_s"],
    )


def show_transformer(result: TransformerResult, as_json: bool, console: Any) -> bool:
    """Print, with what the planner expects of GPUs; whether everything was right."""
    from ringspan.bench.on_gpus import predict_on_gpus

    result = dataclasses.replace(result, predicted=predict_on_gpus(result.settings))
    if as_json:
        report = {"version": __version__, "is_verified": result.is_verified} | dataclasses.asdict(result)
        click.echo(json.dumps(report, indent=2, allow_nan=False))
    else:
        from ringspan.cli.bench.transformer_text import print_transformer

        print_transformer(result, console)
    return result.is_verified

"""`ringspan bench model`: a whole decoder on ranks, timed, taken apart and checked."""

import dataclasses
from pathlib import Path

import click

from ringspan.bench.settings import Job, TransformerSettings
from ringspan.bench.transformer_result import TransformerResult
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
from ringspan.cli.files import write_text
from ringspan.cli.page_command import command_line

MLP_RATIO = 4

EXAMPLE = """\b
Example:
  ringspan bench model --layers 4 --heads 4 --head-dim 64 --mlp 1024 --tokens 8K
"""


@click.command(cls=Command, epilog=EXAMPLE, context_settings={"show_default": True})
@rank_options
@size_options(tokens="4096", batch=1, heads=4)
@run_options(repeats=3)
@click.option("--layers", type=click.IntRange(1), default=4, help="Layers.")
@click.option("--mlp", type=click.IntRange(1), help="Inner size of the MLP.  [default: 4 × heads × head_dim]")
@html_option
@json_option
@click.pass_context
def model(
    ctx: click.Context,
    *,
    place: RunPlace,
    sizes: ModelSizes,
    runs: Runs,
    layers: int,
    mlp: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Time a whole decoder with random weights.

    Measures prefill, training step and decode. Compares the ranks with one process and with the ideal, and
    prints what ringspan plan expects of GPUs.
    """
    settings = TransformerSettings(
        **sizes._asdict(),
        **runs._asdict(),
        layers=layers,
        mlp_size=mlp or MLP_RATIO * sizes.num_heads * sizes.head_dim,
        timeout_s=place.timeout_s,
    )
    with show_progress() as progress:
        job = Job("transformer", place.carrier, place.world_size, place.timeout_s, transformer=settings)
        result: TransformerResult | None = run_on_ranks(job, place.launched, progress)
    if result is None:
        return  # not rank 0
    from ringspan.bench.on_gpus import predict_on_gpus

    result = dataclasses.replace(result, predicted=predict_on_gpus(settings))
    if html is not None:
        from ringspan.cli.bench.model_page import build_model_page

        write_text(html, build_model_page(result, command_line(ctx)))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        from ringspan.cli.bench.model_text import print_transformer

        print_transformer(result, new_console())
    if not result.is_verified:
        ctx.exit(1)

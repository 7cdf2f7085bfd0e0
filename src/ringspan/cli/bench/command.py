"""`ringspan bench`: attention on real ranks, timed, taken apart and checked."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ringspan import __version__
from ringspan.algorithms import Direction, Mesh
from ringspan.bench.launch import Launched, Progress, count_cores, count_gpus, find_launcher
from ringspan.bench.result import Measured, PathCheck
from ringspan.bench.settings import CARRIERS, DTYPES, SHORT_DTYPES, Carrier, Job, Settings
from ringspan.cli.bench.inference import inference_settings, refuse_others, show_inference
from ringspan.cli.bench.ranks import count_ranks, default_carrier, run_on_ranks, show_progress
from ringspan.cli.bench.transformer import DEFAULTS, refuse_sizes, show_transformer, transformer_settings
from ringspan.cli.console import new_console
from ringspan.cli.values import (
    ALGORITHM,
    MASK_FORMS,
    OptionOfSome,
    OutputFile,
    Spelled,
    check_layout,
    check_mask,
    check_options,
    check_writable,
    parse_layout,
    parse_mask,
    parse_mesh,
    parse_seconds,
    parse_tokens,
    parsed_by,
)
from ringspan.errors import RingspanError
from ringspan.mask import Mask
from ringspan.program.reproducible.tree import TILE
from ringspan.simulate.lesson import MAX_HEADS, LayoutChoice

MAX_RANKS = 1024
MAX_TOKENS = 2**26
"""More than one command could start, or get through in a day; so that a slip is refused, not tried."""

WITH_SELFCHECK = {"selfcheck", "as_json", "timeout_s"}

EXAMPLES = """\b
Examples:
  ringspan bench
  ringspan bench --tokens 8K --heads 8 --kv-heads 2 --head-dim 128 --dtype bfloat16
  ringspan bench --mask "causal & window:1024" --layout balanced --trace trace.json
  ringspan bench --backward --tokens 8K --heads 8
  ringspan bench --reproducible --backward --tokens 8K --heads 8
  ringspan bench --ranks 4 --algorithm double-ring --mesh 2x2
  torchrun --nproc-per-node 2 --no-python ringspan bench --json
  mpirun -np 2 ringspan bench
  ringspan bench --calibrate mine.toml
  ringspan bench --prefill --tokens 8K --heads 8 --kv-heads 2 --plot prefill.svg
  ringspan bench --decode --tokens 64K --heads 8 --kv-heads 2 --batch 8
  ringspan bench --transformer --layers 4 --heads 4 --head-dim 64 --mlp 1024 --tokens 8K
  ringspan bench --selfcheck
"""


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@click.option(
    "--ranks", type=click.IntRange(1, MAX_RANKS), help="Processes to start.  [default: one per GPU, or per core]"
)
@click.option(
    "--tokens",
    callback=parsed_by(partial(parse_tokens, most=MAX_TOKENS)),
    metavar="N",
    default="16384",
    help="Sequence length; 1M is 2^20.",
)
@click.option("--batch", type=click.IntRange(1), default=4, help="Sequences.")
@click.option("--heads", type=click.IntRange(1, MAX_HEADS), default=1, help="Query heads.")
@click.option(
    "--kv-heads",
    type=click.IntRange(1, MAX_HEADS),
    help="KV heads; they divide the query heads.  [default: as many]",
)
@click.option("--head-dim", type=click.IntRange(1), default=64, help="Elements of a head.")
@click.option(
    "--dtype", type=Spelled(DTYPES, SHORT_DTYPES), default="float32", help="Of q, k and v; bf16, fp16 ... will do."
)
@click.option(
    "--mask",
    callback=parsed_by(parse_mask),
    metavar="MASK",
    default="causal",
    help=f"Who sees whom: {MASK_FORMS}, or several joined by & and |.",
)
@click.option(
    "--layout",
    callback=parsed_by(parse_layout),
    metavar="LAYOUT",
    default="zigzag",
    help="Who holds what: contiguous, zigzag, striped[:BLOCK] or balanced.",
)
@click.option(
    "--algorithm",
    type=ALGORITHM,
    default="pass-kv",
    help="What to run.",
)
@click.option(
    "--direction",
    cls=OptionOfSome,
    type=click.Choice(["forward", "reverse"]),
    help="Which way blocks go round in TAKERS.  [default: forward]",
)
@click.option(
    "--mesh",
    cls=OptionOfSome,
    callback=parsed_by(parse_mesh),
    metavar="OUTERxINNER",
    help="Ranks in two dimensions, for TAKERS.",
)
@click.option("--kernel", default="auto", help="What computes a piece: sdpa_cpu, reference, sdpa_flash ...")
@click.option(
    "--transport",
    "carrier",
    type=click.Choice(CARRIERS),
    help="What carries messages.  [default: gloo, nccl on GPUs, mpi under mpirun]",
)
@click.option("--backward", "has_backward", is_flag=True, help="The gradients as well.")
@click.option(
    "--reproducible", is_flag=True, help="The mode in which the bits do not depend on the ranks; compare them."
)
@click.option("--repeats", type=click.IntRange(1), default=5, help="Runs of each kind, interleaved.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Of the random q, k and v.")
@click.option(
    "--timeout",
    "timeout_s",
    callback=parsed_by(parse_seconds),
    metavar="SECONDS",
    default="600",
    help="Until ranks that do not answer are given up.",
)
@click.option(
    "--trace",
    type=OutputFile(),
    help="Write what every rank did, and when, for ui.perfetto.dev.",
)
@click.option(
    "--calibrate",
    type=OutputFile(),
    help="First measure tiles and messages and write them as a device for ringspan plan; then predict this run.",
)
@click.option(
    "--predict",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="Print what ringspan plan predicts with a file that --calibrate wrote.",
)
@click.option("--prefill", is_flag=True, help="Time a cache instead: the first token of one sequence, by miss rate.")
@click.option("--decode", is_flag=True, help="Time a cache instead: each token, by context; batch 1 and --batch.")
@click.option(
    "--plot",
    type=OutputFile(),
    help="With --prefill or --decode: write a diagram, an SVG file.",
)
@click.option(
    "--transformer",
    is_flag=True,
    help="Time a whole dense decoder instead: prefill, training, decode.  [defaults then: "
    + ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in DEFAULTS.items())
    + "]",
)
@click.option("--layers", type=click.IntRange(1), help="With --transformer.  [default: 4]")
@click.option("--mlp", type=click.IntRange(1), help="With --transformer: inner size.  [default: 4 × heads × head_dim]")
@click.option("--selfcheck", is_flag=True, help="Check every kernel and transport that can run here instead.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_context
def bench(
    ctx: click.Context,
    ranks: int | None,
    tokens: int,
    batch: int,
    heads: int,
    kv_heads: int | None,
    head_dim: int,
    dtype: str,
    mask: Mask,
    layout: LayoutChoice,
    algorithm: str,
    direction: Direction | None,
    mesh: Mesh | None,
    kernel: str,
    has_backward: bool,
    reproducible: bool,
    carrier: Carrier | None,
    repeats: int,
    seed: int,
    timeout_s: float,
    trace: Path | None,
    calibrate: Path | None,
    predict: Path | None,
    prefill: bool,
    decode: bool,
    plot: Path | None,
    transformer: bool,
    layers: int | None,
    mlp: int | None,
    selfcheck: bool,
    as_json: bool,
) -> None:
    """Time exact attention on several ranks beside one device, and check it.

    Starts the ranks itself, or takes those of torchrun or mpirun. Prints speedup, share of the ideal, where the time
    goes, what was sent and how much memory it took. Exit code 1 if the result is wrong or a rank fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(
            "bench needs torch; install it, for example from a checkout with: pip install '.[torch]'"
        )
    launched = find_launcher(os.environ)
    if selfcheck:
        refuse_others(ctx, WITH_SELFCHECK, "is for a measurement; --selfcheck takes only --json and --timeout")
        _run_selfcheck(ctx, launched, timeout_s, as_json)
        return
    carrier = carrier or default_carrier(launched)
    world_size = count_ranks(ranks, carrier, launched)
    if transformer:
        model = transformer_settings(ctx)
        with show_progress() as progress:
            job = Job("transformer", carrier, world_size, timeout_s, transformer=model)
            result = run_on_ranks(job, launched, progress)
        if result is not None and not show_transformer(result, as_json, new_console()):
            ctx.exit(1)
        return
    refuse_sizes(layers, mlp)
    if prefill or decode or plot is not None:
        sizes = (tokens, batch, heads, kv_heads or heads, head_dim, dtype, kernel, repeats, seed)
        cached = inference_settings(ctx, prefill, decode, plot, *sizes)
        with show_progress() as progress:
            found = run_on_ranks(Job("inference", carrier, world_size, timeout_s, inference=cached), launched, progress)
        if found is not None and not show_inference(found, plot, as_json, new_console()):
            ctx.exit(1)
        return
    name = algorithm.replace("-", "_")
    check_options((name,), direction, mesh, world_size)
    check_mask(mask, tokens)
    check_layout(layout, reproducible)
    for option, path in (("--trace", trace), ("--calibrate", calibrate)):
        check_writable(ctx, option, path)
    _check_calibration(calibrate, predict, launched, has_backward, reproducible)
    settings = Settings(
        seq_len=tokens,
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads or heads,
        head_dim=head_dim,
        dtype=dtype,
        mask=mask,
        layout=layout.build(mask, tokens, world_size, align=TILE if reproducible else 1),
        layout_name=str(layout),
        algorithm=name,
        direction=direction,
        mesh=mesh,
        kernel=kernel,
        has_backward=has_backward,
        carrier=carrier,
        repeats=repeats,
        seed=seed,
        timeout_s=timeout_s,
        reproducible=reproducible,
    )
    with show_progress() as progress:
        if calibrate is not None:
            _calibrate(Job("calibrate", carrier, world_size, timeout_s, settings), calibrate, progress)
        measured: Measured | None = run_on_ranks(
            Job("measure", carrier, world_size, timeout_s, settings), launched, progress
        )
    if measured is None:
        return  # not rank 0
    if calibrate is not None or predict is not None:
        measured = _with_prediction(measured, settings, calibrate or predict)
    if trace is not None:
        _write_trace(measured, trace)
    _print(measured, as_json)
    if not measured.result.is_verified:
        ctx.exit(1)


def _check_calibration(
    calibrate: Path | None, predict: Path | None, launched: Launched | None, has_backward: bool, reproducible: bool
) -> None:
    if calibrate is not None or predict is not None:
        if has_backward:
            raise click.UsageError("--calibrate and --predict know the forward pass only; leave out --backward")
        if reproducible:
            raise click.UsageError("--calibrate and --predict know the usual mode only; leave out --reproducible")
    if calibrate is not None and predict is not None:
        raise click.UsageError("--calibrate writes the file that --predict reads; give one of them")
    if calibrate is not None and launched is not None:
        raise click.UsageError(
            f"--calibrate starts its own ranks; leave out {launched.by}, or use --predict with a file"
        )
    if predict is not None:
        from ringspan.planner.catalog import load_device

        if predict.suffix != ".toml":  # else a name of the catalogue is looked for
            raise click.UsageError(f"--predict {predict}: --calibrate writes a .toml file; give that one")
        try:
            load_device(str(predict))  # refused now, not after the measurement
        except RingspanError as error:
            raise click.UsageError(f"--predict: {error}") from error
    if calibrate is not None and calibrate.suffix != ".toml":
        raise click.UsageError(f"--calibrate {calibrate}: ringspan plan knows devices by .toml; use {calibrate}.toml")


def _calibrate(job: Job, path: Path, progress: Callable[[Progress], None]) -> None:
    from ringspan.bench.calibration import format_calibration

    path.write_text(format_calibration(run_on_ranks(job, None, progress)))


def _with_prediction(measured: Measured, settings: Settings, path: Path | None) -> Measured:
    from ringspan.bench.predict import predict_timeline
    from ringspan.planner.catalog import load_device

    predicted_s = predict_timeline(settings, load_device(str(path))).makespan_s
    return measured._replace(result=dataclasses.replace(measured.result, predicted_s=predicted_s))


def _write_trace(measured: Measured, path: Path) -> None:
    from ringspan.cli.trace import build_trace

    about = {"ringspan": __version__, **dataclasses.asdict(measured.result.parameters)}
    path.write_text(json.dumps(build_trace(measured.activities, about)))


def _print(measured: Measured, as_json: bool) -> None:
    if as_json:
        report = {"version": __version__, "is_verified": measured.result.is_verified}
        _print_json(report | dataclasses.asdict(measured.result))
        return
    from ringspan.cli.bench.text import print_bench

    print_bench(measured.result, new_console())


def _run_selfcheck(ctx: click.Context, launched: Launched | None, timeout_s: float, as_json: bool) -> None:
    """All paths; on ranks that somebody else has started, those of their group."""
    with show_progress() as progress:
        if launched is None:
            from ringspan.bench.paths import check_paths

            paths = check_paths(timeout_s, progress)
        else:
            carrier = default_carrier(launched)
            paths = run_on_ranks(Job("check_group", carrier, launched.world_size, timeout_s), launched, progress)
    if launched is None or launched.rank == 0:
        _print_paths(paths, as_json)
    if any(path.status == "failed" for path in paths):
        ctx.exit(1)


def _print_paths(paths: list[PathCheck], as_json: bool) -> None:
    versions = (
        f"ringspan {__version__}, torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    )
    machine = f"{versions}, {platform.platform()}, {count_cores()} cores, {count_gpus()} GPUs"
    if as_json:
        _print_json({"version": __version__, "machine": machine, "paths": [dataclasses.asdict(path) for path in paths]})
        return
    from ringspan.cli.bench.text import print_paths

    print_paths(paths, machine, new_console())


def _print_json(report: dict[str, Any]) -> None:
    click.echo(json.dumps(report, indent=2, allow_nan=False))

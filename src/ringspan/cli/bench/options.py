"""What do the subcommands of `ringspan bench` share: options, and how ranks are run and shown?

A decorator adds a group of options to a command and passes them on as one value: `@rank_options` as `place`,
`@size_options(...)` as `sizes`, `@run_options(...)` as `runs`.
"""

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import click

from ringspan import __version__
from ringspan.bench.launch import (
    Launched,
    Progress,
    RanksFailed,
    RanksRefused,
    count_cores,
    count_gpus,
    find_launcher,
    run_job,
)
from ringspan.bench.settings import CARRIERS, DTYPES, SHORT_DTYPES, Carrier, Job
from ringspan.cli.files import OutputFile
from ringspan.cli.values import Spelled, parse_seconds, parse_tokens, parsed_by
from ringspan.errors import RingspanError, TransportError
from ringspan.simulate.lesson import MAX_HEADS

MAX_RANKS = 1024
MAX_TOKENS = 2**26
"""More than one command can start, or finish in a day: larger values are slips and are refused."""

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class RunPlace(NamedTuple):
    """The ranks, their transport and their time limit."""

    launched: Launched | None
    carrier: Carrier
    world_size: int
    timeout_s: float


class ModelSizes(NamedTuple):
    """The sizes of the tensors, their dtype and the kernel. `batch` is 1 for a command without that option."""

    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kernel: str


class Runs(NamedTuple):
    """The number of repeats, and the seed."""

    repeats: int
    seed: int


timeout_option = click.option(
    "--timeout",
    "timeout_s",
    callback=parsed_by(parse_seconds),
    metavar="SECONDS",
    default="600",
    help="How long to wait for ranks that do not answer.",
)

html_option = click.option("--html", type=OutputFile(".html"), help="Write the report as an interactive page.")

json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")


def rank_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--ranks, --transport and --timeout, passed on as `place`."""

    @click.option(
        "--ranks", type=click.IntRange(1, MAX_RANKS), help="Processes to start.  [default: one per GPU, or per core]"
    )
    @click.option(
        "--transport",
        "carrier",
        type=click.Choice(CARRIERS),
        help="What carries messages.  [default: gloo, nccl on GPUs, mpi under mpirun]",
    )
    @timeout_option
    @functools.wraps(command)
    def with_place(*args: Any, ranks: int | None, carrier: Carrier | None, timeout_s: float, **others: Any) -> Any:
        require_torch()
        launched = find_launcher(os.environ)
        carrier = carrier or default_carrier(launched)
        place = RunPlace(launched, carrier, count_ranks(ranks, carrier, launched), timeout_s)
        return command(*args, place=place, **others)

    return with_place


def size_options(*, tokens: str, heads: int, batch: int | None, about_tokens: str = "Sequence length") -> Decorator:
    """Sizes with the given defaults, passed on as `sizes`; without --batch if `batch` is None."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--tokens",
            callback=parsed_by(partial(parse_tokens, most=MAX_TOKENS)),
            metavar="N",
            default=tokens,
            help=f"{about_tokens}; 1M is 2^20.",
        )
        @click.option("--heads", type=click.IntRange(1, MAX_HEADS), default=heads, help="Query heads.")
        @click.option(
            "--kv-heads",
            type=click.IntRange(1, MAX_HEADS),
            help="KV heads; they divide the query heads.  [default: as many]",
        )
        @click.option("--head-dim", type=click.IntRange(1), default=64, help="Elements of a head.")
        @click.option(
            "--dtype",
            type=Spelled(DTYPES, SHORT_DTYPES),
            default="float32",
            help="Dtype of all tensors; also bf16, fp16 ...",
        )
        @click.option("--kernel", default="auto", help="What computes a piece: sdpa_cpu, reference, sdpa_flash ...")
        @functools.wraps(command)
        def with_sizes(
            *args: Any,
            tokens: int,
            heads: int,
            kv_heads: int | None,
            head_dim: int,
            dtype: str,
            kernel: str,
            batch: int = 1,
            **others: Any,
        ) -> Any:
            sizes = ModelSizes(tokens, batch, heads, kv_heads or heads, head_dim, dtype, kernel)
            return command(*args, sizes=sizes, **others)

        if batch is None:
            return with_sizes
        return click.option("--batch", type=click.IntRange(1), default=batch, help="Sequences.")(with_sizes)

    return decorate


def run_options(repeats: int) -> Decorator:
    """--repeats and --seed, passed on as `runs`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option("--repeats", type=click.IntRange(1), default=repeats, help="Runs of each kind, interleaved.")
        @click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of the random numbers.")
        @functools.wraps(command)
        def with_runs(*args: Any, repeats: int, seed: int, **others: Any) -> Any:
            return command(*args, runs=Runs(repeats, seed), **others)

        return with_runs

    return decorate


def require_torch() -> None:
    """Refuse to measure without torch."""
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(
            "bench needs torch; install it, for example from a checkout with: pip install '.[torch]'"
        )


def print_json(report: dict[str, Any]) -> None:
    """Print the report and the version that made it."""
    click.echo(json.dumps({"version": __version__} | report, indent=2, allow_nan=False))


def default_carrier(launched: Launched | None) -> Carrier:
    """The transport to use where --transport is not given."""
    if launched is not None and launched.by == "mpirun":
        return "mpi"
    return "nccl" if count_gpus() else "gloo"


def count_ranks(ranks: int | None, carrier: Carrier, launched: Launched | None) -> int:
    """The number of ranks; a number that contradicts the launcher or the machine is refused."""
    if launched is not None:
        if ranks not in (None, launched.world_size):
            raise click.UsageError(f"--ranks {ranks}: {launched.by} has started {launched.world_size}; leave it out")
        if (carrier == "mpi") != (launched.by == "mpirun") or carrier == "threads":
            fitting = "mpi" if launched.by == "mpirun" else "gloo or nccl"
            raise click.UsageError(f"--transport {carrier}: ranks that {launched.by} has started use {fitting}")
        return launched.world_size
    if carrier == "mpi":
        command = click.get_current_context().command_path
        raise click.UsageError(
            f"--transport mpi: ranks over MPI are started by mpirun; use mpirun -np {ranks or count_cores()} {command}"
        )
    if carrier != "nccl":
        return ranks or count_cores()
    if not 0 < (ranks or 1) <= count_gpus():
        raise click.UsageError(
            f"--transport nccl: every rank needs its own GPU, and there are {count_gpus()}; use fewer ranks or gloo"
        )
    return ranks or count_gpus()


def run_on_ranks(job: Job, launched: Launched | None, progress: Callable[[Progress], None]) -> Any:
    """Run a job on ranks and return rank 0's value; None if this process is another rank."""
    try:
        if launched is None:
            return run_job(job, progress)
        from ringspan.bench.rank import run_here

        return run_here(job, launched, progress)
    except RanksRefused as error:
        raise error.refusal from error
    except (RanksFailed, TransportError) as error:
        raise click.ClickException(str(error)) from error
    except RingspanError:
        raise
    except Exception as error:
        from ringspan.bench.rank import describe

        raise click.ClickException(f"rank {launched.rank if launched else 0}: {describe(error)}") from error


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda at: bar.update(task, completed=at.done, total=at.total, description=at.what)

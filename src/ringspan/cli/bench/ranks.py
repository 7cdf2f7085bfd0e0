"""How do the subcommands of `ringspan bench` run their ranks: how many, started by whom, shown how?"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ringspan import __version__
from ringspan.bench.launch import Launched, Progress, RanksFailed, RanksRefused, count_cores, count_gpus, run_job
from ringspan.bench.settings import Carrier, Job
from ringspan.errors import RingspanError, TransportError


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
    """The number of ranks; one that contradicts the launcher or the machine is refused."""
    if launched is not None:
        if ranks not in (None, launched.world_size):
            raise click.UsageError(f"--ranks {ranks}: {launched.by} has started {launched.world_size}; leave it out")
        if (carrier == "mpi") != (launched.by == "mpirun") or carrier == "threads":
            fitting = "mpi" if launched.by == "mpirun" else "gloo or nccl"
            raise click.UsageError(f"--transport {carrier}: ranks that {launched.by} has started use {fitting}")
        return launched.world_size
    if carrier == "mpi":
        raise click.UsageError(
            f"--transport mpi: start the ranks with mpirun -np {ranks or count_cores()} ringspan bench ..."
        )
    if carrier != "nccl":
        return ranks or count_cores()
    if not 0 < (ranks or 1) <= count_gpus():
        raise click.UsageError(f"--transport nccl: {ranks or 1} ranks need as many GPUs; there are {count_gpus()}")
    return ranks or count_gpus()


def run_on_ranks(job: Job, launched: Launched | None, progress: Callable[[Progress], None]) -> Any:
    """The value of rank 0; None if this process is another rank."""
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

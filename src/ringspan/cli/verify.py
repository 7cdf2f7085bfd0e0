"""`ringspan verify`: is this attention right?"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ringspan import __version__
from ringspan.bench.launch import find_launcher
from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text
from ringspan.cli.page_command import command_line

if TYPE_CHECKING:
    from ringspan.page.report import Section
    from ringspan.verify import VerifyReport

EXAMPLES = """\b
Examples:
  ringspan verify ringspan
  ringspan verify ringspan:pass_q --ranks 2,4 --thorough
  ringspan verify mypackage.attention:ring_attention --layout zigzag
  ringspan verify mypackage.targets:MyTarget --json
  ringspan verify torch --ranks 2 --junit verify.xml
  ringspan verify transformers:qwen2 --ranks 2,3
  torchrun --nproc-per-node 2 --no-python ringspan verify mypackage.targets:MyTarget
"""


def _parse_ranks(_: click.Context, __: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(number) for number in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or any(not 1 <= number <= 8 for number in ranks):
        raise click.BadParameter(f"{text!r}: use numbers from 1 to 8, such as 2,3,4")
    return ranks


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.argument("target")
@click.option(
    "--ranks", "world_sizes", callback=_parse_ranks, metavar="N,N,...", default="1,2,3,4,5", help="Numbers of ranks."
)
@click.option(
    "--layout",
    "layouts",
    type=click.Choice(["contiguous", "zigzag", "striped"]),
    multiple=True,
    help="How the shards of a function are cut; may be repeated.  [default: contiguous]",
)
@click.option(
    "--feature", "features", multiple=True, metavar="NAME", help="A feature that a function has; may be repeated."
)
@click.option("--processes", is_flag=True, help="Run a function on processes with a gloo group, not on threads.")
@click.option("--thorough", is_flag=True, help="Every layout, mask, grouping of heads and type; takes minutes.")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of the inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.option("--junit", type=OutputFile(), help="Write the cases as a JUnit XML file.")
@click.option("--html", type=OutputFile(".html"), help="Write the cases as an interactive page.")
def verify(
    target: str,
    world_sizes: tuple[int, ...],
    layouts: tuple[str, ...],
    features: tuple[str, ...],
    processes: bool,
    thorough: bool,
    seed: int,
    as_json: bool,
    junit: Path | None,
    html: Path | None,
) -> None:
    """Compare an attention function with a float64 oracle.

    Runs TARGET over a table of cases and compares outputs, log-sum-exps and gradients.

    TARGET is ringspan, another library (torch, ring_attention_pytorch, ring_flash_attn, axolotl-ringmaster, yunchang,
    diffusers), transformers:MODEL with a class, a model type or a folder, or module:name of a function or of a Target.
    If a result is wrong, says what kind of mistake it looks like. Exit code 1 if anything is wrong.
    """
    if importlib.util.find_spec("torch") is None:
        raise click.UsageError(
            "verify needs torch; install it, for example from a checkout with: pip install '.[torch]'"
        )
    from ringspan.verify.launched import verify_here
    from ringspan.verify.run import verify as run_verify

    options: dict[str, Any] = {
        "features": features or None,
        "layouts": layouts or None,
        "ranks": "processes" if processes else None,
        "thorough": thorough,
        "seed": seed,
    }
    if (here := str(Path.cwd())) not in sys.path:  # an installed command has the folder of its script there instead
        sys.path.insert(0, here)
    launched = find_launcher(os.environ)
    with _bar() as progress:
        if launched is not None and launched.world_size > 1:
            report = verify_here(target, by=launched.by, progress=progress, **options)
        else:
            report = run_verify(target, world_sizes=world_sizes, progress=progress, **options)
    if report is None:
        return  # not rank 0
    if junit is not None:
        write_text(junit, report.to_junit())
    if html is not None:
        write_text(html, build_verify_page(report, command_line(click.get_current_context())))
    click.echo(json.dumps({"version": __version__, **report.to_json()}, indent=2) if as_json else report.to_text())
    if not report.has_passed:
        click.get_current_context().exit(1)


@contextmanager
def _bar() -> Iterator[Callable[[int, int, object], None]]:
    """A progress bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, case: bar.update(task, completed=done, total=total, description=str(case))


def build_verify_page(report: "VerifyReport", command: str) -> str:
    """The report as one HTML page: the verdict, what the mistake looks like, and every case."""
    from ringspan.page.report import build_report

    verdict = "right" if report.has_passed else "NOT right"
    lead = [f"{report.target} is {verdict}: every case is compared with dense attention in float64."]
    return build_report(f"Verify: {report.target}", lead, _sections(report), command)


def _sections(report: "VerifyReport") -> Iterator["Section"]:
    from ringspan.page.report import facts, table, text

    yield facts("summary", "The verdict", [*report.counts().items(), ("seconds", f"{report.seconds:.0f}")])
    if report.diagnosis is not None:
        yield text("diagnosis", "What the mistake looks like", [str(report.diagnosis)])
    rows = [
        [str(one.case), one.status, "✓ yes" if one.has_passed else "✗ no", one.message or ", ".join(one.missing)]
        for one in sorted(report.verdicts, key=lambda one: (one.has_passed, one.status == "not asked"))
    ]
    caption = "Failures come first, and what the target need not compute last. Choose a heading to sort by it."
    columns = ["case", "status", "passed", "message"]
    if not any(message for *_, message in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    yield table("cases", "Every case", columns, rows, caption)

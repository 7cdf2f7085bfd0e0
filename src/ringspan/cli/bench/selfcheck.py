"""`ringspan bench selfcheck`: which kernels and transports compute the right numbers on this machine?"""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import click

from ringspan import __version__
from ringspan.bench.launch import Launched, count_cores, count_gpus, find_launcher
from ringspan.bench.result import PathCheck
from ringspan.bench.settings import Job
from ringspan.cli.bench.options import (
    default_carrier,
    html_option,
    json_option,
    print_json,
    require_torch,
    run_on_ranks,
    show_progress,
    timeout_option,
)
from ringspan.cli.console import new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import write_text
from ringspan.cli.page_command import command_line
from ringspan.page.report import build_report, facts, table

EXAMPLES = """\b
Examples:
  ringspan bench selfcheck
  torchrun --nproc-per-node 2 --no-python ringspan bench selfcheck
"""


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@timeout_option
@html_option
@json_option
@click.pass_context
def selfcheck(ctx: click.Context, *, timeout_s: float, html: Path | None, as_json: bool) -> None:
    """Check every kernel and transport of this machine.

    Checks both passes, forward and backward. Prints a Markdown table to paste into an issue; a path that
    cannot run here is listed with the reason.
    """
    require_torch()
    launched = find_launcher(os.environ)
    paths = _check(launched, timeout_s)
    if launched is None or launched.rank == 0:
        if html is not None:
            write_text(html, build_selfcheck_page(paths, _machine(), command_line(ctx)))
        _print_paths(paths, as_json)
    if any(path.status == "failed" for path in paths):
        ctx.exit(1)


def _check(launched: Launched | None, timeout_s: float) -> list[PathCheck]:
    """Check all paths; on ranks that a launcher started, only those of their group."""
    with show_progress() as progress:
        if launched is None:
            from ringspan.bench.paths import check_paths

            return check_paths(timeout_s, progress)
        job = Job("check_group", default_carrier(launched), launched.world_size, timeout_s)
        paths: list[PathCheck] = run_on_ranks(job, launched, progress)
        return paths


def _machine() -> str:
    versions = (
        f"ringspan {__version__}, torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    )
    return f"{versions}, {platform.platform()}, {count_cores()} cores, {count_gpus()} GPUs"


def _print_paths(paths: list[PathCheck], as_json: bool) -> None:
    machine = _machine()
    if as_json:
        print_json({"machine": machine, "paths": [dataclasses.asdict(path) for path in paths]})
        return
    from ringspan.cli.bench.attention_report import print_paths

    print_paths(paths, machine, new_console())


def build_selfcheck_page(paths: Sequence[PathCheck], machine: str, command: str) -> str:
    count = {status: sum(path.status == status for path in paths) for status in ("ok", "failed", "not available")}
    verdict = f"✗ {count['failed']} failed" if count["failed"] else f"✓ all {count['ok']} that can run here are right"
    rows = [
        (it.path, it.status, ("" if it.max_error is None else f"{it.max_error:.1e}", it.max_error or 0.0), it.note)
        for it in paths
    ]
    columns = ["path", "status", ">largest error", "note"]
    sections = [
        facts("summary", "The verdict", [("paths", verdict), ("not available here", count["not available"])]),
        table("paths", "Every path", columns, rows, "Choose a heading to sort by it."),
    ]
    return build_report("Self-check of kernels and transports", [machine], sections, command)

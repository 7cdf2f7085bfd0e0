"""The command line: `ringspan COMMAND`.

Exit codes: 0 success, 1 a check failed or a file could not be written, 2 unusable input, 3 nothing fits a plan, 130
interrupted. A command imports what only it needs (rich, torch) when it runs, so that `--help` stays quick.
"""

import io
import sys
from typing import Any

import click

from ringspan import __version__
from ringspan.algorithms import register_entry_points
from ringspan.cli.bench import bench
from ringspan.cli.console import HANDLER
from ringspan.cli.errors import BadInput, in_one_line
from ringspan.cli.page_command import page
from ringspan.cli.plan.command import plan
from ringspan.cli.serve import serve
from ringspan.cli.simulate.command import simulate
from ringspan.cli.verify import verify
from ringspan.errors import RingspanError

__all__ = ["main"]


class _Commands(click.Group):
    """Commands whose errors are one line each, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program. A full disk is reported; a pipe that closes early ends the program quietly."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            sys.stdout = io.StringIO()  # flushing what is still buffered at exit would fail again
            reason = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
            click.echo(f"Error: {reason}", err=True)
            sys.exit(1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the command; without any word, click shows the help."""
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadOptionUsage) as error:
            raise in_one_line(error, ctx.command_path) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the command and turn its errors into one line."""
        try:
            return super().invoke(ctx)
        except RingspanError as error:  # raised outside a Command: while options were parsed
            raise BadInput(str(error)) from error
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else f"{ctx.command_path} {ctx.invoked_subcommand}"
            raise in_one_line(error, command) from error
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group("ringspan", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ringspan")
def main() -> None:
    """Exact attention over sequences longer than one device can hold."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)  # a terminal whose encoding lacks × must not end in an error
    register_entry_points()


main.add_command(simulate)
main.add_command(plan)
main.add_command(page)
main.add_command(bench)
main.add_command(verify)
main.add_command(serve)

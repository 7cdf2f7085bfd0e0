"""The command line: `ringspan COMMAND`. One file per command; here is only what they share.

Exit codes: 0 all is well, 1 a check failed or a file cannot be written, 2 the input cannot be used, 130 interrupted.
Commands parse and print; what only some of them need (rich, torch) they import when they run, so that `--help` stays
quick.
"""

import io
import re
import sys
from typing import Any

import click

from ringspan import __version__
from ringspan.algorithms import ALGORITHMS, register_entry_points
from ringspan.cli.bench.command import bench
from ringspan.cli.plan.command import plan
from ringspan.cli.serve import serve
from ringspan.cli.simulate.command import simulate
from ringspan.errors import RingspanError

__all__ = ["main"]


class _BadInput(click.ClickException):
    exit_code = 2


class _Commands(click.Group):
    """Commands whose errors are one line each, never a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as a program. A pipe that closes early ends it quietly, as click sees to; a full disk is told."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            sys.stdout = io.StringIO()  # what is still buffered would fail again at exit
            reason = ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
            click.echo(f"Error: {reason}", err=True)
            sys.exit(1)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """What stands before the command; without any word, click shows the help."""
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadOptionUsage) as error:
            raise _in_one_line(error, ctx.command_path) from error

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; what it cannot use is told in the spelling of the command line."""
        try:
            return super().invoke(ctx)
        except RingspanError as error:
            names = rf"(?<![\w./-])({'|'.join(ALGORITHMS)})(?![\w/]|\.\w)"  # not in the path of a file
            message = re.sub(names, lambda found: found[0].replace("_", "-"), str(error))
            message = message.replace("kernel=", "--kernel ")
            raise _BadInput(message) from error
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else f"{ctx.command_path} {ctx.invoked_subcommand}"
            raise _in_one_line(error, command) from error
        except KeyboardInterrupt:
            ctx.exit(130)


def _in_one_line(error: click.UsageError, command: str) -> _BadInput:
    message = error.format_message().rstrip(".").replace("a valid integer range", "a whole number")
    return _BadInput(f"{message} (see '{command} --help')")


@click.group("ringspan", cls=_Commands)
@click.version_option(__version__, prog_name="ringspan")
def main() -> None:
    """Exact attention over sequences longer than one device can hold."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × is no reason to fail
    register_entry_points()


main.add_command(simulate)
main.add_command(plan)
main.add_command(bench)
main.add_command(serve)

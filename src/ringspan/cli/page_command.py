"""`ringspan page`: ring attention as an interactive page, or a trace as one."""

import shlex
import sys
from pathlib import Path

import click

from ringspan.cli.errors import Command
from ringspan.cli.files import OutputFile, write_text

EXAMPLES = """\b
Examples:
  ringspan page --open
  ringspan page --output lesson.html
  ringspan page --trace measured.json --predicted predicted.json
"""


@click.command(cls=Command, epilog=EXAMPLES, context_settings={"show_default": True})
@click.option("--output", type=OutputFile(".html"), default="ringspan.html", help="The file to write.")
@click.option("--trace", type=click.Path(path_type=Path), help="Show this Chrome trace instead of the lesson.")
@click.option("--predicted", type=click.Path(path_type=Path), help="A predicted trace to lay over it.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.pass_context
def page(ctx: click.Context, output: Path, trace: Path | None, predicted: Path | None, opens: bool) -> None:
    """Write an interactive page about ring attention.

    One HTML file that opens from disk and loads nothing from the network. Without --trace it is the lesson: ring
    attention stepped through, broken on purpose, timed, and asked about.
    """
    if predicted is not None and trace is None:
        raise click.UsageError("--predicted is laid over a measured trace; add --trace FILE")
    from ringspan.page import build_lesson, build_trace_page, read_trace

    command = command_line(ctx)
    if trace is None:
        text = build_lesson(command)
    else:
        other = None if predicted is None else read_trace(predicted)
        text = build_trace_page(read_trace(trace), other, command)
    write_text(output, text)
    if opens:
        click.launch(output.resolve().as_uri())


def command_line(ctx: click.Context) -> str:
    """The command line as typed; only the command if this process is not the `ringspan` program."""
    commands: list[str] = []
    while ctx.parent is not None:
        commands.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    words = sys.argv[1:]
    return shlex.join(["ringspan", *(words if words[: len(commands)] == commands else commands)])

"""How does the command line report an error?

In one line on standard error, never a traceback. A library error names an argument of Python; `Command` renders it with
the option of the running command that sets this argument: `num_kv_heads=4: …` becomes `--kv-heads 4: …`.
"""

import reprlib
from typing import Any

import click

from ringspan.errors import NOT_GIVEN, RingspanError

OPTION_NAMES = {
    "cached_tokens": ("cached",),
    "chunk_tokens": ("chunk",),
    "api_key": ("api_key_file",),
    "expert_parallel": ("ep",),
    "folder": ("model",),
    "is_resident": ("resident",),
    "num_heads": ("heads",),
    "num_kv_heads": ("kv_heads",),
    "num_ranks": ("ranks",),
    "ranks": ("processes",),
    "pipeline_parallel": ("pp",),
    "seq_len": ("tokens",),
    "shards_weights": ("fsdp",),
    "world_size": ("ranks", "devices"),
}
"""Library argument -> names of the click parameters that set it, where the two differ."""

OPTION_PARTS = {"height": "size", "width": "size"}
"""Library argument -> name of the click parameter of which it is one part."""


class BadInput(click.ClickException):
    """Input that cannot be used: exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in message))


class Command(click.Command):
    """A command that renders library errors with its own option names."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            BadInput: if the command raised a RingspanError.
        """
        try:
            return super().invoke(ctx)
        except RingspanError as error:
            raise BadInput(render_error(error, ctx.command)) from error


def render_error(error: RingspanError, command: click.Command) -> str:
    """The error in one line; without a parameter that sets the argument, as Python shows it."""
    options = {param.name or "": _spell(param) for param in command.params}
    subject = _render_subject(error, options)
    if subject is None:
        return str(error)
    return f"{subject}: {error.rule}{f'; {error.remedy}' if error.remedy else ''}"


def _spell(param: click.Parameter) -> str:
    return param.opts[0] if isinstance(param, click.Option) else param.human_readable_name


def _render_subject(error: RingspanError, options: dict[str, str]) -> str | None:
    argument = error.argument
    if argument is None:
        return None
    value = "" if error.value is NOT_GIVEN or error.value is True else f" {_render_value(error)}"
    if argument in OPTION_PARTS and OPTION_PARTS[argument] in options:
        return f"{options[OPTION_PARTS[argument]]} ({argument}{value})"
    for name in (argument, *OPTION_NAMES.get(argument, ())):
        if name in options:
            return f"{options[name]}{value}"
    return None


def _render_value(error: RingspanError) -> str:
    value = error.value
    if error.argument == "algorithm":
        return str(value).replace("_", "-")
    if error.argument == "mesh" and isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, tuple) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    return value if isinstance(value, str) else reprlib.repr(value)


def in_one_line(error: click.UsageError, command: str) -> BadInput:
    """A usage error of click without its usage lines, and where to read more."""
    message = error.format_message().rstrip(".").replace("a valid integer range", "a whole number")
    return BadInput(f"{message} (see '{command} --help')")

"""Where may a command write, and what does it say about it?

A destination that cannot be written is refused while the options are parsed, before any work is done for it.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click


class OutputFile(click.Path):
    """An output file. `suffix`, if given, is the only suffix allowed, because it tells the format."""

    def __init__(self, suffix: str | None = None) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self._suffix = suffix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or refuse one that cannot be written."""
        if not str(value):
            self.fail("a file needs a name; give one, or leave the option out", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self._suffix is not None and path.suffix != self._suffix:
            kind, other = self._suffix.removeprefix(".").upper(), path.with_suffix(self._suffix)
            self.fail(f"'{path}': this file is written as {kind}; use {other}", param, ctx)
        reason = why_not_writable(path)
        if reason is not None:
            self.fail(f"'{path}' cannot be written: {reason}", param, ctx)
        return path


def why_not_writable(path: Path) -> str | None:
    """The reason why the file cannot be written, or None. A temporary file tests the folder."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist; make it first"
    try:
        if path.exists():
            return None if os.access(path, os.W_OK) else "it is write-protected"
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return f"{error.strerror} ({path.parent})"


def write_text(path: Path, text: str) -> None:
    """Write the file and name it on standard error, so that standard output holds only the requested report."""
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a file's name may hold bytes that are no text
    click.echo(f"Wrote {path}", err=True)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file and name it on standard error."""
    write_text(path, json.dumps(value))

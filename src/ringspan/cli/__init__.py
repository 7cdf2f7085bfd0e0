"""The command line: `ringspan COMMAND`, one folder per command."""

from ringspan.cli.main import main

__all__ = [
    "main",
]

"""`ringspan simulate`."""

from ringspan.cli.simulate.command import simulate

__all__ = [
    "simulate",
]

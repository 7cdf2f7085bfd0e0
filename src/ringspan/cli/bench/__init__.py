"""`ringspan bench`."""

from ringspan.cli.bench.command import bench

__all__ = [
    "bench",
]

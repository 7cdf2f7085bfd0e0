"""`ringspan bench`: one file per subcommand."""

from ringspan.cli.bench.group import bench

__all__ = [
    "bench",
]

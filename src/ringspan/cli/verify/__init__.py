"""`ringspan verify`."""

from ringspan.cli.verify.command import verify

__all__ = ["verify"]

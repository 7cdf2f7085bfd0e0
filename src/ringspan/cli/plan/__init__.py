"""`ringspan plan`."""

from ringspan.cli.plan.command import plan

__all__ = [
    "plan",
]

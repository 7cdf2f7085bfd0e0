"""A prediction of a published row, with what its uncertainty comes from."""

from typing import NamedTuple

from ringspan.planner.accuracy import Parts, spread_of
from ringspan.planner.catalog import Device


class Predicted(NamedTuple):
    """`value` in the unit of the row; seconds by what they are spent on."""

    value: float
    parts: Parts
    device: Device

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return spread_of(self.parts, self.device)

"""How sure is a prediction, and when are two ways too close to call?

A time is a sum of parts, and each part is known to some factor: standard deviations of its logarithm, below. Errors of
one part are common to all ways on the same devices, errors of different parts are taken to be independent. So the
spread of a time is the root of the sum of squared shares times spreads; and of the quotient of two times only the
differences of shares count. `plan --check` holds the ranges against published rows, each predicted without its source.
"""

import math
from collections.abc import Mapping

from ringspan.planner.catalog import Device
from ringspan.planner.catalog.links import THROUGH_CPU

Parts = dict[str, float]

Z80 = 1.2816  # standard deviations either side of the middle 80 %
SPREADS = {  # judged by hand, not fitted: ranges of sources left out hold about 80 % with them (`plan --check`)
    "attention compute": 0.08,
    "messages of attention": 0.35,
    "ranks waiting for others": 0.15,
    "projections and MLP": 0.12,
    "norms and other elementwise work": 0.35,
    "all-reduces of tensor parallelism": 0.35,
    "the host issuing operations": 0.6,
    "gathering sharded weights": 0.5,
    "reducing gradients": 0.5,
    "text encoder and VAE": 0.5,
}
UNMEASURED = 0.20  # of compute, in place of the above, where the kernel was not measured on the device
BRIDGE = 0.6  # of messages through a CPU or its memory, which machines do very differently
COMMON = 0.07  # of whatever is not in the parts: clocks, power, versions
BETWEEN = 0.03  # of a quotient of two ways on the same devices, likewise


def spread_of(parts: Mapping[str, float], device: Device) -> float:
    """Standard deviation of the logarithm of the time."""
    total = sum(parts.values())
    squares = sum((seconds / total * _spread(name, device)) ** 2 for name, seconds in parts.items())
    return math.sqrt(squares + COMMON**2)


def range_of(parts: Mapping[str, float], device: Device) -> tuple[float, float]:
    """The range that should hold 80 % of runs, as multiples of the predicted time."""
    factor = math.exp(Z80 * spread_of(parts, device))
    return 1 / factor, factor


def spread_between(first: Mapping[str, float], second: Mapping[str, float], device: Device) -> float:
    """Standard deviation of the logarithm of the quotient of two times on the same devices."""
    totals = sum(first.values()), sum(second.values())
    names = {*first, *second}
    squares = sum(
        ((first.get(name, 0.0) / totals[0] - second.get(name, 0.0) / totals[1]) * _spread(name, device)) ** 2
        for name in names
    )
    return math.sqrt(squares + BETWEEN**2)


def is_tie(first: Mapping[str, float], second: Mapping[str, float], device: Device, *, z: float = 1.0) -> bool:
    """Whether two times on the same devices are closer than their common uncertainty."""
    ratio = math.log(sum(first.values()) / sum(second.values()))
    return abs(ratio) < z * spread_between(first, second, device)


def _spread(name: str, device: Device) -> float:
    if name == "attention compute" and not device.has_curve:
        return UNMEASURED
    if name == "messages of attention" and device.near.wiring in THROUGH_CPU:
        return BRIDGE
    return SPREADS[name]

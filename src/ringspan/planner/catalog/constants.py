"""Which numbers were fitted to published measurements, and what is believed of each without them?

Every constant stands in `data/curves.toml` with its value, the rows it was fitted to, and a prior: what another source
or a count says, and how far off that may be (a standard deviation of the logarithm). A fit weighs rows against priors,
so a constant whose rows are left out falls back on its prior. `left_out.toml` holds the fits without one source each.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from ringspan.planner.catalog.files import read_data

MOST_CONSTANTS = 25


class Constants(NamedTuple):
    """All fitted constants. A share is of a peak or a line rate of the catalogue."""

    fa2_share: float
    fa2_hopper_share: float
    fa2_ada_share: float
    fa2_ramp_full_tokens: float
    fa2_ramp_causal_tokens: float
    fa2_backward_ratio: float
    fa2_backward_ramp_full_tokens: float
    fa2_backward_ramp_causal_tokens: float
    fa2_wide_head_ratio: float
    fa3_share: float
    fa3_ramp_full_tokens: float
    fa3_ramp_causal_tokens: float
    fa3_backward_ratio: float
    softmax_share: float
    dense_share: float
    elementwise_ratio: float
    memory_share: float
    network_share: float
    network_latency_s: float
    exchange_share: float
    exchange_latency_s: float
    bridge_share: float
    host_operation_s: float
    video_bytes_per_pixel: float
    vae_bytes_per_pixel: float


class Prior(NamedTuple):
    """The assumed value of a constant before it is fitted."""

    value: float
    spread: float
    source: str
    rows: str


@lru_cache(maxsize=1)
def fitted() -> Constants:
    """The constants that plans use."""
    return Constants(**{name: float(entry["value"]) for name, entry in _entries().items()})


@lru_cache(maxsize=1)
def priors() -> dict[str, Prior]:
    """The priors, by the name of the constant."""
    return {
        name: Prior(float(entry["prior"]), float(entry["spread"]), entry["prior_source"], entry["rows"])
        for name, entry in _entries().items()
    }


@lru_cache(maxsize=32)
def fitted_without(source: str) -> Constants:
    """The constants fitted to all rows except those of one source; those of plans if none of its rows is fitted to."""
    found: dict[str, dict[str, float]] = read_data("left_out.toml")
    return fitted()._replace(**found.get(source, {}))


def _entries() -> dict[str, dict[str, Any]]:
    return {name: read_data("curves.toml")[name] for name in Constants._fields}

"""The measurements of a cache, as plain data. Needs no torch."""

from dataclasses import dataclass

from ringspan.algorithms.choose import Q_RING, RINGS
from ringspan.bench.result import Timing
from ringspan.bench.settings import InferenceSettings

MISS_RATES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100)  # percent of all tokens that are new
WAYS = (*RINGS, "auto")
PARTS = ("attention", "sendrecv", "all_to_all", Q_RING, "one_shot")
"""The parts of a decode step (attention over a rank's part of the cache, a block of queries to the next rank, partial
results to all others) and two whole steps: queries sharded by sequence, and all queries on every rank."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Time to the first token of one layer, at one miss rate."""

    miss_percent: int
    new_tokens: int
    cached_tokens: int
    times: dict[str, Timing]  # by WAYS
    picked: str
    reason: str
    error: float | None  # None: not finite

    @property
    def over_better(self) -> float:
        """How much longer the automatic choice took than the faster algorithm, as a ratio above 0."""
        *rings, auto = (self.times[way].median_s for way in WAYS)
        return auto / min(rings) - 1


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Time per token of one layer: its parts, each measured alone, and whole steps."""

    context: int
    batch: int
    times: dict[str, Timing]  # by PARTS
    error: float | None  # None: not finite


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """All points of a measurement."""

    settings: InferenceSettings
    world_size: int
    transport: str
    machine: str
    tolerance: float
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether every point is as exact as its type allows."""
        return self.error is not None and self.error <= self.tolerance

    @property
    def error(self) -> float | None:
        """The largest difference from the exact result; None if one is not finite."""
        errors = [*(point.error for point in self.prefill), *(point.error for point in self.decode)]
        finite = [error for error in errors if error is not None]
        return max(finite) if len(finite) == len(errors) else None

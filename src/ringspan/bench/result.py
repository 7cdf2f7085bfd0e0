"""The result of a measurement, as plain data that converts to JSON directly."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Activity(NamedTuple):
    """One action of a rank, and when. `send` starts a message, `receive` and `sent` wait for one."""

    rank: int
    step: int  # of a message: the one in which it was started
    kind: Literal["attend", "merge", "send", "receive", "sent"]
    name: str
    start_s: float
    end_s: float
    src: int | None = None
    dst: int | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of every repeat, with median, fastest and slowest."""

    median_s: float
    fastest_s: float
    slowest_s: float
    runs_s: tuple[float, ...]

    @classmethod
    def of(cls, runs_s: Sequence[float]) -> "Timing":
        """Summarise the runs."""
        return cls(statistics.median(runs_s), min(runs_s), max(runs_s), tuple(runs_s))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratios of times, repeat by repeat: median, lowest and highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, slow: Timing, fast: Timing) -> "Ratio":
        """Compare repeat by repeat: repeats are interleaved, so slow drift cancels."""
        ratios = [a / b for a, b in zip(slow.runs_s, fast.runs_s, strict=True)]
        return cls(statistics.median(ratios), min(ratios), max(ratios))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of one rank went; the parts add up to the time of the call on all ranks."""

    attention_s: float
    merge_s: float
    communication_s: float  # blocked although the peer had sent, or in starting messages
    waiting_s: float  # for a peer that had not sent yet, or for the others to begin or finish
    other_s: float

    @property
    def total_s(self) -> float:
        """The sum of all parts."""
        return self.attention_s + self.merge_s + self.communication_s + self.waiting_s + self.other_s

    def divided_by(self, number: int) -> "Breakdown":
        """The breakdown divided by a number of calls."""
        parts = (self.attention_s, self.merge_s, self.communication_s, self.waiting_s, self.other_s)
        return Breakdown(*(part / number for part in parts))


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Memory of a rank's process or device in the first call. None where ranks share a process."""

    input_bytes: int
    peak_bytes: int | None
    above_inputs_bytes: int | None


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank did."""

    rank: int
    breakdown: Breakdown
    sent_bytes: int
    scheduled_bytes: int
    memory: MeasuredMemory


@dataclass(frozen=True, slots=True)
class ResultCheck:
    """The result against the one of a single device: the largest |difference| / max(1, |value|).

    `same_bits`: in the reproducible mode, whether the results equal those of one rank bit by bit; else None.
    """

    max_error: float | None  # None: not finite
    tolerance: float
    reference: str
    same_bits: bool | None = None

    @property
    def is_passed(self) -> bool:
        """Whether the error is accepted, and the bits are equal where that is promised."""
        return self.max_error is not None and self.max_error <= self.tolerance and self.same_bits is not False


@dataclass(frozen=True, slots=True)
class BenchParameters:
    """The settings of a measurement."""

    world_size: int
    seq_len: int
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    mask: str
    layout: str
    algorithm: str
    direction: str | None
    mesh: tuple[int, int] | None
    kernel: str
    has_backward: bool
    transport: str
    repeats: int
    seed: int
    reproducible: bool


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """The machine of a measurement."""

    platform: str
    cores: int
    device: str
    python: str
    torch: str


@dataclass(frozen=True, slots=True)
class Result:
    """Everything a measurement found."""

    parameters: BenchParameters
    machine: MachineInfo
    one_device: Timing
    one_device_method: str
    ideal: Timing
    ranks: Timing
    speedup: Ratio
    share_of_ideal: Ratio
    by_rank: tuple[RankResult, ...]
    bottleneck: str
    verdict: str
    check: ResultCheck
    predicted_s: float | None = None  # by the planner, on a calibrated device

    @property
    def has_exact_bytes(self) -> bool:
        """Whether every rank sent what the schedule says, to the byte."""
        return all(rank.sent_bytes == rank.scheduled_bytes for rank in self.by_rank)

    @property
    def is_verified(self) -> bool:
        """Whether the numbers are right and the bytes are those of the schedule."""
        return self.check.is_passed and self.has_exact_bytes


class Measured(NamedTuple):
    """A result, and the recorded actions behind its breakdown."""

    result: Result
    activities: tuple[Activity, ...]


@dataclass(frozen=True, slots=True)
class PathCheck:
    """One combination of kernel or transport and algorithm, and whether it is right on this machine."""

    path: str
    status: Literal["ok", "failed", "not available"]
    max_error: float | None = None
    note: str = ""

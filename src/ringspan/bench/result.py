"""The result of a measurement, as plain data that converts to JSON directly."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringspan.algorithms.choose import Q_RING, RINGS
from ringspan.bench.settings import InferenceSettings, TransformerSettings, VideoSettings


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
    """The parts of one rank's time; they add up to the time of the call on all ranks."""

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
    """One rank's activities and counts."""

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


ANSWER = 8  # tokens decoded after a prefill

Phase = Literal["prefill", "train", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "train", "decode")


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """One process, the ranks, and the ideal: every rank its own tokens and tiles, with no messages.

    Seconds of prefill, of a training step, or of one token of every sequence. Decode has no ideal: without messages
    it would be another amount of work.
    """

    num_tokens: int  # processed in the measured time
    one_process: Timing
    ranks: Timing
    ideal: Timing | None
    speedup: Ratio
    share_of_ideal: Ratio | None
    share_of_ideal_cpu: Ratio | None  # in processor time, where a rank is a process that computes and carries messages
    by_rank: tuple[Breakdown, ...]  # other_s: projections, MLP and whatever else works token by token

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second on the ranks."""
        return self.num_tokens / self.ranks.median_s


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Memory of one rank or process in bytes, counted in tensors except for `process_peak`."""

    weights: int
    kv_cache: int  # after the prefill
    prefill_peak: int  # above the weights, including the cache
    activations: int  # kept for the backward pass
    train_peak: int  # above the weights, including their gradients
    process_peak: int | None  # in a training step; None where ranks share a process


@dataclass(frozen=True, slots=True)
class PredictedModel:
    """The planner's prediction of the same model on other devices."""

    phase: Phase
    devices: str
    setup: str
    seconds: float
    num_tokens: int
    device_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class TransformerResult:
    """Everything a measurement found."""

    settings: TransformerSettings
    world_size: int
    transport: str
    machine: MachineInfo
    kernel: str
    num_parameters: int
    phases: dict[Phase, PhaseResult]
    one_process_memory: ModelMemory
    memory_by_rank: tuple[ModelMemory, ...]
    checks: dict[str, ResultCheck]  # "logits", "loss", "gradients"
    right_tokens: int
    num_answered: int  # tokens, over all sequences and ranks
    predicted: tuple[PredictedModel, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether every comparison passed."""
        return self.right_tokens == self.num_answered and all(check.is_passed for check in self.checks.values())


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Memory of one rank or process in bytes."""

    weights: int
    peak: int  # of the tensors of a step, above the weights
    process_peak: int | None  # None where ranks share a process


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The planner's prediction of the same step on GPUs."""

    devices: str
    setup: str
    seconds: float
    device_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class VideoResult:
    """One process, the ranks, and the ideal: every rank its own rows and pieces, with no messages."""

    settings: VideoSettings
    world_size: int
    transport: str
    machine: MachineInfo
    num_tokens: int
    num_parameters: int
    plan: str  # as learned: the blocks, and how they attend
    learned_s: float
    one_process: Timing
    ranks: Timing
    ideal: Timing
    speedup: Ratio
    share_of_ideal: Ratio
    share_of_ideal_cpu: Ratio | None  # in processor time, where a rank is a process that computes and carries messages
    by_rank: tuple[Breakdown, ...]  # other_s: projections, MLP and whatever else works token by token
    one_process_memory: StepMemory
    memory_by_rank: tuple[StepMemory, ...]
    check: ResultCheck
    predicted: tuple[PredictedStep, ...] = ()

    @property
    def is_verified(self) -> bool:
        """Whether the output is that of one process."""
        return self.check.is_passed

"""What is the result of measuring a denoising step, as plain data? Needs no torch."""

from dataclasses import dataclass

from ringspan.bench.result import Breakdown, MachineInfo, Ratio, ResultCheck, Timing
from ringspan.bench.video_settings import VideoSettings


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

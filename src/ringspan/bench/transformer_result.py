"""What is the result of measuring a model, as plain data? Needs no torch."""

from dataclasses import dataclass
from typing import Literal

from ringspan.bench.result import Breakdown, MachineInfo, Ratio, ResultCheck, Timing
from ringspan.bench.settings import TransformerSettings

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

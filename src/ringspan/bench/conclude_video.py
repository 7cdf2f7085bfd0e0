"""How does rank 0 combine what the ranks have measured of a denoising step into one result?"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringspan.bench.breakdown import break_down
from ringspan.bench.conclude import Dissected, machine_of, middle_run, on_one_clock
from ringspan.bench.result import Ratio, ResultCheck, Timing
from ringspan.bench.settings import Job
from ringspan.bench.video_result import StepMemory, VideoResult

Times = dict[str, list[float]]
"""Seconds of every repeat, by who ran it: "one", "ranks" or "ideal"."""


class Learned(NamedTuple):
    """What was learned of the model, and how long that took."""

    num_parameters: int
    plan: str
    learned_s: float


class FoundSteps(NamedTuple):
    """The measurements of one rank. Times of one process come from rank 0 while the others are idle."""

    times: Times
    cpu_times: Times
    dissected: list[Dissected]
    memory: StepMemory
    output: torch.Tensor


def conclude_video(
    job: Job,
    learned: Learned,
    device: torch.device,
    everyone: Sequence[FoundSteps],
    one_process: StepMemory,
    check: ResultCheck,
) -> VideoResult:
    """The result of the measurements of all ranks."""
    assert job.video is not None
    one = Timing.of(everyone[0].times["one"])
    ranks, ideal = (Timing.of(_by_repeat(max, [found.times[who] for found in everyone])) for who in ("ranks", "ideal"))
    run = middle_run([on_one_clock(run) for run in zip(*(found.dissected for found in everyone), strict=True)])
    activities = sorted((it for one in run for it in one.activities), key=lambda it: it.start_s)
    return VideoResult(
        settings=job.video,
        world_size=job.world_size,
        transport=job.carrier,
        machine=machine_of(device),
        num_tokens=job.video.num_tokens,
        num_parameters=learned.num_parameters,
        plan=learned.plan,
        learned_s=learned.learned_s,
        one_process=one,
        ranks=ranks,
        ideal=ideal,
        speedup=Ratio.of(one, ranks),
        share_of_ideal=Ratio.of(ideal, ranks),
        share_of_ideal_cpu=_share_of_cpu(everyone) if job.carrier in ("gloo", "mpi") else None,
        by_rank=break_down(activities, [one.call for one in run]),
        one_process_memory=one_process,
        memory_by_rank=tuple(found.memory for found in everyone),
        check=check,
    )


def _by_repeat(combine: Callable[[Sequence[float]], float], seconds: Sequence[Sequence[float]]) -> list[float]:
    return [combine(of_repeat) for of_repeat in zip(*seconds, strict=True)]


def _share_of_cpu(everyone: Sequence[FoundSteps]) -> Ratio:
    """The ratio in processor time, summed over the ranks."""
    ideal, ranks = (
        Timing.of(_by_repeat(sum, [found.cpu_times[who] for found in everyone])) for who in ("ideal", "ranks")
    )
    return Ratio.of(ideal, ranks)

"""How does rank 0 combine what the ranks have measured into one result: of a call, a model, or a denoising step?"""

import os
import platform
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringspan.bench.breakdown import Interval, break_down, judge
from ringspan.bench.decoder import Decoder
from ringspan.bench.model_runs import Checked
from ringspan.bench.result import (
    ANSWER,
    PHASES,
    Activity,
    BenchParameters,
    Breakdown,
    MachineInfo,
    Measured,
    MeasuredMemory,
    ModelMemory,
    Phase,
    PhaseResult,
    RankResult,
    Ratio,
    Result,
    ResultCheck,
    StepMemory,
    Timing,
    TransformerResult,
    VideoResult,
)
from ringspan.bench.settings import Job, Settings


class Dissected(NamedTuple):
    """One recorded run on one rank. All ranks passed a barrier just before it."""

    host: str
    call: Interval
    activities: tuple[Activity, ...]
    sent_bytes: int


class Conclusion(NamedTuple):
    """The measurements of one rank, by repeat. Times of one device come from rank 0 while the others are idle."""

    one_device_s: list[float]
    ideal_s: list[float]
    ranks_s: list[float]
    dissected: list[Dissected]
    scheduled_bytes: int
    memory: MeasuredMemory


def conclude(
    settings: Settings,
    kernel: str,
    method: str,
    device: torch.device,
    everyone: Sequence[Conclusion],
    checked: ResultCheck,
) -> Measured:
    alone = Timing.of(everyone[0].one_device_s)
    ideal, ranks = (
        Timing.of([max(seconds) for seconds in zip(*of_ranks, strict=True)])
        for of_ranks in ([found.ideal_s for found in everyone], [found.ranks_s for found in everyone])
    )
    run = middle_run([on_one_clock(run) for run in zip(*(found.dissected for found in everyone), strict=True)])
    activities = tuple(sorted((it for one in run for it in one.activities), key=lambda it: it.start_s))
    parts = break_down(activities, [one.call for one in run])
    verdict = judge(parts, ideal.median_s)
    by_rank = tuple(
        RankResult(rank, part, one.sent_bytes, found.scheduled_bytes, found.memory)
        for rank, (part, one, found) in enumerate(zip(parts, run, everyone, strict=True))
    )
    result = Result(
        parameters=_parameters(settings, kernel),
        machine=machine_of(device),
        one_device=alone,
        one_device_method=method,
        ideal=ideal,
        ranks=ranks,
        speedup=Ratio.of(alone, ranks),
        share_of_ideal=Ratio.of(ideal, ranks),
        by_rank=by_rank,
        bottleneck=verdict.bottleneck,
        verdict=verdict.text,
        check=checked,
    )
    return Measured(result, activities)


def on_one_clock(run: Sequence[Dissected]) -> list[Dissected]:
    """Clocks agree on one machine. Across machines, the barrier before the run is the common moment."""
    if len({one.host for one in run}) == 1:
        return list(run)

    def shifted(one: Dissected) -> Dissected:
        by_s = one.call.start_s
        activities = tuple(it._replace(start_s=it.start_s - by_s, end_s=it.end_s - by_s) for it in one.activities)
        return one._replace(call=Interval(0.0, one.call.end_s - by_s), activities=activities)

    return [shifted(one) for one in run]


def middle_run(runs: Sequence[list[Dissected]]) -> list[Dissected]:
    """The run with the median time."""

    def total_s(run: list[Dissected]) -> float:
        return max(one.call.end_s for one in run) - min(one.call.start_s for one in run)

    middle_s = statistics.median_low(map(total_s, runs))
    return next(run for run in runs if total_s(run) == middle_s)


def _parameters(settings: Settings, kernel: str) -> BenchParameters:
    return BenchParameters(
        world_size=settings.world_size,
        seq_len=settings.seq_len,
        batch=settings.batch,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        dtype=settings.dtype,
        mask=repr(settings.mask),
        layout=settings.layout_name,
        algorithm=settings.algorithm,
        direction=settings.direction,
        mesh=settings.mesh,
        kernel=kernel,
        has_backward=settings.has_backward,
        transport=settings.carrier,
        repeats=settings.repeats,
        seed=settings.seed,
        reproducible=settings.reproducible,
    )


def machine_of(device: torch.device) -> MachineInfo:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    version = str(torch.__version__)  # unpickling torch's own type would load torch in the parent
    return MachineInfo(platform.platform(), os.cpu_count() or 1, name, platform.python_version(), version)


Times = dict[tuple[Phase, str], list[float]]
"""Seconds of every repeat, by phase and by who ran it: "one", "ranks" or "ideal"."""


class GatheredModel(NamedTuple):
    """The measurements of one rank. Times of one process come from rank 0 while the others are idle."""

    seconds: Times
    cpu_seconds: Times
    dissected: dict[Phase, list[Dissected]]
    memory: ModelMemory
    chosen: list[list[int]]


def conclude_transformer(
    job: Job,
    model: Decoder,
    kernel: str,
    device: torch.device,
    everyone: Sequence[GatheredModel],
    one_process: ModelMemory,
    checked: Checked,
) -> TransformerResult:
    """The result of the measurements of all ranks."""
    assert job.transformer is not None
    return TransformerResult(
        settings=job.transformer,
        world_size=job.world_size,
        transport=job.carrier,
        machine=machine_of(device),
        kernel=kernel,
        num_parameters=sum(x.numel() for x in model.parameters()),
        phases={phase: _conclude_phase(job, phase, everyone) for phase in PHASES},
        one_process_memory=one_process,
        memory_by_rank=tuple(found.memory for found in everyone),
        checks=checked.checks,
        right_tokens=checked.right_tokens,
        num_answered=checked.num_tokens,
    )


def _conclude_phase(job: Job, phase: Phase, everyone: Sequence[GatheredModel]) -> PhaseResult:
    settings = job.transformer
    assert settings is not None
    one = Timing.of(everyone[0].seconds[phase, "one"])
    ranks, ideal = _slowest(phase, "ranks", everyone), _slowest(phase, "ideal", everyone)
    assert ranks is not None
    return PhaseResult(
        num_tokens=settings.batch * (1 if phase == "decode" else settings.seq_len),
        one_process=one,
        ranks=ranks,
        ideal=ideal,
        speedup=Ratio.of(one, ranks),
        share_of_ideal=None if ideal is None else Ratio.of(ideal, ranks),
        share_of_ideal_cpu=_share_of_cpu(phase, everyone) if job.carrier in ("gloo", "mpi") else None,
        by_rank=_break_down(phase, everyone),
    )


def _slowest(phase: Phase, who: str, everyone: Sequence[GatheredModel]) -> Timing | None:
    if (phase, who) not in everyone[0].seconds:
        return None
    return Timing.of([max(seconds) for seconds in zip(*(found.seconds[phase, who] for found in everyone), strict=True)])


def _share_of_cpu(phase: Phase, everyone: Sequence[GatheredModel]) -> Ratio | None:
    """The ratio in processor time, summed over the ranks."""
    if (phase, "ideal") not in everyone[0].cpu_seconds:
        return None
    ideal, ranks = (
        Timing.of(
            [sum(seconds) for seconds in zip(*(found.cpu_seconds[phase, who] for found in everyone), strict=True)]
        )
        for who in ("ideal", "ranks")
    )
    return Ratio.of(ideal, ranks)


def _break_down(phase: Phase, everyone: Sequence[GatheredModel]) -> tuple[Breakdown, ...]:
    runs = zip(*(found.dissected[phase] for found in everyone), strict=True)
    run = middle_run([on_one_clock(run) for run in runs])
    activities = sorted((it for one in run for it in one.activities), key=lambda it: it.start_s)
    parts = break_down(activities, [one.call for one in run])
    return tuple(part.divided_by(ANSWER) if phase == "decode" else part for part in parts)


StepTimes = dict[str, list[float]]
"""Seconds of every repeat, by who ran it: "one", "ranks" or "ideal"."""


class Learned(NamedTuple):
    """The learned plan of the model, and the time that learning took."""

    num_parameters: int
    plan: str
    learned_s: float


class FoundSteps(NamedTuple):
    """The measurements of one rank. Times of one process come from rank 0 while the others are idle."""

    times: StepTimes
    cpu_times: StepTimes
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
        share_of_ideal_cpu=_cpu_share_of_steps(everyone) if job.carrier in ("gloo", "mpi") else None,
        by_rank=break_down(activities, [one.call for one in run]),
        one_process_memory=one_process,
        memory_by_rank=tuple(found.memory for found in everyone),
        check=check,
    )


def _by_repeat(combine: Callable[[Sequence[float]], float], seconds: Sequence[Sequence[float]]) -> list[float]:
    return [combine(of_repeat) for of_repeat in zip(*seconds, strict=True)]


def _cpu_share_of_steps(everyone: Sequence[FoundSteps]) -> Ratio:
    """The ratio in processor time, summed over the ranks."""
    ideal, ranks = (
        Timing.of(_by_repeat(sum, [found.cpu_times[who] for found in everyone])) for who in ("ideal", "ranks")
    )
    return Ratio.of(ideal, ranks)

"""How does rank 0 combine what the ranks have measured into one result?"""

import os
import platform
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringspan.bench.breakdown import Interval, break_down, judge
from ringspan.bench.result import (
    Activity,
    BenchParameters,
    MachineInfo,
    Measured,
    MeasuredMemory,
    RankResult,
    Ratio,
    Result,
    ResultCheck,
    Timing,
)
from ringspan.bench.settings import Settings


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
    """The result of the measurements of all ranks."""
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
    """Where this process runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    version = str(torch.__version__)  # unpickling torch's own type would load torch in the parent
    return MachineInfo(platform.platform(), os.cpu_count() or 1, name, platform.python_version(), version)

"""How does rank 0 combine what the ranks have measured of a model into one result?"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ringspan.bench.breakdown import break_down
from ringspan.bench.check_model import Checked
from ringspan.bench.conclude import Dissected, machine_of, middle_run, on_one_clock
from ringspan.bench.decoder import Decoder
from ringspan.bench.result import Breakdown, Ratio, Timing
from ringspan.bench.settings import Job
from ringspan.bench.transformer_result import ANSWER, PHASES, ModelMemory, Phase, PhaseResult, TransformerResult

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

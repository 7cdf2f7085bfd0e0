"""Verify on ranks that torchrun has started: every process calls this, and rank 0 has the report."""

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringspan.verify.diagnose import diagnose
from ringspan.verify.ranks import Hung, Outcome, Refused, join_ranks, run_rank
from ringspan.verify.report import VerifyReport
from ringspan.verify.run import Progressing, cases_for, judge
from ringspan.verify.targets.find import find_target

_TIMEOUT = timedelta(seconds=60)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process as one of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys() and int(environment["WORLD_SIZE"]) > 1


def verify_here(
    target: Any, *, thorough: bool = False, seed: int = 0, progress: Progressing | None = None, **options: Any
) -> VerifyReport | None:
    """The report on rank 0, None on the others. Results travel over a group of their own."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        return _verify(target, thorough, seed, progress or (lambda *_: None), options)
    finally:
        dist.destroy_process_group()


def _verify(
    target: Any, thorough: bool, seed: int, progress: Progressing, options: dict[str, Any]
) -> VerifyReport | None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = dist.new_group(backend="gloo", timeout=3 * _TIMEOUT)
    found = find_target(target, **options)
    cases = cases_for(found, [world_size], thorough=thorough, seed=seed)
    start = time.monotonic()
    verdicts, failures = [], []
    for number, case in enumerate(cases):
        outcome: Outcome | None = None
        if found.can_ask(case):
            own: Any
            try:
                own = run_rank(found, case, dist.group.WORLD, rank)
            except Exception as error:
                own = Refused(type(error).__name__, str(error))
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, own, group=results)
            refused = [part for part in everyone if isinstance(part, Refused)]
            if refused:
                told = f"{len(refused)} of {world_size} ranks raised: {refused[0].kind}: {refused[0].message}"
                outcome = refused[0] if len(refused) == world_size else Hung(told)
            else:
                outcome = join_ranks(case, everyone)
        if rank == 0:
            progress(number, len(cases), case)
            missing = tuple(sorted(case.features - set(found.features)))
            verdict, failure = judge(case, outcome, missing)
            verdicts.append(verdict)
            failures += [] if failure is None else [failure]
    if rank:
        return None
    diagnosis = diagnose(failures) if failures else None
    return VerifyReport(found.name, tuple(verdicts), diagnosis, time.monotonic() - start)

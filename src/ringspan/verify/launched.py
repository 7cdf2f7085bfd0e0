"""Verify on ranks that torchrun or mpirun has started: every process calls this, and rank 0 has the report."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ringspan.errors import UnsupportedError
from ringspan.verify.diagnose import diagnose
from ringspan.verify.ranks import Hung, Outcome, Refused, join_ranks, run_rank
from ringspan.verify.report import VerifyReport
from ringspan.verify.run import Progressing, cases_for, judge
from ringspan.verify.targets.base import Target
from ringspan.verify.targets.find import find_target
from ringspan.verify.transformer_models import PREFIX

_TIMEOUT = timedelta(seconds=60)


class _Ranks(NamedTuple):
    """This process as a rank: `gather` collects a value of every rank, on all of them."""

    rank: int
    world_size: int
    group: Any
    gather: Callable[[Any], list[Any]]


def verify_here(
    target: Any,
    *,
    by: Literal["torchrun", "mpirun"] = "torchrun",
    thorough: bool = False,
    seed: int = 0,
    progress: Progressing | None = None,
    **options: Any,
) -> VerifyReport | None:
    """The report on rank 0, None on the others. Results travel over a group of their own.

    Under mpirun a target for threads gets the MPI communicator as its group, one for processes a gloo group.
    """
    if isinstance(target, str) and target.startswith(PREFIX):
        raise UnsupportedError(
            "models run on ranks that are threads", argument="target", value=target, remedy=f"run it without {by}"
        )
    torch.set_num_threads(1)
    found = find_target(target, **options)
    with _started_by_torchrun() if by == "torchrun" else _started_by_mpirun(found) as ranks:
        return _verify(found, ranks, thorough, seed, progress or (lambda *_: None))


@contextmanager
def _started_by_torchrun() -> Iterator[_Ranks]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        results = dist.new_group(backend="gloo", timeout=3 * _TIMEOUT)

        def gather(value: Any) -> list[Any]:
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, value, group=results)
            return everyone

        yield _Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, gather)
    finally:
        dist.destroy_process_group()


@contextmanager
def _started_by_mpirun(target: Target) -> Iterator[_Ranks]:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UnsupportedError("ranks of mpirun need mpi4py; install it, or start them with torchrun") from error
    everyone = MPI.COMM_WORLD
    results = everyone.Dup()
    if target.ranks == "threads":
        yield _Ranks(everyone.rank, everyone.size, everyone, results.allgather)
        return
    rendezvous = everyone.bcast(_rendezvous() if everyone.rank == 0 else None)
    rank, world_size = everyone.rank, everyone.size
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    try:
        yield _Ranks(rank, world_size, dist.group.WORLD, results.allgather)
    finally:
        dist.destroy_process_group()


def _rendezvous() -> str:
    with socket.create_server(("", 0)) as free:
        return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"


def _verify(found: Target, ranks: _Ranks, thorough: bool, seed: int, progress: Progressing) -> VerifyReport | None:
    cases = cases_for(found, [ranks.world_size], thorough=thorough, seed=seed)
    start = time.monotonic()
    verdicts, failures = [], []
    for number, case in enumerate(cases):
        outcome: Outcome | None = None
        if found.can_ask(case):
            own: Any
            try:
                own = run_rank(found, case, ranks.group, ranks.rank)
            except Exception as error:
                own = Refused(type(error).__name__, str(error))
            everyone = ranks.gather(own)
            refused = [part for part in everyone if isinstance(part, Refused)]
            if refused:
                told = f"{len(refused)} of {ranks.world_size} ranks raised: {refused[0].kind}: {refused[0].message}"
                outcome = refused[0] if len(refused) == ranks.world_size else Hung(told)
            else:
                outcome = join_ranks(case, everyone)
        if ranks.rank == 0:
            progress(number, len(cases), case)
            missing = tuple(sorted(case.features - set(found.features)))
            verdict, failure = judge(case, outcome, missing)
            verdicts.append(verdict)
            failures += [] if failure is None else [failure]
    if ranks.rank:
        return None
    diagnosis = diagnose(failures) if failures else None
    return VerifyReport(found.name, tuple(verdicts), diagnosis, time.monotonic() - start)

"""Verify on ranks that torchrun or mpirun has started: every process calls this, and rank 0 has the report."""

import functools
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ringspan.errors import TransportError, UnsupportedError
from ringspan.verify.diagnose import diagnose
from ringspan.verify.patterns import Numbers
from ringspan.verify.ranks import Outcome, join_ranks, outcome_of_error, outcome_of_refusals, run_rank
from ringspan.verify.report import VerifyReport
from ringspan.verify.run import Progressing, cases_for, judge
from ringspan.verify.targets.base import Target
from ringspan.verify.targets.find import find_target
from ringspan.verify.transformer_models import PREFIX

_TIMEOUT = timedelta(seconds=60)
_PATIENCE = 3 * _TIMEOUT  # of a rank that has the result of a case, for the others


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
        results = dist.new_group(backend="gloo", timeout=_PATIENCE)

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
        raise UnsupportedError(
            "ranks of mpirun need mpi4py", remedy="install it, or start them with torchrun"
        ) from error
    everyone = MPI.COMM_WORLD
    gather = functools.partial(_gather_by_mpi, everyone.Dup())
    rank, world_size = everyone.rank, everyone.size
    try:
        if target.ranks == "threads":
            yield _Ranks(rank, world_size, everyone, gather)
            return
        rendezvous = everyone.bcast(_rendezvous() if rank == 0 else None)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=_TIMEOUT)
        yield _Ranks(rank, world_size, dist.group.WORLD, gather)
        dist.destroy_process_group()
    except TransportError as error:  # a rank hangs: MPI would wait for it before this process may end
        sys.stderr.write(f"Error: {error}\n")
        everyone.Abort(2)


def _gather_by_mpi(comm: Any, value: Any) -> list[Any]:
    """A value of every rank. MPI's own waits have no time limit, so this polls."""
    deadline = time.monotonic() + _PATIENCE.total_seconds()

    def gather(own: Numbers) -> Numbers:
        parts = np.empty((comm.size, len(own)), own.dtype)
        request = comm.Iallgather(own, parts)
        while not request.Test():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no word of a rank for {_PATIENCE.total_seconds():g} s")
            time.sleep(1e-3)
        return parts

    payload = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = gather(np.array([len(payload)]))[:, 0]
    everyone = gather(np.pad(payload, (0, int(sizes.max()) - len(payload))))
    return [pickle.loads(part[:size].tobytes()) for part, size in zip(everyone, sizes, strict=True)]  # noqa: S301


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
            except (Exception, SystemExit) as error:
                own = outcome_of_error(error)
            try:
                everyone = ranks.gather(own)
            except (RuntimeError, TimeoutError) as error:
                reason = (str(error).splitlines() or [""])[0]
                raise TransportError(
                    f"rank {ranks.rank} did not get the others' results of the case {case}: {reason}"
                ) from error
            outcome = outcome_of_refusals(everyone) or join_ranks(case, everyone)
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

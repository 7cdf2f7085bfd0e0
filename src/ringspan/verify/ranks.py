"""How is a target run on ranks: as threads of this process, or as processes with a gloo group?"""

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ringspan.errors import TransportError
from ringspan.transports.in_process import run_in_process
from ringspan.verify.cases import VerifyCase
from ringspan.verify.outcome import Computed
from ringspan.verify.patterns import Numbers, mask_of
from ringspan.verify.targets.base import Target, TargetCall

CASE_TIMEOUT_S = 60.0
_START_TIMEOUT_S = 180.0
_GRACE_S = 10.0  # for the other ranks, after one has failed


class Refused(NamedTuple):
    """A rank raised an error instead of computing; `kind` is the name of the exception."""

    kind: str
    message: str


class Hung(NamedTuple):
    """Ranks did not finish a case in time."""

    message: str


RankResult = dict[str, Numbers]
Outcome = Computed | Refused | Hung


def run_threads(target: Target, case: VerifyCase, timeout_s: float = CASE_TIMEOUT_S) -> Outcome:
    """One case on ranks that are threads."""
    try:
        parts = run_in_process(
            lambda group: run_rank(target, case, group, group.rank), case.world_size, timeout_s=timeout_s
        )
    except TransportError as error:
        return Hung(str(error)) if "in time" in str(error) or "timed out" in str(error) else _refused(error)
    except Exception as error:
        return _refused(error)
    return join_ranks(case, parts)


def _refused(error: BaseException) -> Refused:
    return Refused(type(error).__name__, (str(error).strip().splitlines() or [""])[0])


def run_rank(target: Target, case: VerifyCase, group: Any, rank: int) -> RankResult:
    """One rank's outputs and gradients."""
    question = case.question()
    layout, kv_layout = case.q_layout(), case.kv_layout()
    dtype = getattr(torch, case.dtype)

    def leaf(x: Numbers) -> torch.Tensor:
        return torch.tensor(np.ascontiguousarray(x)).to(dtype).requires_grad_(case.has_backward)

    q = leaf(layout.shard(question.q, rank, 2))
    k, v = (leaf(kv_layout.shard(x, rank, 2)) for x in (question.k, question.v))
    sinks = None if question.sinks is None else leaf(question.sinks)
    call = TargetCall(
        *(q, k, v, mask_of(case.pattern), layout, kv_layout), *(case.scale, sinks, case.softcap, group, rank, case)
    )
    with torch.enable_grad(), target.surroundings(call):
        result = target.attend(call)
        out, lse = result if isinstance(result, tuple) else (result, None)
        found = {"out": _numbers(out)} | ({} if lse is None else {"lse": _numbers(lse)})
        if case.has_backward:
            torch.autograd.backward(out, torch.tensor(layout.shard(question.dout, rank, 2)).to(out.dtype))
    if case.has_backward:
        leaves = {"dq": q, "dk": k, "dv": v} | ({} if sinks is None else {"dsinks": sinks})
        found |= {name: _numbers(torch.zeros_like(x) if x.grad is None else x.grad) for name, x in leaves.items()}
    return found


def _numbers(x: torch.Tensor) -> Numbers:
    return x.detach().double().numpy()


def join_ranks(case: VerifyCase, parts: Sequence[RankResult]) -> Computed:
    """The whole results; the ranks' shares of dsinks are added."""
    whole: dict[str, Numbers] = {}
    for name in parts[0]:
        shards = [part[name] for part in parts]
        if name == "dsinks":
            whole[name] = np.sum(shards, axis=0)
            continue
        layout = case.q_layout() if name in ("out", "lse", "dq") else case.kv_layout()
        if any(shard.shape[2:3] != (layout.shard_len(rank),) for rank, shard in enumerate(shards)):
            whole[name] = np.concatenate([shard.reshape(-1) for shard in shards])  # no shape that could be right
        else:
            whole[name] = layout.unshard(shards, 2)
    return Computed.of(whole.pop("out"), whole.pop("lse", None), whole)


def run_processes(
    make_target: Callable[[], Target], cases: Sequence[VerifyCase], timeout_s: float = CASE_TIMEOUT_S
) -> Iterator[tuple[VerifyCase, Outcome]]:
    """Cases of one world size on processes, which are started anew after a case that ended badly."""
    at = 0
    while at < len(cases):
        with _Processes(make_target, cases[at:]) as ranks:
            while at < len(cases):
                outcome = ranks.next(_START_TIMEOUT_S if ranks.is_new else timeout_s)
                yield cases[at], outcome
                at += 1
                if isinstance(outcome, Hung):
                    break


class _Processes:
    """Ranks that work through cases; all are ended on the way out."""

    def __init__(self, make_target: Callable[[], Target], cases: Sequence[VerifyCase]) -> None:
        self._cases = iter(cases)
        self.is_new = True
        self._directory = tempfile.TemporaryDirectory(prefix="ringspan-verify-")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        store = str(Path(self._directory.name) / "store")
        world_size = cases[0].world_size
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(make_target, list(cases), rank, world_size, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "_Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()

    def next(self, timeout_s: float) -> Outcome:
        """The outcome of the next case."""
        self.is_new = False
        case = next(self._cases)
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        for pipe in waiting:
            with suppress(BrokenPipeError):
                pipe.send("next")
        parts: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for heard in ready:
                assert isinstance(heard, Connection)
                parts[waiting.pop(heard)] = _received(heard)
            if any(isinstance(part, Refused | Hung) for part in parts.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        return _outcome_of(case, [parts.get(rank) for rank in range(len(self._pipes))], timeout_s)


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return Hung("died")


def _outcome_of(case: VerifyCase, parts: Sequence[Any], timeout_s: float) -> Outcome:
    """The outcome of what the ranks reported; None is a rank that reported nothing."""
    refused = [part for part in parts if isinstance(part, Refused)]
    if len(refused) == len(parts):
        return refused[0]
    if refused:
        return Hung(f"{len(refused)} of {len(parts)} ranks raised: {refused[0].kind}: {refused[0].message}")
    for rank, part in enumerate(parts):
        if part is None:
            return Hung(f"rank {rank} had no result after {timeout_s:g} s")
        if isinstance(part, Hung):
            return Hung(f"rank {rank} died")
    return join_ranks(case, parts)


def _work(
    make_target: Callable[[], Target],
    cases: Sequence[VerifyCase],
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
) -> None:
    """A rank: every case, and its result or its error."""
    torch.set_num_threads(1)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    target = make_target()
    for case in cases:
        pipe.recv()  # until all ranks are through with the case before
        try:
            pipe.send(run_rank(target, case, dist.group.WORLD, rank))
        except Exception as error:
            pipe.send(_refused(error))

"""How is a target run on ranks: as threads of this process, or as processes with a gloo group?"""

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from ringspan.errors import TransportError, UnsupportedError
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


class Broken(NamedTuple):
    """A rank returned something that cannot be an output, or changed its inputs."""

    message: str


class Hung(NamedTuple):
    """Ranks did not finish a case together."""

    message: str


class BrokenResultError(Exception):
    """Raised on a rank whose target broke a rule of every case; the case becomes `Broken`."""


RankResult = dict[str, Numbers]
Outcome = Computed | Refused | Broken | Hung


def run_threads(target: Target, case: VerifyCase, timeout_s: float = CASE_TIMEOUT_S) -> Outcome:
    try:
        parts = run_in_process(
            lambda group: run_rank(target, case, group, group.rank), case.world_size, timeout_s=timeout_s
        )
    except TransportError as error:
        is_late = "in time" in str(error) or "timed out" in str(error)
        return Hung(str(error)) if is_late else outcome_of_error(error)
    except (Exception, SystemExit) as error:
        return outcome_of_error(error)
    return join_ranks(case, parts)


def outcome_of_error(error: BaseException) -> Refused | Broken:
    """What a case becomes if a rank raised this."""
    told = (str(error).strip().splitlines() or [""])[0]
    return Broken(told) if isinstance(error, BrokenResultError) else Refused(type(error).__name__, told)


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
    inputs = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    before = {name: x.detach().clone() for name, x in inputs.items()}
    with torch.enable_grad(), target.surroundings(call):
        out, lse = _out_and_lse(target.attend(call), q)
        _check_unchanged(inputs, before, rank)
        found = {"out": _numbers(out)} | ({} if lse is None else {"lse": _numbers(lse)})
        if case.has_backward:
            torch.autograd.backward(out, torch.tensor(layout.shard(question.dout, rank, 2)).to(out.dtype))
    if case.has_backward:
        _check_unchanged(inputs, before, rank)
        grads = {f"d{name}": torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
        found |= {name: _numbers(grad) for name, grad in grads.items()}
    return found


def _out_and_lse(result: Any, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Out and lse of what a target returned."""
    parts = tuple(result) if isinstance(result, tuple | list) else (result,)
    kinds = ", ".join(type(part).__name__ for part in parts)
    out, lse = (*parts, None)[:2] if 1 <= len(parts) <= 2 else (None, None)
    if not isinstance(out, torch.Tensor) or not isinstance(lse, torch.Tensor | None):
        returned = f"({kinds})" if isinstance(result, tuple | list) else kinds
        raise BrokenResultError(f"the target returned {returned}; return the tensor out, or (out, lse)")
    if not out.is_floating_point():
        raise BrokenResultError(f"the target returned out in {out.dtype}; return it in the type of q, {q.dtype}")
    if out.shape != q.shape:
        raise BrokenResultError(
            f"the target returned out of shape {tuple(out.shape)}; return that of q, {tuple(q.shape)}"
        )
    if lse is not None and lse.shape != q.shape[:3]:
        shape, right = tuple(lse.shape), tuple(q.shape[:3])
        raise BrokenResultError(f"the target returned lse of shape {shape}; return (batch, heads, seq), {right}")
    if q.requires_grad and not out.requires_grad:
        raise BrokenResultError(
            "the target returned out without a gradient; make it differentiable, or declare no 'backward'"
        )
    return out, lse


def _check_unchanged(inputs: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor], rank: int) -> None:
    changed = [name for name, x in inputs.items() if not torch.equal(x.detach(), before[name])]
    if changed:
        raise BrokenResultError(f"the target changed its input {', '.join(changed)} in place on rank {rank}")


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
    """Cases of one world size on processes, which are started anew after a case that ended badly.

    Raises:
        UnsupportedError: the target cannot be pickled.
    """
    try:
        ForkingPickler.dumps(make_target)
    except Exception as error:
        raise UnsupportedError(
            f"processes need a target that can be pickled: {error}",
            argument="target",
            remedy="define it at the top of a module, or use threads",
        ) from error
    at = 0
    while at < len(cases):
        with _Processes(make_target, cases[at:]) as ranks:
            while at < len(cases):
                outcome = ranks.next(_START_TIMEOUT_S if ranks.is_new else timeout_s)
                yield cases[at], outcome
                at += 1
                if isinstance(outcome, Hung) or not ranks.are_idle:
                    break


class _Processes:
    """Ranks that work through cases; all are ended on the way out."""

    def __init__(self, make_target: Callable[[], Target], cases: Sequence[VerifyCase]) -> None:
        self._cases = iter(cases)
        self.is_new = True
        self.are_idle = True
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
            if any(isinstance(part, Refused | Broken | Hung) for part in parts.values()):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        self.are_idle = not waiting
        return _outcome_of(case, [parts.get(rank) for rank in range(len(self._pipes))], timeout_s)


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return Hung("died")


def _outcome_of(case: VerifyCase, parts: Sequence[Any], timeout_s: float) -> Outcome:
    """The outcome of what the ranks reported; None is a rank that reported nothing."""
    if (told := outcome_of_refusals(parts)) is not None:
        return told
    for rank, part in enumerate(parts):
        if part is None:
            return Hung(f"rank {rank} had no result after {timeout_s:g} s")
        if isinstance(part, Hung):
            return Hung(f"rank {rank} died")
    return join_ranks(case, parts)


def outcome_of_refusals(parts: Sequence[Any]) -> Outcome | None:
    """The outcome if any rank raised; None if none did."""
    broken = [part for part in parts if isinstance(part, Broken)]
    refused = [part for part in parts if isinstance(part, Refused)]
    refused.sort(key=lambda part: part.kind == "TransportError")  # often the consequence of another rank's error
    if broken:
        return broken[0]
    if not refused or len(refused) == len(parts):
        return refused[0] if refused else None
    return Hung(f"{len(refused)} of {len(parts)} ranks raised: {refused[0].kind}: {refused[0].message}")


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
        except (Exception, SystemExit) as error:
            pipe.send(outcome_of_error(error))

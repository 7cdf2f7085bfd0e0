"""Does anything grow with the number of calls or groups? `make soak`.

`python -m support.soak CALLS GROUPS COMPILED` sets the numbers.

Two gloo ranks make calls on one group, then make a group for each call and destroy it, then compile a call for each
group. Memory, open files and threads are counted when a tenth of a phase is over and at its end.
"""

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import ringspan as rs
from support.ranks import run_ranks, values


class Held(NamedTuple):
    """What a process holds."""

    bytes: int
    files: int
    threads: int


class Phase(NamedTuple):
    """What one rank held early in a phase and at its end."""

    name: str
    count: int
    early: Held
    late: Held


def held() -> Held:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = int(fields["RssAnon"].split()[0])
    return Held(1024 * kilobytes, sum(1 for _ in Path("/proc/self/fd").iterdir()), int(fields["Threads"]))


def settled() -> Held:
    """After a group was destroyed its threads need a moment to end."""
    now = None
    for _ in range(20):
        gc.collect()
        before, now = now, held()
        if now[1:] == (before or now)[1:] and before is not None:
            break
        time.sleep(0.5)
    assert now is not None
    return now


def soak(rank: int, counts: tuple[int, int, int]) -> list[Phase]:
    layout = rs.zigzag(64, 2)
    q, k, v = (torch.randn(1, 2, layout.shard_len(rank), 8) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        out = rs.attention(q, k, v, mask=rs.causal(), layout=layout, group=group, algorithm="pass_kv")
        assert isinstance(out, torch.Tensor)
        return out

    def on_new_group(call: Callable[..., torch.Tensor]) -> None:
        group = dist.new_group([0, 1])
        call(q, k, v, group)
        dist.barrier()
        dist.destroy_process_group(group)

    def compiled() -> None:
        on_new_group(torch.compile(attend, backend="eager"))
        torch.compiler.reset()

    each = {
        "calls": lambda: attend(q, k, v, None),
        "groups": lambda: on_new_group(attend),
        "groups of compiled calls": compiled,
    }
    phases = []
    for (name, once), count in zip(each.items(), counts, strict=True):
        for number in range(count):
            if number == count // 10:
                early = settled()
            once()
        phases.append(Phase(name, count, early, settled()))
    return phases


def run(counts: tuple[int, int, int], timeout_s: float) -> list[list[Phase]]:
    """The phases of both ranks."""
    return values(run_ranks(soak, 2, counts, timeout_s=timeout_s))


if __name__ == "__main__":
    from support import soak as module  # ranks are told of its functions by the module's name

    num_calls, num_groups, num_compiled = map(int, sys.argv[1:] or ("10000", "300", "300"))
    for rank, phases in enumerate(module.run((num_calls, num_groups, num_compiled), 7200.0)):
        for phase in phases:
            early, late = phase.early, phase.late
            sys.stdout.write(
                f"rank {rank}, {phase.count} {phase.name}: {early.bytes / 1e6:.1f} to {late.bytes / 1e6:.1f} MB, "
                f"{early.files} to {late.files} files, {early.threads} to {late.threads} threads\n"
            )

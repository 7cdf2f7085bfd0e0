"""Machines that die, freeze, or lose their network in the middle of long messages: who notices, when, and who is named.

The deadline of the group is torch's own, 30 minutes. Times are allowed three times what is promised.
"""

import re
import time
from pathlib import Path

import pytest

from support.machines import Job, Machines, needs_machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.timeout(240),
    needs_machines,
]

WORLD_SIZE = 4
LIMIT_S = 5.0
CALLS = ["pass_kv", "pass_q", "ulysses", "double_ring", "decode", "backward"]


def survivors(victim: int) -> list[int]:
    return [rank for rank in range(WORLD_SIZE) if rank != victim]


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize(("fault", "victim"), [("kill", 2), ("kill", 0), ("freeze", 1), ("freeze", 0), ("cut", 3)])
def test_every_survivor_names_the_lost_rank(what: str, fault: str, victim: int, tmp_path: Path) -> None:
    with Machines(WORLD_SIZE) as machines, Job(machines, tmp_path, "support.machine_program", what) as job:
        job.await_word("READY", [*range(WORLD_SIZE)], 120)
        time.sleep(1.0)  # into the middle of a message
        began = time.time()
        {"kill": job.kill, "freeze": job.freeze, "cut": machines.cut}[fault](victim)
        fates = job.fates(survivors(victim), began, 60)
        print({rank: (round(fate.seconds, 2), fate.message) for rank, fate in fates.items()})  # noqa: T201
        promised_s = 2.0 if fault == "kill" else LIMIT_S + 1.0
        found = {"kill": "gone", "freeze": "frozen", "cut": "cut off"}[fault]
        for fate in fates.values():
            assert fate.error == "TransportError"
            assert re.search(rf"rank {victim} on \S+ \(process \d+\) is {found}", fate.message), fate.message
            assert re.search(r"\d+ of \d+ bytes were through", fate.message), fate.message
            assert fate.seconds < 3 * promised_s
        assert job.exit_codes(survivors(victim), 60) == [0] * (WORLD_SIZE - 1)


def test_a_slow_link_is_named_by_a_rank_at_its_ends(tmp_path: Path) -> None:
    """Parts of a message take longer than the deadline, while all ranks show that they are alive.

    Both ends of the message wait. Which of them is slow is a guess, from how many ranks wait for each.
    """
    slow = 2
    with Machines(WORLD_SIZE) as machines, Job(machines, tmp_path, "support.machine_program", "pass_kv", "12") as job:
        job.await_word("READY", [*range(WORLD_SIZE)], 120)
        time.sleep(1.0)
        machines.shape(slow, "400kbit")
        fates = job.fates([*range(WORLD_SIZE)], time.time(), 120)
        print({rank: (round(fate.seconds, 2), fate.message) for rank, fate in fates.items()})  # noqa: T201
        for fate in fates.values():
            ends = f"[{slow - 1}-{slow + 1}]"
            assert re.search(rf"rank {ends} on \S+ \(process \d+\) is alive, but slow", fate.message), fate.message
            assert re.search(r"timed out after 12 s without progress: ", fate.message)


def test_a_slow_link_that_makes_progress_is_not_a_fault(tmp_path: Path) -> None:
    """The deadline is for a wait without progress: each part of a message takes less, a whole one longer."""
    with (
        Machines(2, "16mbit") as machines,
        Job(machines, tmp_path, "support.machine_program", "pass_kv", "2", "3") as job,
    ):
        job.await_word("DESTROYED", [0, 1], 120)
        assert job.said(0, "ERROR") is job.said(1, "ERROR") is None

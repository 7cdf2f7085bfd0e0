"""Ranks that die, freeze, stay away or fail, on 2, 3 and 4 gloo processes.

Every survivor raises a clear error within its deadline, no rank hangs or aborts, and every process can exit, which
`run_ranks` checks. Seconds are each rank's own measure of its call.
"""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan.runtime.session import session_of
from support.calls import (
    AMPLE_S,
    DEADLINE_S,
    MARGIN_S,
    SEQ_LEN,
    Arguments,
    Outcome,
    arguments,
    attend,
    dies_at,
    outcome,
)
from support.ranks import Ended, run_interpreters, run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

each_world_size = pytest.mark.parametrize("world_size", [2, 3, 4])

STEP_OR_CALL = re.compile(r"^rank \d, (step \d, .*|call \d, before its first step): ")
BYTES_AND_PEER = re.compile(r"\d+ bytes (from|to) rank \d")


def assert_clear(end: Outcome, rank: int, deadline_s: float) -> None:
    """Check for an error that names the rank, its step, the peer and the bytes, within the deadline."""
    assert end.error == "TransportError", end
    assert STEP_OR_CALL.match(end.message), end.message
    assert end.message.startswith(f"rank {rank}, ")
    assert BYTES_AND_PEER.search(end.message), end.message
    assert end.seconds < deadline_s + MARGIN_S


def survivors(ends: list[Ended], victim: int) -> dict[int, list[Outcome]]:
    """Return how the other ranks ended; none of them may have ended by a signal."""
    others = {rank: end for rank, end in enumerate(ends) if rank != victim}
    for rank, end in others.items():
        assert end.error is None, f"rank {rank}: {end.message}"
        assert end.exit_code == 0, f"rank {rank} exited with {end.exit_code}"
    return {rank: end.value for rank, end in others.items()}


def reason_of(end: Outcome) -> str:
    """Return the message after this rank's own place in the call."""
    return end.message.partition(": ")[2]


def twice(given: Arguments) -> list[Outcome]:
    """After a failure the group is unusable and says so at once instead of hanging."""
    return [outcome(given), outcome(given)]


@each_world_size
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_rank_that_is_killed_before_its_first_send(world_size: int, victim: str) -> None:
    """A rank dies. If it is the first rank, the store dies with it."""
    dead = 0 if victim == "first" else world_size - 1
    ends = run_ranks(run_killed_at_first_send, world_size, world_size, dead)
    assert ends[dead].exit_code == -signal.SIGKILL
    outcomes = survivors(ends, dead)
    for rank, (first, second) in outcomes.items():
        assert_clear(first, rank, 0.0)  # a closed connection is noticed at once
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second
    if victim == "last":
        assert len({reason_of(end) for ends in outcomes.values() for end in ends}) == 1


def run_killed_at_first_send(rank: int, world_size: int, dead: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    attend(good)
    return twice(good | ({"record": dies_at("send", 0)} if rank == dead else {}))


@each_world_size
@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q", "ulysses"])
def test_a_rank_that_is_killed_in_mid_ring(world_size: int, algorithm: str) -> None:
    """Some survivors may have everything they need; each must be right or raise."""
    dead = world_size - 1
    ends = run_ranks(run_killed_in_mid_ring, world_size, world_size, dead, algorithm)
    assert ends[dead].exit_code == -signal.SIGKILL
    firsts = {rank: first for rank, (first, _) in survivors(ends, dead).items()}
    for rank, first in firsts.items():
        if first.error is not None:
            assert_clear(first, rank, 0.0)
    assert firsts[0].error is not None  # its next neighbour


def run_killed_in_mid_ring(rank: int, world_size: int, dead: int, algorithm: str) -> list[Outcome]:
    good = arguments(rank, world_size) | {"algorithm": algorithm, "mask": rs.full()}
    attend(good)
    last_send = {"pass_kv": world_size - 2, "pass_q": world_size, "ulysses": 2}[algorithm]
    return twice(good | ({"record": dies_at("send", last_send)} if rank == dead else {}))


@each_world_size
@pytest.mark.parametrize("absent", ["first", "last"])
def test_a_rank_that_never_calls(world_size: int, absent: str) -> None:
    missing = 0 if absent == "first" else world_size - 1
    ends = run_ranks(run_without, world_size, world_size, missing)
    for rank, (first, second) in survivors(ends, missing).items():
        assert_clear(first, rank, DEADLINE_S)
        assert f"from rank {missing}" in first.message
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second


def run_without(rank: int, world_size: int, missing: int) -> list[Outcome]:
    return [] if rank == missing else twice(arguments(rank, world_size) | {"timeout_s": DEADLINE_S})


@pytest.mark.parametrize("world_size", [3, 4])
def test_deadlines_of_different_length(world_size: int) -> None:
    """The first rank stays away; the second has a short deadline, and its error ends the call on all ranks."""
    ends = run_ranks(run_impatient, world_size, world_size)
    outcomes = survivors(ends, 0)
    for rank, (first,) in outcomes.items():
        assert_clear(first, rank, DEADLINE_S)
        assert first.seconds > DEADLINE_S - 0.1
    assert len({reason_of(first) for (first,) in outcomes.values()}) == 1
    assert reason_of(outcomes[world_size - 1][0]).startswith("rank 1 waited for 28 bytes from rank 0 ")


def run_impatient(rank: int, world_size: int) -> list[Outcome]:
    patience_s = DEADLINE_S if rank == 1 else AMPLE_S
    return [outcome(arguments(rank, world_size) | {"timeout_s": patience_s})] if rank else []


def test_a_deadline_below_a_millisecond() -> None:
    """gloo treats 0 ms as no timeout and would wait for the group's, which is longer than this test may run."""
    ends = run_ranks(run_with_no_patience, 2, group_timeout_s=100.0, timeout_s=30.0)
    ((first,),) = survivors(ends, 1).values()
    assert_clear(first, 0, DEADLINE_S)


def run_with_no_patience(rank: int) -> list[Outcome]:
    return [] if rank else [outcome(arguments(rank, 2) | {"timeout_s": 1e-4})]


def test_a_collective_that_one_rank_does_not_join() -> None:
    """Ranks with GPUs agree over a CPU backend; gloo stands in, with a deadline longer than this test may run."""
    first, last = run_ranks(run_collectives, 2, group_timeout_s=100.0, timeout_s=30.0)
    assert isinstance(first.error, rs.TransportError), first
    assert str(first.error) == (
        "rank 0 waited for 4 bytes from each of 2 ranks to agree on the call: timed out after 0.6 s"
    )
    assert last.error is None, last


def run_collectives(rank: int) -> None:
    transport: Any = session_of(None).transport
    mine, everyone = torch.full((4,), 7 + rank, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8)
    transport._gather_at_once(mine, everyone, AMPLE_S)
    assert everyone.tolist() == [[7] * 4, [8] * 4]
    if rank == 0:
        transport._gather_at_once(mine, everyone, DEADLINE_S)


@each_world_size
def test_a_rank_that_calls_twice(world_size: int) -> None:
    """The first call works; in the second a rank is gone. Later calls learn it at once."""
    ends = run_ranks(run_one_too_many, world_size, world_size)
    for rank, (first, second) in survivors(ends, world_size).items():
        assert first.error is None
        if rank == 1:
            assert_clear(second, rank, DEADLINE_S)
            assert "call 2" in second.message
        else:
            assert second.error == "TransportError", second
            assert second.seconds < MARGIN_S


def run_one_too_many(rank: int, world_size: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    first, store = outcome(good), dist.distributed_c10d._get_default_store()
    if rank == 1:
        second = outcome(good | {"timeout_s": DEADLINE_S})
        store.set("given up", "1")
        return [first, second]
    store.wait(["given up"])
    return [first, outcome(good)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("odd", ["first", "last"])
def test_a_rank_that_makes_no_contract(world_size: int, odd: str) -> None:
    """A header never meets a payload, which is longer and would abort the process."""
    odd_rank = 0 if odd == "first" else world_size - 1
    ends = run_ranks(run_without_contract, world_size, world_size, odd_rank)
    for rank, (first, second) in survivors(ends, world_size).items():
        assert_clear(first, rank, DEADLINE_S)
        assert ("step" if rank == odd_rank else "call 2") in first.message
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second


def run_without_contract(rank: int, world_size: int, odd_rank: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    attend(good)
    return twice(good | {"timeout_s": DEADLINE_S, "contract": rank != odd_rank})


class Boom(Exception):
    """An error of the user's own."""


@each_world_size
@pytest.mark.parametrize("failing", ["first", "last"])
def test_a_rank_that_raises_in_mid_call(world_size: int, failing: str) -> None:
    """The rank raises its own error; the other ranks learn the reason."""
    odd = 0 if failing == "first" else world_size - 1
    ends = run_ranks(run_boom, world_size, world_size, odd)
    for rank, (first, second) in survivors(ends, world_size).items():
        if rank == odd:
            assert (first.error, first.message) == ("Boom", "out of luck")
        else:
            assert first.error == "TransportError"
            assert re.match(rf"rank {rank}, step \d, ", first.message)
            assert f"rank {odd} failed" in first.message
            assert "out of luck" in first.message
            assert first.seconds < MARGIN_S
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second


def run_boom(rank: int, world_size: int, odd: int) -> list[Outcome]:
    def record(event: Any) -> None:
        if event.action == "send" and event.step == 0:
            raise Boom("out of luck")

    return twice(arguments(rank, world_size) | ({"record": record} if rank == odd else {}))


@each_world_size
@pytest.mark.parametrize("victim", ["first", "last"])
def test_a_rank_that_freezes(world_size: int, victim: str) -> None:
    """A frozen rank keeps its connections open, and its store is silent: only the deadline helps."""
    frozen = 0 if victim == "first" else world_size - 1
    ends = run_ranks(run_frozen, world_size, world_size, frozen, frozen=frozen, timeout_s=20.0)
    for rank, (first,) in survivors(ends, frozen).items():
        assert_clear(first, rank, DEADLINE_S)


def run_frozen(rank: int, world_size: int, frozen: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    attend(good)
    if rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [outcome(good | {"timeout_s": DEADLINE_S})]


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_rank_that_waits_for_a_frozen_one_while_another_fails(world_size: int) -> None:
    """This rank's own connection is silent and its deadline is far: it finds the reason in the store."""
    frozen = world_size - 2
    ends = run_ranks(run_frozen_and_boom, world_size, world_size, frozen, frozen=frozen)
    for rank, (first,) in survivors(ends, frozen).items():
        if rank == 0:
            assert (first.error, first.message) == ("Boom", "out of luck")
        else:
            assert first.error == "TransportError"
            assert re.match(rf"rank {rank}, step 0, ", first.message)
            assert reason_of(first) == "rank 0 failed: Boom: out of luck"
            assert first.seconds < MARGIN_S


def run_frozen_and_boom(rank: int, world_size: int, frozen: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    attend(good)

    def record(event: Any) -> None:
        if rank == frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(DEADLINE_S)  # until the other ranks wait
        raise Boom("out of luck")

    return [outcome(good | ({"record": record} if rank in (0, frozen) else {}))]


@pytest.mark.parametrize(("timeout_s", "deadline_s"), [(None, 3.0), (DEADLINE_S, DEADLINE_S)])
def test_a_gather_that_one_rank_never_joins(timeout_s: float | None, deadline_s: float) -> None:
    """The deadline is the given one, or the group's."""
    *ends, _ = run_ranks(run_gather_without_last, 3, timeout_s, group_timeout_s=AMPLE_S if timeout_s else deadline_s)
    for rank, end in enumerate(ends):
        assert isinstance(end.error, rs.TransportError), end
        assert str(end.error).startswith(f"rank {rank}, call 1, before its first step: ")
        assert "from rank 2" in str(end.error)
        assert deadline_s - 0.1 < end.seconds < deadline_s + MARGIN_S


def run_gather_without_last(rank: int, timeout_s: float | None) -> None:
    layout = rs.zigzag(SEQ_LEN, 3)
    if rank < 2:
        rs.gather(torch.zeros(layout.shard_len(rank)), layout, dim=0, timeout_s=timeout_s)


def test_a_gather_whose_gradient_one_rank_never_asks_for() -> None:
    *ends, _ = run_ranks(run_gradient_without_last, 3)
    for rank, end in enumerate(ends):
        assert isinstance(end.error, rs.TransportError), end
        assert str(end.error).startswith(f"rank {rank}, call 2, before its first step: ")
        assert DEADLINE_S - 0.1 < end.seconds < MARGIN_S


def run_gradient_without_last(rank: int) -> None:
    layout = rs.zigzag(SEQ_LEN, 3)
    part = torch.zeros(layout.shard_len(rank), requires_grad=True)
    whole = rs.gather(part, layout, dim=0, timeout_s=DEADLINE_S)
    if rank < 2:
        whole.sum().backward()


def test_another_group_is_not_harmed() -> None:
    values(run_ranks(run_two_groups, 3))


def run_two_groups(rank: int) -> None:
    """Two ranks fail in a group of their own; the group of all ranks still works."""
    pair = dist.new_group([0, 1])
    good = arguments(rank, 3)
    expected = attend(good)
    if rank < 2:
        end = outcome(arguments(rank, 2) | {"group": pair, "timeout_s": DEADLINE_S}) if rank == 0 else None
        assert end is None or end.error == "TransportError"
    assert torch.equal(attend(good), expected)


# Interpreters that end like a script


def test_scripts_that_end_well() -> None:
    for exited in run_interpreters(script_in_order, 2):
        assert exited.exit_code == 0, exited.errors


def script_in_order(rank: int, world_size: int) -> None:
    for _ in range(3):
        attend(arguments(rank, world_size))


@pytest.mark.parametrize("dead", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_scripts_of_survivors_end_with_their_error(dead: int) -> None:
    """Each rank exits the moment it fails, so that the others lose their peers and the store."""
    script = (script_killed_first, script_killed_last)[dead > 0]
    exited = run_interpreters(script, 3)
    for rank, end in enumerate(exited):
        if rank == dead:
            assert end.exit_code == -signal.SIGKILL
        else:
            assert end.exit_code == 1, f"rank {rank}: {end}"
            assert re.search(rf"TransportError: rank {rank}, step \d, ", end.errors), end.errors


def script_killed_first(rank: int, world_size: int) -> None:
    run_killed_then_leave(rank, world_size, 0)


def script_killed_last(rank: int, world_size: int) -> None:
    run_killed_then_leave(rank, world_size, world_size - 1)


def run_killed_then_leave(rank: int, world_size: int, dead: int) -> None:
    good = arguments(rank, world_size)
    attend(good)
    attend(good | ({"record": dies_at("send", 0)} if rank == dead else {}))

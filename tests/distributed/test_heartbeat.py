"""Ranks that fall silent, die or are slow while others wait, between processes of this host, linked or by network."""

import logging
import os
import re
import signal
import socket
import time
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.runtime.session import session_of
from ringspan.transports import _heartbeat, torch_distributed
from ringspan.transports._heartbeat import SILENCE, silence_limit_s
from ringspan.transports._heartbeat_links import HeartbeatLink
from ringspan.transports._neighbours import SWITCH
from ringspan.transports.base import Receive, Send
from support.calls import MARGIN_S, Outcome, arguments, attend, dies_at, outcome
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

LIMIT_S = 1.5
each_way = pytest.mark.parametrize("switch", ["1", "0"], ids=["linked", "network"])
FAR_S = 1000.0  # a deadline that no test sees


def prepared(rank: int, world_size: int, switch: str) -> dict[str, Any]:
    os.environ[SILENCE], os.environ[SWITCH] = str(LIMIT_S), switch
    good = arguments(rank, world_size) | {"timeout_s": FAR_S}
    attend(good)
    return good


@each_way
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_rank_is_named_on_every_other(frozen: int, switch: str) -> None:
    """Whoever they wait for themselves, and though the first rank serves the store."""
    ends = run_ranks(run_frozen, 3, frozen, switch, frozen=frozen)
    for rank, end in enumerate(ends):
        if rank != frozen:
            assert end.error is None, end.message
            assert re.search(rf"rank {frozen} on \S+ \(process \d+\) is frozen: .* for 1\.5 s", end.value.message)
            assert re.search(r"\d+ of \d+ bytes were through$", end.value.message)
            assert end.value.seconds < 3 * (LIMIT_S + 1)


def run_frozen(rank: int, frozen: int, switch: str) -> Outcome:
    good = prepared(rank, 3, switch)
    if rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    return outcome(good)


@each_way
@pytest.mark.parametrize("dead", [0, 2])
def test_a_dead_rank_is_named_on_every_other(dead: int, switch: str) -> None:
    ends = run_ranks(run_killed, 3, dead, switch)
    for rank, end in enumerate(ends):
        if rank != dead:
            assert end.error is None, end.message
            assert re.search(rf"rank {dead} on \S+ \(process \d+\) is gone: its process has ended", end.value.message)
            assert end.value.seconds < MARGIN_S


def run_killed(rank: int, dead: int, switch: str) -> Outcome:
    good = prepared(rank, 3, switch)
    return outcome(good | ({"record": dies_at("send", 0)} if rank == dead else {}))


@each_way
def test_a_rank_that_is_busy_elsewhere_is_alive(switch: str) -> None:
    """It is silent for longer than the limit, and no rank complains before the deadline."""
    first, second, _ = values(run_ranks(run_late, 3, switch))
    for late in (first, second):
        assert late[0].error is None
        assert "timed out after 1 s without progress: rank 2 on" in late[1].message
        assert "is alive, but slow or busy with something else; 0 of 28 bytes were through" in late[1].message


def run_late(rank: int, switch: str) -> list[Outcome]:
    good = prepared(rank, 3, switch)
    if rank == 2:
        time.sleep(2 * LIMIT_S)
    ends = [outcome(good)]
    if rank == 2:
        time.sleep(2.0)
    return [*ends, outcome(good | {"timeout_s": 1.0})]


SHORT_S = 1.0  # the deadline of a group whose callers give none


def impatient(rank: int, world_size: int, switch: str) -> dict[str, Any]:
    """Without a deadline of the caller's, and that of the group made short."""
    torch_distributed._LONGEST_DEADLINE_S = SHORT_S
    os.environ[SILENCE], os.environ[SWITCH] = str(LIMIT_S), switch
    return arguments(rank, world_size) | {"timeout_s": None}


@each_way
@pytest.mark.parametrize("is_first", [True, False], ids=["first call", "later call"])
def test_a_rank_that_is_busy_before_its_call_is_waited_for(is_first: bool, switch: str) -> None:
    """It loads data, or compiles, for several times the deadline; the third rank waits for ranks that wait for it."""
    for rank, (end, notes) in enumerate(values(run_ranks(run_busy, 3, switch, is_first, 3.5 * SHORT_S))):
        assert end.error is None, end.message
        if rank != 1:
            named = (
                "" if is_first else r": rank 1 on \S+ \(process \d+\) is alive, but slow or busy with something else"
            )
            assert re.search(rf"rank {rank} has waited 1 s for .* to agree on the call{named}; timeout_s= would", notes)


@each_way
def test_the_timeout_of_the_group_ends_a_wait_for_a_rank_that_stays_away(switch: str) -> None:
    ends = run_ranks(run_busy, 3, switch, False, 8.0, group_timeout_s=4.0)
    for rank in (0, 2):
        end, _ = ends[rank].value
        assert end.error == "TransportError"
        assert re.search(r"timed out after 4 s without progress: rank 1 on \S+ \(process \d+\) is alive", end.message)


def run_busy(rank: int, switch: str, is_first: bool, busy_s: float) -> tuple[Outcome, str]:
    good = impatient(rank, 3, switch)
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringspan").addHandler(handler)
    if not is_first:
        attend(good)
    if rank == 1:
        time.sleep(busy_s)
    return outcome(good), "\n".join(notes)


@each_way
def test_ranks_that_wait_for_each_other_end_at_the_deadline(switch: str) -> None:
    """All are inside a call, so none is busy, though the timeout of the group is far."""
    for message in values(run_ranks(run_deadlocked, 3, switch)):
        assert "timed out after 1 s without progress: rank" in message
        assert message.endswith("0 of 16 bytes were through")


def run_deadlocked(rank: int, switch: str) -> str:
    attend(impatient(rank, 3, switch))
    transport = session_of(None).transport
    posted = transport.exchange([], [Receive((rank + 1) % 3, torch.empty(4))])
    with pytest.raises(rs.TransportError) as raised:
        posted.receives[0].wait(None)
    return str(raised.value)


def test_a_long_message_arrives_in_parts() -> None:
    values(run_ranks(run_long, 2))


def run_long(rank: int) -> None:
    prepared(rank, 2, "0")
    transport = session_of(None).transport
    sent = torch.arange(3 * 2**20 + 5, dtype=torch.int32) + rank
    got = torch.zeros_like(sent)
    posted = transport.exchange([Send(1 - rank, sent)], [Receive(1 - rank, got)])
    for handle in (*posted.receives, *posted.sends):
        handle.wait(60.0)
    assert torch.equal(got, torch.arange(3 * 2**20 + 5, dtype=torch.int32) + 1 - rank)


@each_way
def test_what_an_aborting_rank_says_reaches_ranks_that_wait_for_others(switch: str) -> None:
    """The first rank waits for the third, which waits for the second, which fails."""
    ends = values(run_ranks(run_chain, 3, switch))
    assert ends[0] == ends[2]
    assert "out of luck" in ends[0]


def run_chain(rank: int, switch: str) -> str:
    prepared(rank, 3, switch)
    transport = session_of(None).transport
    if rank == 1:
        time.sleep(0.5)
        transport.abort("out of luck")
        return ""
    posted = transport.exchange([], [Receive(2 - rank // 2, torch.empty(4))])
    try:
        posted.receives[0].wait(FAR_S)
    except rs.TransportError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_a_limit_that_is_not_a_positive_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SILENCE, text)
    with pytest.raises(rs.UnsupportedError, match=f"{SILENCE}='{text}': it is a number of seconds; set 5"):
        silence_limit_s()


class CountingSocket(socket.socket):
    """Counts what is sent, as the system does for a connection over the network."""

    num_sent = 0

    def send(self, packet: bytes, *_: Any) -> int:  # type: ignore[override]
        self.num_sent += len(packet)
        return super().send(packet)


@pytest.mark.parametrize(
    ("cut_after_s", "found"),
    [(0.0, "is cut off"), (0.6 * LIMIT_S, "is cut off"), (FAR_S, "is frozen")],
    ids=["cut with the last beat", "cut long after it", "not cut"],
)
def test_only_a_machine_that_answers_now_is_not_cut_off(
    cut_after_s: float, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may acknowledge beats for long after the last one of its rank got through, and then be cut off."""
    here, there = socket.socketpair()
    link = CountingSocket(fileno=here.detach())
    link.setblocking(False)
    began = time.monotonic()
    num_acknowledged = 0

    def unacknowledged(_: socket.socket) -> int:
        nonlocal num_acknowledged
        if time.monotonic() - began < cut_after_s:
            num_acknowledged = link.num_sent
        return link.num_sent - num_acknowledged

    monkeypatch.setattr(_heartbeat, "_unacknowledged", unacknowledged)
    watch = _heartbeat.Heartbeat(0, "here", [HeartbeatLink(1, "there", 77, link)], LIMIT_S)
    verdict = None
    while verdict is None and time.monotonic() - began < 20 * LIMIT_S:
        unacknowledged(link)
        verdict = watch.verdict(1)
        time.sleep(0.01)
    watch.close()
    there.close()
    assert verdict is not None
    assert re.match(rf"rank 1 on there \(process 77\) {found}: ", verdict)


def test_a_rank_whose_own_machine_stalled_judges_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes in which nobody does anything: of that, little counts as silence."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    clock = _heartbeat._AwakeClock()
    monkeypatch.setattr(time, "monotonic", lambda: 101.0)
    assert clock.poll() == 1.0
    monkeypatch.setattr(time, "monotonic", lambda: 161.0)
    assert clock.now() == clock.poll() == 2.5
    assert clock.now() == 2.5

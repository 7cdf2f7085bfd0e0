"""Ranks that fall silent, die or are slow while others wait, between processes of this host, linked or by network."""

import errno
import logging
import math
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

LIMIT_S = 2.5  # a rank of a busy machine may well be silent for a second or two
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
            assert re.search(rf"rank {frozen} on \S+ \(process \d+\) is frozen: .* for 2\.5 s", end.value.message)
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
        time.sleep(5.0)
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


class Network:
    """Heartbeats of rank 0 to some peers, whose machines acknowledge what is sent to them until they are cut off."""

    def __init__(
        self, peers: list[int], monkeypatch: pytest.MonkeyPatch, kind: type[socket.socket] = socket.socket
    ) -> None:
        self.ends: dict[int, socket.socket] = {}
        self.num_acknowledged = dict.fromkeys(peers, 0)
        self.cut_at = dict.fromkeys(peers, math.inf)
        links = []
        for peer in peers:
            here, self.ends[peer] = socket.socketpair()
            for end in (here, self.ends[peer]):
                end.setblocking(False)
            links.append(HeartbeatLink(peer, "there", 70 + peer, kind(fileno=here.detach())))
        self.links = [link.socket for link in links]
        ranks = dict(zip(self.links, peers, strict=True))
        monkeypatch.setattr(_heartbeat, "_unacknowledged", lambda link: self._unacknowledged(ranks[link]))
        self.watch = _heartbeat.Heartbeat(0, "here", links, LIMIT_S)

    def _unacknowledged(self, peer: int) -> int:
        num_sent = self.watch._peers[peer].num_sent
        if self.watch._clock.now() < self.cut_at[peer]:
            self.num_acknowledged[peer] = num_sent
        return num_sent - self.num_acknowledged[peer]

    def verdict(self, awaited: int, alive: tuple[int, ...] = ()) -> str:
        """Let some ranks send heartbeats until there is a verdict."""
        while (found := self.watch.verdict(awaited)) is None:
            assert self.watch._clock.now() < 20 * LIMIT_S
            for peer in self.ends:
                self._unacknowledged(peer)
                if peer in alive:
                    self.ends[peer].send(_heartbeat._BEAT + _heartbeat._WAIT.pack(_heartbeat._NOTHING, -1))
            time.sleep(0.01)
        self.close()
        return found

    def close(self) -> None:
        self.watch.close()
        while any(link.fileno() >= 0 for link in self.links):
            time.sleep(0.01)
        for end in self.ends.values():
            end.close()


@pytest.mark.parametrize(
    ("cut_at", "found"),
    [(0.0, "is cut off"), (0.6 * LIMIT_S, "is cut off"), (math.inf, "is frozen")],
    ids=["cut with the last beat", "cut long after it", "not cut"],
)
def test_only_a_machine_that_answers_now_is_not_cut_off(
    cut_at: float, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may acknowledge beats for long after the last one of its rank got through, and then be cut off."""
    network = Network([1], monkeypatch)
    network.cut_at[1] = cut_at
    assert re.match(rf"rank 1 on there \(process 71\) {found}: ", network.verdict(1))


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_to_which_one_machine_answers_is_not_cut_off_itself(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process says anything, as on a busy machine; but if a machine acknowledges packets, there is a way to it."""
    network = Network([1, 2], monkeypatch)
    network.cut_at = {1: 0.0, 2: 0.95 * LIMIT_S if answers else 0.0}
    monkeypatch.setattr(_heartbeat, "_ANSWERED", math.inf)  # a silent rank that answers would be called frozen
    expected = (
        r"rank 1 on there \(process 71\) is cut off: its machine"
        if answers
        else r"rank 0 on here is cut off: ranks 1, 2 have not"
    )
    assert re.match(expected, network.verdict(1))


def test_a_machine_that_is_cut_off_is_named_while_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network([1, 2], monkeypatch)
    network.cut_at[1] = 0.0
    assert re.match(r"rank 1 on there \(process 71\) is cut off: its machine", network.verdict(1, alive=(2,)))


def test_a_connection_that_times_out_is_no_process_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network([1], monkeypatch, UnreachableSocket)
    network.ends[1].send(_heartbeat._FAREWELL)  # wakes the reader
    assert network.verdict(1) == "rank 1 on there (process 71) is cut off: its machine has not answered"


class UnreachableSocket(socket.socket):
    """What a socket raises when the system has given up on the other machine."""

    def recv(self, *_: Any) -> bytes:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")


def test_a_rank_whose_own_machine_stalled_judges_no_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes in which nobody does anything: of that, little counts as silence."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    clock = _heartbeat._AwakeClock(1.5)
    monkeypatch.setattr(time, "monotonic", lambda: 101.0)
    assert clock.poll() == 1.0
    monkeypatch.setattr(time, "monotonic", lambda: 161.0)
    assert clock.now() == clock.poll() == 2.5
    assert clock.now() == 2.5

"""Ranks of one host: the links between them, who is linked, and what happens when some ranks are and others are not."""

import ctypes
import errno
import math
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_faults import (
    assert_clear,
    reason_of,
    run_boom,
    run_frozen,
    run_frozen_and_boom,
    run_killed_at_first_send,
    run_without_contract,
    survivors,
)
from test_gloo import CAUSAL, HEADS, check, run_overwrite, run_table

import ringspan as rs
from ringspan.runtime.session import session_of
from ringspan.transports import _neighbours as neighbours
from ringspan.transports._neighbours import SWITCH, find_peers
from ringspan.transports._same_host import Peer, PeerMemory, SameHost
from ringspan.transports.base import Receive, Send
from ringspan.transports.in_process import run_in_process
from support.attention_cases import make_job
from support.calls import MARGIN_S, Arguments, arguments, attend
from support.ranks import run_ranks, values

pytestmark = [
    pytest.mark.xdist_group("processes"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of other processes as Linux does it"),
]

SHORT, LONG = 1000, 20_000  # what travels in the socket, and what is read from memory
AMPLE, SOON = timedelta(seconds=30), timedelta(seconds=0.1)
TAG, OTHER_TAG = 1, 2


# One link, both ends of it in this process


Ends = tuple[SameHost, SameHost]


@pytest.fixture
def ends() -> Ends:
    """Those of ranks 0 and 1."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    memory = PeerMemory(os.getpid())
    return SameHost([Peer(1, mine, memory)]), SameHost([Peer(0, theirs, memory)])


def number(n: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), n, dtype=torch.uint8)


@pytest.mark.parametrize("nbytes", [0, 1, 16 * 2**10, 16 * 2**10 + 1, 3 * 2**20 + 5])
@pytest.mark.parametrize("is_asked_first", [True, False])
def test_every_byte_arrives(ends: Ends, nbytes: int, is_asked_first: bool) -> None:
    first, second = ends
    contents, buffer = torch.randint(256, (nbytes,), dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    if is_asked_first:
        receiving, sending = second.recv([buffer], 0, TAG), first.send([contents], 1, TAG)
    else:
        sending, receiving = first.send([contents], 1, TAG), second.recv([buffer], 0, TAG)
    receiving.wait(AMPLE)
    sending.wait(AMPLE)
    assert torch.equal(buffer, contents)


def test_a_send_completes_only_when_its_own_message_was_taken(ends: Ends) -> None:
    """A later message of another tag does not complete it: its sender may not write to it yet."""
    first, second = ends
    early, late = (torch.full((LONG,), number, dtype=torch.uint8) for number in (1, 2))
    sent = {tag: first.send([x], 1, tag) for tag, x in ((TAG, early), (OTHER_TAG, late))}
    buffer = torch.zeros(LONG, dtype=torch.uint8)
    second.recv([buffer], 0, OTHER_TAG).wait(AMPLE)
    sent[OTHER_TAG].wait(AMPLE)
    assert torch.equal(buffer, late)
    assert not sent[TAG].is_through
    second.recv([buffer], 0, TAG).wait(AMPLE)
    sent[TAG].wait(AMPLE)
    assert torch.equal(buffer, early)


def test_messages_of_a_tag_arrive_in_order_whatever_is_waited_for_first(ends: Ends) -> None:
    first, second = ends
    sizes = [SHORT, LONG, LONG, SHORT, LONG]
    for n, nbytes in enumerate(sizes):
        first.send([number(n, nbytes)], 1, TAG)
        first.send([number(100 + n, nbytes)], 1, OTHER_TAG)
    buffers = {tag: [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in sizes] for tag in (OTHER_TAG, TAG)}
    messages = [second.recv([buffer], 0, tag) for tag, of_tag in buffers.items() for buffer in of_tag]
    for message in reversed(messages):
        message.wait(AMPLE)
    assert [int(buffer[-1]) for buffer in buffers[TAG]] == list(range(5))
    assert [int(buffer[0]) for buffer in buffers[OTHER_TAG]] == list(range(100, 105))


def test_a_long_message_is_sent_when_it_was_read(ends: Ends) -> None:
    first, second = ends
    sending = first.send([number(7, LONG)], 1, TAG)
    with pytest.raises(rs.TransportError, match=r"timed out after 0\.1 s"):
        sending.wait(SOON)
    second.recv([number(0, LONG)], 0, TAG)
    second.advance()
    sending.wait(AMPLE)


@pytest.mark.parametrize("deadline", [timedelta(days=30), timedelta.max])
def test_a_deadline_beyond_what_the_system_counts(ends: Ends, deadline: timedelta) -> None:
    """A wait is a number of milliseconds in 32 bits."""
    first, second = ends
    receiving = second.recv([buffer := number(0, SHORT)], 0, TAG)
    threading.Timer(0.1, lambda: first.send([number(7, SHORT)], 1, TAG)).start()
    receiving.wait(deadline)
    assert (buffer == 7).all()


@pytest.mark.parametrize("nbytes", [16 * 2**10, LONG])
def test_more_messages_than_a_socket_holds(ends: Ends, nbytes: int) -> None:
    """Both ends write until nothing more goes in, and only then begin to read."""
    count = 400
    tensors = [number(n % 251, nbytes) for n in range(251)]
    sends = [
        [end.send([tensors[n % 251]], peer, TAG) for n in range(count)] for peer, end in zip((1, 0), ends, strict=True)
    ]
    buffers = [[torch.zeros(nbytes, dtype=torch.uint8) for _ in range(count)] for _ in ends]

    def receive(rank: int) -> None:
        messages = [ends[rank].recv([buffer], 1 - rank, TAG) for buffer in buffers[rank]]
        for message in (*messages, *sends[rank]):
            message.wait(AMPLE)

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for of_rank in buffers:
        assert [(int(buffer[0]), int(buffer[-1])) for buffer in of_rank] == [(n % 251,) * 2 for n in range(count)]


def test_what_was_sent_before_the_peer_left_still_arrives() -> None:
    """Though the system first reports that the peer has not read everything, as it left."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    first, second = (SameHost([Peer(rank, end, PeerMemory(os.getpid()))]) for rank, end in ((1, mine), (0, theirs)))
    second.send([number(1, SHORT)], 0, TAG).wait(AMPLE)
    for n in range(3):
        first.send([number(n, SHORT)], 1, TAG)
    mine.close()
    buffers = [torch.zeros(SHORT, dtype=torch.uint8) for _ in range(4)]
    *messages, last = [second.recv([buffer], 0, TAG) for buffer in buffers]
    for message in messages:
        message.wait(AMPLE)
    assert [int(buffer[0]) for buffer in buffers[:3]] == [0, 1, 2]
    with pytest.raises(rs.TransportError, match="closed"):
        last.wait(AMPLE)


def test_what_a_sender_that_gave_up_has_offered_is_not_used(ends: Ends) -> None:
    """Its memory is somebody else's by now."""
    first, second = ends
    contents = number(7, LONG)
    first.send([contents], 1, TAG)
    first.close()
    contents.fill_(8)
    with pytest.raises(rs.TransportError, match="closed"):
        second.recv([number(0, LONG)], 0, TAG).wait(AMPLE)


def test_a_close_ends_a_wait_in_another_thread(ends: Ends) -> None:
    _, second = ends
    receiving = second.recv([number(0, SHORT)], 0, TAG)
    threading.Timer(0.1, second.close).start()
    with pytest.raises(rs.TransportError, match="closed"):
        receiving.wait(AMPLE)


@pytest.mark.parametrize("sent", [SHORT, LONG])
@pytest.mark.parametrize("expected", [SHORT + 1, LONG - 1])
def test_a_message_of_another_size_is_refused(ends: Ends, sent: int, expected: int) -> None:
    first, second = ends
    first.send([number(1, sent)], 1, TAG)
    buffer = number(0, expected)
    with pytest.raises(rs.TransportError, match=f"{sent} bytes from rank 0, where {expected} are expected"):
        second.recv([buffer], 0, TAG).wait(AMPLE)
    assert not buffer.any()


def test_memory_that_is_gone() -> None:
    pages = mmap.mmap(-1, LONG)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    into = number(0, LONG)
    PeerMemory(os.getpid()).read(address, into.data_ptr(), LONG)
    with subprocess.Popen(["true"]) as process:
        pass
    for memory, place in ((PeerMemory(os.getpid()), 4096), (PeerMemory(process.pid), address)):
        with pytest.raises(OSError, match=r"Bad address|No such process"):
            memory.read(place, into.data_ptr(), LONG)


# Who is linked


def met(world_size: int) -> list[set[int]]:
    """Whom each rank is linked to, among ranks that are threads."""

    def meet(group: Any) -> set[int]:
        peers = find_peers(group.rank, lambda payload: group.all_gather_bytes(payload, 10.0))
        for peer in peers:
            peer.socket.close()
        return {peer.rank for peer in peers}

    return run_in_process(meet, world_size)


def by_rank(values: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Each of the threads that ask is given one of the answers, and then always that one."""
    given: dict[int, Callable[[], Any]] = {}
    lock = threading.Lock()

    def answer() -> Any:
        with lock:
            mine = given.setdefault(threading.get_ident(), values[len(given) % len(values)])
        return mine()

    return answer


def test_ranks_of_one_host_are_linked() -> None:
    assert met(5) == [{0, 1, 2, 3, 4} - {rank} for rank in range(5)]


def test_ranks_of_two_hosts_are_linked_within_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_host_id", by_rank([lambda: b"a" * 16, lambda: b"b" * 16, lambda: b"a" * 16]))
    linked = met(3)
    assert sorted(map(len, linked)) == [0, 1, 1]
    assert all(rank in linked[peer] for rank, peers in enumerate(linked) for peer in peers)


def test_a_rank_that_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_is_possible", by_rank([lambda: False, lambda: True, lambda: True]))
    linked = met(3)
    assert sorted(map(len, linked)) == [0, 1, 1]


def refuse() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_rank_that_does_not_know_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in the exchange of addresses and gets no link."""
    monkeypatch.setattr(neighbours, "_host_id", by_rank([refuse, lambda: b"a" * 16, lambda: b"a" * 16]))
    assert sorted(map(len, met(3))) == [0, 1, 1]


@pytest.mark.parametrize("call", ["bind", "listen", "getsockopt"])
def test_a_rank_that_cannot_have_a_socket(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = by_rank([refuse, lambda: None, lambda: None])
    real = getattr(socket.socket, call)

    def checked(*args: Any) -> Any:
        checks()
        return real(*args)

    monkeypatch.setattr(socket.socket, call, checked)
    assert sorted(map(len, met(3))) == [0, 1, 1]


def test_memory_that_must_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is refused, and both ends know that there is no link."""

    checks = by_rank([refuse, lambda: None, lambda: None])
    read = PeerMemory.read
    monkeypatch.setattr(PeerMemory, "read", lambda *args: (checks(), read(*args)))
    assert sorted(map(len, met(3))) == [0, 1, 1]


def test_a_memory_that_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process number may mean another process elsewhere; reading succeeds, and what is read is not the word."""
    monkeypatch.setattr(PeerMemory, "read", lambda *_: None)
    assert met(2) == [set(), set()]


STRANGER = """
import os, socket, sys
os.setuid(65534)
links = []
for name in sys.argv[1:]:
    links.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    links[-1].connect(b"\\0" + name.encode())
print("connected", flush=True)
heard = b""
for link in links:
    link.settimeout(20)
    try:
        heard += link.recv(1000)
    except ConnectionResetError:
        pass
print(len(heard))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_at_the_socket_cannot_join_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger stands first in every queue; the ranks still find each other."""
    strangers = []
    take_place = neighbours._take_place
    monkeypatch.setattr(neighbours, "_PATIENCE_S", 300.0)

    def take_place_with_a_stranger() -> Any:
        place = take_place()
        assert place is not None
        name = neighbours._address(place.name)[1:].decode()
        stranger = subprocess.Popen(
            [sys.executable, "-c", STRANGER, *[name] * 3], stdout=subprocess.PIPE, text=True, cwd="/"
        )
        strangers.append(stranger)
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "connected\n"
        return place

    monkeypatch.setattr(neighbours, "_take_place", take_place_with_a_stranger)
    try:
        assert met(3) == [{1, 2}, {0, 2}, {0, 1}]
        assert [stranger.communicate(timeout=30)[0] for stranger in strangers] == ["0\n"] * 3
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_socket_that_another_user_listens_at_is_not_greeted() -> None:
    code = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(b"\\0" + sys.argv[1].encode())
listener.listen()
print("listens", flush=True)
link = listener.accept()[0]
print(len(link.recv(1000)))
"""
    name = b"x" * 16
    address = neighbours._address(name)[1:].decode()
    with (
        subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE, text=True, cwd="/") as stranger,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listens\n"
        listener.bind("")
        listener.listen()
        assert neighbours._meet(1, {0: name}, listener, b"the word") == {}
        assert stranger.communicate(timeout=30)[0] == "0\n"


# Groups in which all, some or none of the ranks are linked


OFF = {"none": (0, 1, 2), "two": (2,)}
"""The ranks without a link, by the number of linked ranks out of three."""
each_mixture = pytest.mark.parametrize("off", OFF.values(), ids=OFF)


def run_apart(rank: int, off: Sequence[int], fn: Callable[..., Any], *args: Any) -> Any:
    if rank in off:
        os.environ[SWITCH] = "0"
    return fn(rank, *args)


def siblings_are_readable() -> bool:
    """Yama, the kernel's guard, may keep a user's processes from reading each other; ranks then use the network."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    return os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"


@pytest.mark.skipif(not siblings_are_readable(), reason="kernel.yama.ptrace_scope is not 0, so siblings cannot be read")
def test_messages_between_ranks_of_one_host_do_not_use_the_network() -> None:
    values(run_ranks(run_without_network, 3))


def run_without_network(rank: int) -> None:
    """gloo carries what ranks agree upon first, and nothing else."""
    good = arguments(rank, 3)
    expected = attend(good)
    transport = session_of(None).transport
    sent = []

    class Network:
        def __getattr__(self, name: str) -> Any:
            sent.append(name)
            raise AssertionError(name)

    transport._group = Network  # type: ignore[attr-defined]
    assert torch.equal(attend(good), expected)
    posted = transport.exchange(
        [Send((rank + 1) % 3, number(rank, LONG))], [Receive((rank - 1) % 3, buffer := number(9, LONG))]
    )
    for handle in (*posted.receives, *posted.sends):
        handle.wait(10.0)
    assert (buffer == (rank - 1) % 3).all()
    assert sent == []


@each_mixture
def test_a_part_of_the_table_on_mixed_groups(off: Sequence[int]) -> None:
    counts = values(run_ranks(run_apart, 3, off, run_table, 3))
    assert len(set(counts)) == 1
    assert counts[0] >= 150


@pytest.mark.parametrize("off", [(), (0, 1)], ids=["linked", "apart"])
@pytest.mark.parametrize("of", ["call", "group"])
def test_extremely_long_deadlines(off: Sequence[int], of: str) -> None:
    group_timeout_s = 30 * 86400.0 if of == "group" else 30.0
    values(run_ranks(run_apart, 2, off, run_patient, of == "call", group_timeout_s=group_timeout_s))


def run_patient(rank: int, is_endless: bool) -> None:
    options = {"timeout_s": math.inf} if is_endless else {}
    for _ in range(2):
        check(make_job("patient", CAUSAL, rs.zigzag(37, 2), HEADS), rank, **options)


def test_inputs_are_the_callers_again_on_a_mixed_group() -> None:
    values(run_ranks(run_apart, 3, (2,), run_overwrite, "pass_kv", 3))


@each_mixture
@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_killed_rank_of_a_mixed_group(off: Sequence[int], dead: int) -> None:
    ends = run_ranks(run_apart, 3, off, run_killed_at_first_send, 3, dead)
    outcomes = survivors(ends, dead)
    for rank, (first, second) in outcomes.items():
        assert_clear(first, rank, 0.0)
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second
    if dead:
        assert len({reason_of(end) for ends in outcomes.values() for end in ends}) == 1


@each_mixture
@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_of_a_mixed_group_that_raises(off: Sequence[int], failing: int) -> None:
    ends = run_ranks(run_apart, 3, off, run_boom, 3, failing)
    for rank, (first, second) in survivors(ends, 3).items():
        assert first.error == ("Boom" if rank == failing else "TransportError")
        assert "out of luck" in first.message
        assert (second.error, second.seconds < MARGIN_S) == ("TransportError", True), second


@each_mixture
def test_a_frozen_rank_of_a_mixed_group(off: Sequence[int]) -> None:
    ends = run_ranks(run_apart, 3, off, run_frozen, 3, 1, frozen=1, timeout_s=20.0)
    for rank, (first,) in survivors(ends, 1).items():
        assert_clear(first, rank, 0.6)


@each_mixture
def test_a_frozen_rank_while_another_fails_in_a_mixed_group(off: Sequence[int]) -> None:
    ends = run_ranks(run_apart, 3, off, run_frozen_and_boom, 3, 1, frozen=1)
    first, last = survivors(ends, 1)[0][0], survivors(ends, 1)[2][0]
    assert first.error == "Boom"
    assert (last.error, reason_of(last)) == ("TransportError", "rank 0 failed: Boom: out of luck")
    assert last.seconds < MARGIN_S


@each_mixture
def test_a_rank_of_a_mixed_group_that_makes_no_contract(off: Sequence[int]) -> None:
    ends = run_ranks(run_apart, 3, off, run_without_contract, 3, 1)
    for rank, (first, _) in survivors(ends, 3).items():
        assert_clear(first, rank, 0.6)


def test_ranks_without_a_contract_that_mean_other_sizes() -> None:
    """Where nothing was agreed upon, a wrong size is an error and not the end of the process."""
    for end in values(run_ranks(run_other_sizes, 2)):
        assert end is not None
        assert "are expected; sizes must be the same on both" in end


def run_other_sizes(rank: int) -> str | None:
    good = arguments(rank, 2)
    attend(good)
    layout = rs.zigzag(64 if rank else 48, 2)
    x = torch.zeros(1, 12, layout.shard_len(rank), 8)
    wrong: Arguments = good | {"q": x, "k": x, "v": x, "layout": layout, "contract": False}
    try:
        attend(wrong)
    except rs.TransportError as error:
        return str(error)
    return None

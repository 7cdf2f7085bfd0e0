"""Ranks as threads: messages, their order, and no hang for any failure of one rank."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ringspan.errors import ShapeError, TransportError
from ringspan.transports import in_process
from ringspan.transports.base import CountingTransport, Receive, Send
from ringspan.transports.in_process import run_in_process

LONG_S = 30.0  # a deadline that no wait may reach
WORLD_SIZES = (1, 2, 3, 5, 8)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    start = time.monotonic()
    yield
    assert not set(threading.enumerate()) - before
    assert time.monotonic() - start < LONG_S / 2


def wait_all(posted, timeout_s=LONG_S):
    for handle in (*posted.sends, *posted.receives):
        handle.wait(timeout_s)


def receive_from(group, src, numel=4, timeout_s=LONG_S):
    buffer = torch.zeros(numel)
    group.exchange([], [Receive(src, buffer)]).receives[0].wait(timeout_s)
    return buffer


def send_to(group, dst, numel=4, timeout_s=LONG_S):
    group.exchange([Send(dst, torch.ones(numel))], []).sends[0].wait(timeout_s)


def reason_of(act):
    try:
        act()
    except TransportError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool])
def test_uneven_messages_between_all_pairs(world_size, dtype):
    def message(src, dst):
        generator = torch.Generator().manual_seed(10 * src + dst)
        return torch.randint(0, 100, (5 * src + 3 * dst,), generator=generator).to(dtype)

    def program(group):
        ranks = range(group.world_size)
        buffers = [torch.zeros_like(message(src, group.rank)) for src in ranks]
        sends = [Send(dst, message(group.rank, dst)) for dst in ranks]
        wait_all(group.exchange(sends, [Receive(src, buffers[src]) for src in ranks]))
        return [torch.equal(buffers[src], message(src, group.rank)) for src in ranks]

    assert run_in_process(program, world_size) == [[True] * world_size] * world_size


def test_messages_of_a_pair_arrive_in_order_whatever_the_order_of_waits():
    """Eight ranks; each chooses its own order of peers, exchanges and waits. Only the order per pair is fixed."""
    ranks, num_messages = range(8), 12

    def program(group):
        shuffle = random.Random(group.rank).shuffle
        jobs = [(side, peer) for side in ("send", "receive") for peer in ranks for _ in range(num_messages)]
        shuffle(jobs)
        numbers = dict.fromkeys(jobs, 0)
        handles, received = [], []
        for side, peer in jobs:
            number = numbers[side, peer]
            numbers[side, peer] += 1
            if side == "send":
                tensor = torch.full((number + 1,), 100.0 * group.rank + number)
                handles += group.exchange([Send(peer, tensor)], []).sends
            else:
                buffer = torch.zeros(number + 1)
                received.append((100.0 * peer + number, buffer))
                handles += group.exchange([], [Receive(peer, buffer)]).receives
        shuffle(handles)
        for handle in handles:
            handle.wait(LONG_S)
        return all((buffer == expected).all().item() for expected, buffer in received) and len(received)

    assert run_in_process(program, len(ranks)) == [len(ranks) * num_messages] * len(ranks)


def test_a_send_is_done_once_both_sides_have_posted():
    """Both ranks wait for their send before their receive, and rank 1 never waits for its receive."""

    def program(group):
        buffer = torch.zeros(4)
        posted = group.exchange([Send(1 - group.rank, torch.ones(4))], [Receive(1 - group.rank, buffer)])
        posted.sends[0].wait(LONG_S)
        if group.rank == 0:
            posted.receives[0].wait(LONG_S)
            posted.receives[0].wait(0.0)
        return buffer.sum().item()

    assert run_in_process(program, 2)[0] == 4.0


def test_no_copy_is_made_before_the_receive_is_posted():
    tensor = torch.zeros(4)

    def program(group):
        if group.rank == 0:
            send = group.exchange([Send(1, tensor)], []).sends[0]
            tensor.fill_(7.0)  # breaks the rules to show whose memory is read
            group.all_gather_bytes(b"", LONG_S)
            return send.wait(LONG_S)
        group.all_gather_bytes(b"", LONG_S)
        return receive_from(group, 0)

    torch.testing.assert_close(run_in_process(program, 2)[1], torch.full((4,), 7.0))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_gathered_bytes_come_in_rank_order(world_size):
    def program(group):
        return [group.all_gather_bytes(b"%d:%d" % (group.rank, number), LONG_S) for number in range(20)]

    expected = [[b"%d:%d" % (rank, number) for rank in range(world_size)] for number in range(20)]
    assert run_in_process(program, world_size) == [expected] * world_size


@pytest.mark.parametrize(("sent", "expected"), [(3, 4), (4, 3), (0, 1)])
@pytest.mark.parametrize("late", [0, 1])
def test_a_message_that_does_not_fit_is_an_error_on_both_ranks(sent, expected, late):
    def program(group):
        if group.rank == late:
            time.sleep(0.05)
        if group.rank == 0:
            return reason_of(lambda: send_to(group, 1, sent))
        return reason_of(lambda: receive_from(group, 0, expected))

    sizes = f"rank 0 sends {4 * sent} bytes to rank 1, which expects {4 * expected}"
    assert run_in_process(program, 2) == [f"{sizes}; sizes must be the same on both ranks"] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_copy_that_fails_is_an_error_on_both_ranks(late, monkeypatch):
    """The peer's end is matched with the end of the copying rank, so it waits for nothing else."""

    def fail(_):
        raise MemoryError("no room")

    def program(group):
        if group.rank == late:
            time.sleep(0.1)
        try:
            return send_to(group, 1, timeout_s=5.0) if group.rank == 0 else receive_from(group, 0, timeout_s=5.0)
        except (MemoryError, TransportError) as error:
            return str(error)

    monkeypatch.setattr(in_process, "_bytes_of", fail)
    side = ("send of 16 bytes to rank 1", "receive of 16 bytes from rank 0")[late]
    told = {late: "no room", 1 - late: f"rank {late}: the {side} failed with MemoryError: no room"}
    assert run_in_process(program, 2) == [told[0], told[1]]


def test_a_late_peer_is_named_with_the_bytes_on_all_ranks_and_the_group_stays_failed():
    def program(group):
        if group.rank == 0:
            first = reason_of(lambda: receive_from(group, 1, timeout_s=0.1))
        elif group.rank == 1:
            first = reason_of(lambda: receive_from(group, 2))
        else:
            first = reason_of(lambda: group.all_gather_bytes(b"", LONG_S))
        again = reason_of(lambda: group.all_gather_bytes(b"", LONG_S))
        return first, again, reason_of(lambda: group.exchange([], []))

    answers = run_in_process(program, 3)
    reason = "rank 0: the receive of 16 bytes from rank 1 timed out after 0.1 s: rank 1 did not post its end"
    assert answers == [(reason,) * 3] * 3


def test_a_late_receiver_is_named():
    def program(group):
        if group.rank == 0:
            return reason_of(lambda: send_to(group, 1, timeout_s=0.1))
        return reason_of(lambda: receive_from(group, 2))

    reason = "rank 0: the send of 16 bytes to rank 1 timed out after 0.1 s: rank 1 did not post its end"
    assert run_in_process(program, 3)[:2] == [reason] * 2


def test_a_gathering_that_lacks_ranks_names_them():
    def program(group):
        if group.rank == 1:
            return reason_of(lambda: group.all_gather_bytes(b"", 0.1))
        return reason_of(lambda: receive_from(group, 1))

    reason = "rank 1: the gathering of bytes timed out after 0.1 s: no word of ranks [0, 2]"
    assert run_in_process(program, 3) == [reason] * 3


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_exception_of_the_rank_that_fails_is_raised_and_the_others_end(world_size):
    """A ring in which the last rank fails on the way."""
    ends = {}

    def program(group):
        try:
            for step in range(2 * world_size):
                if step == 2 and group.rank == world_size - 1:
                    raise KeyError("lost")
                buffer = torch.zeros(1000)
                dst, src = (group.rank + 1) % world_size, (group.rank - 1) % world_size
                wait_all(group.exchange([Send(dst, torch.ones(1000))], [Receive(src, buffer)]))
        except TransportError as error:
            ends[group.rank] = str(error)
            raise

    with pytest.raises(KeyError, match="lost") as caught:
        run_in_process(program, world_size)
    assert caught.value.__notes__ == [f"on rank {world_size - 1} of {world_size} in run_in_process"]
    reason = f"rank {world_size - 1} failed with KeyError: 'lost'"
    assert ends == dict.fromkeys(range(world_size - 1), reason)


def test_an_abort_ends_all_waits_and_the_exception_of_its_rank_is_raised():
    ends = {}

    def program(group):
        if group.rank == 2:
            time.sleep(0.05)
            group.abort("the masks differ")
            time.sleep(0.2)  # the others raise before this rank does
            raise ShapeError("the mask of rank 2")
        wait = (lambda: receive_from(group, 2), lambda: group.all_gather_bytes(b"", LONG_S))[group.rank]
        ends[group.rank] = reason_of(wait)
        raise TransportError("after the abort")

    with pytest.raises(ShapeError, match="the mask of rank 2"):
        run_in_process(program, 3)
    assert ends == {0: "the masks differ", 1: "the masks differ"}


@pytest.mark.parametrize("returns_first", [True, False])
@pytest.mark.parametrize("what", ["receive", "send", "gathering"])
def test_waiting_for_a_rank_that_has_returned_is_an_error_at_once(what, returns_first):
    def program(group):
        if group.rank == 1:
            return time.sleep(0.0 if returns_first else 0.1)
        if returns_first:
            time.sleep(0.1)
        wait = {"receive": receive_from, "send": send_to}.get(what)
        return wait(group, 1) if wait else group.all_gather_bytes(b"", LONG_S)

    with pytest.raises(TransportError, match=rf"rank 0: the {what} of .* in vain: rank 1 has returned already"):
        run_in_process(program, 2)


def test_what_a_rank_posted_before_it_returned_still_arrives():
    def program(group):
        if group.rank == 0:
            group.exchange([Send(1, torch.ones(4))], [])
            return None
        time.sleep(0.1)
        return receive_from(group, 0)

    torch.testing.assert_close(run_in_process(program, 2)[1], torch.ones(4))


def test_the_time_of_a_run_ends_ranks_that_wait():
    with pytest.raises(TransportError, match=r"timeout_s=0.2\): ranks \[0, 1\] had not finished in time") as caught:
        run_in_process(lambda group: receive_from(group, 1 - group.rank), 2, timeout_s=0.2)
    assert "ranks [0, 1] had not finished" in str(caught.value.__cause__)


def test_the_error_of_one_rank_is_told_though_another_computes_on():
    released = threading.Event()

    def program(group):
        if group.rank == 1:
            raise KeyError("lost")
        released.wait(LONG_S)

    with pytest.raises(TransportError, match=r"ranks \[0\] had not finished in time") as caught:
        run_in_process(program, 2, timeout_s=0.2)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "ringspan rank 0"]
    released.set()
    left.join()
    assert repr(caught.value.__cause__) == "KeyError('lost')"
    assert caught.value.__cause__.__notes__ == ["on rank 1 of 2 in run_in_process"]


def test_a_rank_that_computes_on_does_not_keep_the_caller():
    released = threading.Event()
    start = time.monotonic()
    with pytest.raises(TransportError, match=r"ranks \[1\] had not finished in time"):
        run_in_process(lambda group: group.rank == 0 or released.wait(LONG_S), 2, timeout_s=0.1)
    assert time.monotonic() - start < LONG_S / 2
    (left,) = [thread for thread in threading.enumerate() if thread.name == "ringspan rank 1"]
    assert left.daemon
    released.set()
    left.join()


def test_runs_may_follow_and_contain_each_other():
    def inner(group):
        return group.all_gather_bytes(bytes([group.rank]), LONG_S)

    def outer(group):
        mine = run_in_process(inner, 2)
        return mine, group.all_gather_bytes(b"outer", LONG_S)

    expected = ([[b"\0", b"\1"]] * 2, [b"outer"] * 3)
    assert run_in_process(outer, 3) == [expected] * 3
    assert run_in_process(outer, 3) == [expected] * 3
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: run_in_process(outer, 3), range(2))) == [[expected] * 3] * 2


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_ranks_run_in_the_gradient_mode_of_the_caller(mode):
    def program(group):
        peer = 1 - group.rank
        buffer = torch.zeros(4)
        wait_all(group.exchange([Send(peer, torch.ones(4, requires_grad=True))], [Receive(peer, buffer)]))
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), buffer.sum().item()

    with mode():
        expected = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), 4.0)
        assert run_in_process(program, 2) == [expected] * 2


def test_ranks_run_in_the_autocast_of_the_caller():
    def program(_):
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert run_in_process(program, 2) == [torch.bfloat16] * 2
        with torch.autocast("cpu", enabled=False):
            assert run_in_process(program, 2) == [torch.float32] * 2
    with torch.autocast("cpu", torch.float16, cache_enabled=False):
        assert run_in_process(lambda _: torch.is_autocast_cache_enabled(), 2) == [False] * 2
        assert run_in_process(program, 2) == [torch.float16] * 2
    assert run_in_process(program, 2) == [torch.float32] * 2


def test_ranks_make_tensors_on_the_default_device_of_the_caller():
    with torch.device("meta"):
        assert run_in_process(lambda _: torch.ones(1).device.type, 2) == ["meta"] * 2
    assert run_in_process(lambda _: torch.ones(1).device.type, 2) == ["cpu"] * 2


def test_a_rank_in_inference_mode_exchanges_messages_with_one_outside_it():
    def program(group):
        with torch.inference_mode(group.rank == 0):
            time.sleep(0.05 * group.rank)
            peer, buffer = 1 - group.rank, torch.zeros(4)
            wait_all(group.exchange([Send(peer, torch.ones(4))], [Receive(peer, buffer)]))
            return buffer.sum().item()

    assert run_in_process(program, 2) == [4.0, 4.0]


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_group_has_at_least_one_rank(world_size):
    with pytest.raises(ShapeError, match=rf"world_size={world_size}: a group has at least one rank"):
        run_in_process(lambda group: group.rank, world_size)


def test_counted_are_messages_and_bytes_sent_to_each_rank():
    def program(group):
        counting = CountingTransport(group)
        counting.all_gather_bytes(b"not counted", LONG_S)
        for numel in (2, 3):
            sends = [Send(dst, torch.ones(numel * dst)) for dst in range(group.world_size) if dst != group.rank]
            receives = [Receive(s.dst, torch.zeros(numel * group.rank)) for s in sends]
            wait_all(counting.exchange(sends, receives))
        return counting.messages_sent, counting.bytes_sent

    assert run_in_process(program, 3) == [([0, 2, 2], [0, 20, 40]), ([2, 0, 2], [0, 0, 40]), ([2, 2, 0], [0, 20, 0])]

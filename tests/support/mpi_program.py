"""What each rank does under mpirun for test_mpi_transport.py: run all checks, write what came of them to a file.

The first 2, 3 and 4 ranks form groups in turn, because starting processes is what takes time. Every check opens
transports of its own, so that a group that fails on purpose does not stand in the way of the next.
Usage: mpi_program.py DIRECTORY [die]
"""

import json
import os
import sys
import time
import weakref
from pathlib import Path

import torch
from mpi4py import MPI

from ringspan.errors import TransportError
from ringspan.transports.base import Receive, Send
from ringspan.transports.mpi import MpiTransport, is_mpi_comm, mpi_group

LONG_S = 20.0  # a deadline that no wait may reach
DTYPES = (torch.bfloat16, torch.float64, torch.bool)


def message(src, dst, number=0, dtype=torch.float32, numel=None):
    """Return what src sends to dst; both sides can compute it."""
    numel = 5 * src + 3 * dst if numel is None else numel
    generator = torch.Generator().manual_seed(1000 * number + 10 * src + dst)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def wait_all(posted, timeout_s=LONG_S):
    for handle in (*posted.sends, *posted.receives):
        handle.wait(timeout_s)


def failure(act):
    """Return the text of the expected TransportError, and whether it came long before the long deadline."""
    start = time.monotonic()
    try:
        act()
    except TransportError as error:
        return [str(error), time.monotonic() - start < LONG_S / 2]
    return ["no error", False]


def check_uneven_sizes_between_all_pairs(comm):
    """The size of a pair's message may be zero; each rank also sends to itself."""
    transport = MpiTransport(comm)
    ranks, me = range(transport.world_size), transport.rank
    right = []
    for dtype in DTYPES:
        buffers = [torch.zeros_like(message(src, me, dtype=dtype)) for src in ranks]
        sends = [Send(dst, message(me, dst, dtype=dtype)) for dst in ranks]
        wait_all(transport.exchange(sends, [Receive(src, buffers[src]) for src in ranks]))
        right += [torch.equal(buffers[src], message(src, me, dtype=dtype)) for src in ranks]
    transport.close()
    transport.close()
    return right


def check_order(comm):
    """Ten messages per pair in five exchanges, waited for from the last to the first."""
    transport = MpiTransport(comm)
    ranks, me = range(transport.world_size), transport.rank
    posted, received = [], []
    for number in range(0, 10, 2):
        pair = (number, number + 1)
        buffers = [(src, i, torch.zeros(100)) for src in ranks for i in pair]
        sends = [Send(dst, message(me, dst, i, numel=100)) for dst in ranks for i in pair]
        posted.append(transport.exchange(sends, [Receive(src, buffer) for src, _, buffer in buffers]))
        received += buffers
    for step in reversed(posted):
        wait_all(step)
    transport.close()
    return [torch.equal(buffer, message(src, me, i, numel=100)) for src, i, buffer in received]


def check_long_messages_in_chunks(comm):
    """Chunks of 1,000 bytes: one and many, exact multiples, one byte more; and 4 MB, which MPI does not buffer."""
    transport = MpiTransport(comm, chunk_bytes=1000)
    me, world_size = transport.rank, transport.world_size
    dst, src = (me + 1) % world_size, (me - 1) % world_size
    sizes = (999, 1000, 1001, 5000, 10007, 1)
    buffers = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    sends = [Send(dst, message(me, dst, size, torch.uint8, size)) for size in sizes]
    wait_all(transport.exchange(sends, [Receive(src, buffer) for buffer in buffers]))
    right = [
        torch.equal(buffer, message(src, me, size, torch.uint8, size))
        for size, buffer in zip(sizes, buffers, strict=True)
    ]
    transport.close()
    whole = MpiTransport(comm)
    large = torch.zeros(1_000_003)
    wait_all(whole.exchange([Send(dst, message(me, dst, numel=large.numel()))], [Receive(src, large)]))
    whole.close()
    return [*right, torch.equal(large, message(src, me, numel=large.numel()))]


def check_gather(comm):
    transport = MpiTransport(comm)
    everyone = [transport.all_gather_bytes(b"%d:%d" % (transport.rank, i), LONG_S) for i in range(3)]
    empty = transport.all_gather_bytes(b"", LONG_S)
    transport.close()
    return [[payload.decode() for payload in payloads] for payloads in (*everyone, empty)]


def check_late_peer(comm):
    """Rank 0 expects a message that rank 1 never sends; the others wait for rank 0."""
    transport = MpiTransport(comm)
    buffer = torch.zeros(25)

    def act():
        src, timeout_s = (1, 0.1) if transport.rank == 0 else (0, LONG_S)
        transport.exchange([], [Receive(src, buffer)]).receives[0].wait(timeout_s)

    first = failure(act)
    then = failure(lambda: transport.exchange([], []))
    transport.close()
    return [first, then]


def check_late_gather(comm):
    transport = MpiTransport(comm)
    if transport.rank == 0:
        return failure(lambda: transport.all_gather_bytes(b"here", 0.1))
    return failure(lambda: transport.exchange([], [Receive(0, torch.zeros(1))]).receives[0].wait(LONG_S))


def check_abort(comm):
    """The last rank gives up for a reason longer than a notice; others wait for a message or in a gather."""
    transport = MpiTransport(comm)
    last = transport.world_size - 1
    if transport.rank == last:
        time.sleep(0.1)
        transport.abort("the mask on rank 0 is odd, öfter als sonst: " + "é" * 2000)
        transport.abort("this comes second and is not told")
        return failure(lambda: transport.exchange([], []))
    if transport.rank == 0:
        return failure(lambda: transport.exchange([], [Receive(last, torch.zeros(7))]).receives[0].wait(LONG_S))
    return failure(lambda: transport.all_gather_bytes(b"x", LONG_S))


def check_short_message(comm):
    """Rank 1 expects more than rank 0 sends; rank 0 learns of it in its next wait."""
    transport = MpiTransport(comm)
    me = transport.rank
    if me == 0:
        transport.exchange([Send(1, torch.zeros(3))], []).sends[0].wait(LONG_S)
    buffer = torch.zeros(4 if me == 1 else 1)
    return failure(lambda: transport.exchange([], [Receive(1 - min(me, 1), buffer)]).receives[0].wait(LONG_S))


def check_own_communicator(comm):
    """Messages of the caller on the same communicator stay the caller's, for every tag."""
    me, world_size = comm.rank, comm.size
    dst, src = (me + 1) % world_size, (me - 1) % world_size
    callers = comm.isend("the caller's", dst, tag=1)
    transport = MpiTransport(comm)
    buffer = torch.zeros(1)
    wait_all(transport.exchange([Send(dst, torch.full((1,), float(me)))], [Receive(src, buffer)]))
    transport.close()
    theirs = comm.recv(source=src, tag=1)
    callers.wait()
    return [buffer.item() == src, theirs == "the caller's"]


def check_groups_as_keys(comm):
    other = mpi_group(comm)
    comm = comm.Dup()
    group = mpi_group(comm)
    right = [is_mpi_comm(comm), not is_mpi_comm("comm"), mpi_group(comm) is group, other is not group, hash(group) != 0]
    alive = weakref.ref(group)
    del group
    comm.Free()
    return [*right, alive() is None]


def check_not_all_open(comm):
    return failure(lambda: MpiTransport(comm, timeout_s=0.1)) if comm.rank == 0 else None


def die():
    transport = MpiTransport()
    if transport.rank == 1:
        os._exit(7)
    transport.exchange([], [Receive(1, torch.zeros(1))]).receives[0].wait(600)


def run_checks():
    checks = {name: check for name, check in globals().items() if name.startswith("check_")}
    results = {}
    for world_size in range(2, MPI.COMM_WORLD.size + 1):
        comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < world_size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            results[world_size] = {name: check(comm) for name, check in checks.items()}
    return results


if __name__ == "__main__":
    if sys.argv[2:] == ["die"]:
        die()
    Path(sys.argv[1], f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(run_checks()))

"""The MPI transport on 2, 3 and 4 real ranks. One start of mpirun runs all checks of mpi_program.py."""

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringspan.errors import UnsupportedError
from ringspan.transports import mpi

HARD_TIMEOUT_S = 120
RANKS = 4

needs_mpi = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: apt-get install openmpi-bin libopenmpi-dev; pip install '.[mpi]'",
)
pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(HARD_TIMEOUT_S + 10)]
at_each_world_size = pytest.mark.parametrize("world_size", range(2, RANKS + 1))


def run_ranks(num_ranks, *arguments):
    program = Path(__file__).parents[1] / "support" / "mpi_program.py"
    # mpirun ends its ranks itself after the timeout; killed from outside, it could leave some behind.
    options = ["--timeout", HARD_TIMEOUT_S - 20, "--allow-run-as-root", "--oversubscribe", "-np", num_ranks]
    return subprocess.run(
        ["mpirun", *map(str, options), sys.executable, "-m", "mpi4py", str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=HARD_TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return the reports of each rank of a group of that size, in rank order."""
    directory = tmp_path_factory.mktemp("mpi")
    run = run_ranks(RANKS, directory)
    assert run.returncode == 0, run.stdout + run.stderr  # all ranks finish, also after groups that fail
    by_rank = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return lambda check, world_size: [by_rank[rank][str(world_size)][f"check_{check}"] for rank in range(world_size)]


@needs_mpi
@at_each_world_size
@pytest.mark.parametrize(
    ("check", "num_facts"),
    [
        ("uneven_sizes_between_all_pairs", lambda world_size: 3 * world_size),
        ("order", lambda world_size: 10 * world_size),
        ("long_messages_in_chunks", lambda _: 7),
        ("own_communicator", lambda _: 2),
        ("groups_as_keys", lambda _: 6),
    ],
)
def test_messages_arrive(told, check, num_facts, world_size):
    assert told(check, world_size) == [[True] * num_facts(world_size)] * world_size


@needs_mpi
@at_each_world_size
def test_all_ranks_gather_all_payloads_in_rank_order(told, world_size):
    rounds = [[f"{rank}:{number}" for rank in range(world_size)] for number in range(3)]
    assert told("gather", world_size) == [[*rounds, [""] * world_size]] * world_size


@needs_mpi
@at_each_world_size
def test_a_late_peer_is_named_on_all_ranks_at_once_and_the_group_stays_failed(told, world_size):
    reason = ["rank 0: the receive of 100 bytes from rank 1 timed out after 0.1 s", True]
    assert told("late_peer", world_size) == [[reason, reason]] * world_size


@needs_mpi
@at_each_world_size
def test_a_gathering_that_lacks_a_rank_ends_on_all_ranks(told, world_size):
    reason = f"rank 0: the gathering of 4 bytes from each of {world_size} ranks timed out after 0.1 s"
    assert told("late_gather", world_size) == [[reason, True]] * world_size


@needs_mpi
@at_each_world_size
def test_the_reason_of_an_abort_ends_the_waits_of_all_ranks(told, world_size):
    answers = told("abort", world_size)
    reason = answers[0][0]
    assert reason.startswith("the mask on rank 0 is odd, öfter als sonst: éé")
    assert 1990 < len(reason.encode()) <= 2000
    assert answers == [[reason, True]] * world_size


@needs_mpi
@at_each_world_size
def test_a_message_shorter_than_its_buffer_is_an_error_on_all_ranks(told, world_size):
    size = "the receive of 16 bytes from rank 0 found only 12 bytes"
    reason = f"rank 1: {size}; sizes must be the same on both ranks"
    assert told("short_message", world_size) == [[reason, True]] * world_size


@needs_mpi
@at_each_world_size
def test_opening_waits_for_all_ranks_but_not_for_ever(told, world_size):
    reason = f"rank 0: not all {world_size} ranks opened the communicator within 0.1 s"
    assert told("not_all_open", world_size) == [[reason, True], *[None] * (world_size - 1)]


@needs_mpi
def test_a_rank_that_dies_ends_the_job(tmp_path):
    start = time.monotonic()
    run = run_ranks(2, tmp_path, "die")
    assert run.returncode == 7
    assert time.monotonic() - start < HARD_TIMEOUT_S / 2


def test_without_mpi4py_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpi._import_mpi.cache_clear()
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[mpi\]'"):
        mpi.MpiTransport()

"""Ranks that are started have cores of their own, as far as there are enough; signals end them in order."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from ringspan.bench.launch import _exit_on_signals, keep_to_own_cores, own_cores

CORES = [3, 4, 7, 8, 10, 11, 12, 40]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_shares_of_as_many_cores_are_a_partition(num_ranks):
    shares = [own_cores(CORES, rank, num_ranks) for rank in range(num_ranks)]
    assert [core for share in shares for core in share] == CORES
    assert {len(share) for share in shares} == {len(CORES) // num_ranks}


@pytest.mark.parametrize("num_ranks", [3, 5, 7, 12, 16, 100])
def test_shares_of_other_numbers_leave_no_core_and_no_rank_out(num_ranks):
    shares = [own_cores(CORES, rank, num_ranks) for rank in range(num_ranks)]
    assert min(map(len, shares)) >= 1
    used = Counter(core for share in shares for core in share)
    assert set(used) == set(CORES)
    assert max(used.values()) - min(used.values()) <= 1


def test_ranks_that_outnumber_the_cores_share_none_with_their_neighbours():
    shares = [own_cores([5, 6], rank, 8) for rank in range(8)]
    assert shares == [[5], [6]] * 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity of processes")
def test_a_process_is_kept_to_its_cores():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        cores = sorted(os.sched_getaffinity(process.pid))
        keep_to_own_cores(process.pid, len(cores) - 1, len(cores))
        kept = os.sched_getaffinity(process.pid)
        process.communicate(b"\n")
    assert kept == {cores[-1]}
    keep_to_own_cores(process.pid, 0, 1)  # it is gone, which is for others to say


def test_signals_that_end_a_program_raise_and_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, _exit_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    try:
        with _exit_on_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

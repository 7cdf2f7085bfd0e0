"""However `ringspan bench` ends, it leaves no process and no folder behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = [
    sys.executable,
    "-c",
    "import signal\n"
    # A shell in the background and nohup start programs that ignore these.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
    "from ringspan.cli import main\n"
    "main()",
]
LONG = ["--ranks", "2", "--tokens", "64K"]  # still busy when it is interrupted
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
ENDS_WITHIN_S = 30.0  # on a busy machine; a few seconds on an idle one

pytestmark = pytest.mark.timeout(120)


@contextmanager
def long_run(folder: Path) -> "Iterator[tuple[subprocess.Popen[str], list[int]]]":
    """A run with its own folder for temporary files, and the processes of its ranks, once they compute."""
    with subprocess.Popen(
        [*PROGRAM, "bench", "attention", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"TMPDIR": str(folder)},
        start_new_session=True,
    ) as process:
        try:
            wait_until(
                lambda: len(ranks := children(process.pid)) == 2 and all(bytes_in_use(rank) > 320e6 for rank in ranks)
            )
            assert list(folder.glob("ringspan-*"))
            time.sleep(1.0)  # torch and the inputs are there; now both are in the first call and say nothing
            yield process, children(process.pid)
        finally:
            process.kill()  # if the test failed; the ranks then find their standard input closed


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def children(pid: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return sorted(child for child in pids if stat(child)[1:2] == [str(pid)])


def is_alive(pid: int) -> bool:
    return stat(pid)[:1] not in ([], ["Z"])


def bytes_in_use(pid: int) -> int:
    fields = stat(pid)
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def wait_until(is_so: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
class TestNothingIsLeftBehind:
    def test_after_ctrl_c(self, tmp_path: Path) -> None:
        with long_run(tmp_path) as (process, ranks):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the ranks too
            output, errors = process.communicate(timeout=ENDS_WITHIN_S)
            assert (process.returncode, output) == (130, "")
            assert "Traceback" not in errors
            assert not any(map(is_alive, ranks))
            assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
    def test_after_a_signal_to_end(self, number: signal.Signals, tmp_path: Path) -> None:
        with long_run(tmp_path) as (process, ranks):
            process.send_signal(number)
            output, errors = process.communicate(timeout=ENDS_WITHIN_S)
            assert (process.returncode, output, errors) == (128 + number, "", "")
            assert not any(map(is_alive, ranks))
            assert list(tmp_path.iterdir()) == []

    def test_after_the_sudden_death_of_the_parent(self, tmp_path: Path) -> None:
        with long_run(tmp_path) as (process, ranks):
            process.kill()
            process.communicate(timeout=ENDS_WITHIN_S)
            wait_until(lambda: not any(map(is_alive, ranks)), ENDS_WITHIN_S)
            assert list(tmp_path.iterdir()) == []

    def test_after_the_sudden_death_of_a_rank(self, tmp_path: Path) -> None:
        with long_run(tmp_path) as (process, ranks):
            os.kill(ranks[1], signal.SIGKILL)
            output, errors = process.communicate(timeout=2 * ENDS_WITHIN_S)
            assert (process.returncode, output) == (1, "")
            assert errors == "Error: rank 1 was killed by SIGKILL, as the system does when memory runs out\n"
            assert not any(map(is_alive, ranks))
            assert list(tmp_path.iterdir()) == []

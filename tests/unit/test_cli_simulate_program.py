"""`ringspan simulate` as a program: how it starts, and how it ends when its output cannot be written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL_DISK = Path("/dev/full")


def run_program(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        encoding="utf-8",
        env={**inherited, "PYTHONIOENCODING": "utf-8", **env},
        check=False,
        timeout=60,
    )


def test_runs_without_torch_and_stays_quick() -> None:
    result = run_program(
        "import sys, time\n"
        "sys.modules['torch'] = None\n"
        "from ringspan.cli import main\n"
        "main(['simulate'], standalone_mode=False)\n"
        "print(time.process_time(), file=sys.stderr)"
    )
    assert result.returncode == 0, result.stderr
    assert "✓ All 10 results agree" in result.stdout
    assert "\x1b" not in result.stdout
    assert float(result.stderr) < 2.0  # seconds of CPU, imports included


@pytest.mark.skipif(not FULL_DISK.exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("args", ["simulate", "simulate --json", "--help"])
def test_a_full_disk_is_told_in_one_line(args: str) -> None:
    with FULL_DISK.open("w") as full_disk:
        result = subprocess.run(
            [sys.executable, "-m", "ringspan", *args.split()],
            stdout=full_disk,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            check=False,
            timeout=60,
        )
    assert (result.returncode, result.stderr) == (1, "Error: No space left on device\n")


@pytest.mark.parametrize("args", ["simulate", "simulate --json"])
def test_a_reader_that_leaves_ends_it_quietly(args: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "ringspan", *args.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert result.stderr == ""


def test_a_terminal_without_unicode_works() -> None:
    result = run_program("from ringspan.cli import main; main(['simulate'])", PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "ok All 10 results agree" in result.stdout
    assert "?" not in result.stdout

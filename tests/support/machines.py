"""Machines on one host: network namespaces behind a switch, each with a link of its own that is shaped.

Needs root and iproute2. Names carry the process id, so that runs at the same time do not meet.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import pytest

_TESTS = Path(__file__).parents[1]
_LOGGED = re.compile(r"^(\d+\.\d+) (\w+) (.*)$", re.MULTILINE)
_NUMBERS = itertools.count()

needs_machines = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="network namespaces need root and iproute2",
)


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


class Machines:
    """`count` machines whose links carry `rate` each way out, with addresses 10.77.0.1 and on."""

    def __init__(self, count: int, rate: str = "100mbit") -> None:
        self.count = count
        self._rate = rate
        self._prefix = f"rs{os.getpid()}x{next(_NUMBERS)}"

    def __enter__(self) -> "Machines":
        self._switch = f"{self._prefix}sw"
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        for i in range(self.count):
            name = self.name(i)
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", self._switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", f"e{i}")
            run("ip", "-n", self._switch, "link", "set", f"e{i}", "netns", name, "name", "eth0")
            run("ip", "-n", self._switch, "link", "set", f"p{i}", "master", "br0")
            run("ip", "-n", self._switch, "link", "set", f"p{i}", "up")
            run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            self.shape(i, self._rate)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in (*map(self.name, range(self.count)), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)

    def name(self, machine: int) -> str:
        return f"{self._prefix}m{machine}"

    def shape(self, machine: int, rate: str) -> None:
        """Let the link out of a machine carry so much."""
        tbf = ["tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
        run("tc", "-n", self.name(machine), "qdisc", "replace", "dev", "eth0", "root", *tbf)

    def cut(self, machine: int) -> None:
        """Pull the plug of a machine."""
        run("ip", "-n", self._switch, "link", "set", f"p{machine}", "down")


class Fate(NamedTuple):
    """What a rank has reported: seconds since the fault, its error's type, and its text."""

    seconds: float
    error: str
    message: str


class Job:
    """`program` from tests/support on every machine, one rank each; killed at the end."""

    def __init__(self, machines: Machines, folder: Path, program: str, *args: str) -> None:
        self._logs = [folder / f"rank{rank}.log" for rank in range(machines.count)]
        self._folder = folder
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(machines.count),
        }
        self._ranks = []
        for rank, log in enumerate(self._logs):
            with log.open("wb") as out:
                self._ranks.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", machines.name(rank), sys.executable, "-m", program, *args],
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        env=environment | {"RANK": str(rank)},
                    )
                )

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()

    def signal(self, rank: int, number: int) -> None:
        self._ranks[rank].send_signal(number)

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        self.signal(rank, signal.SIGSTOP)

    def said(self, rank: int, word: str) -> tuple[float, str] | None:
        """When a rank has said a word for the first time, and what followed it."""
        for at, first, rest in _LOGGED.findall(self._logs[rank].read_text()):
            if first == word:
                return float(at), rest
        return None

    def await_word(self, word: str, ranks: list[int], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if self.said(rank, word) is None]:
            if time.monotonic() > deadline:
                logs = "\n".join(f"rank {rank}: {self._logs[rank].read_text()[-1500:]}" for rank in missing)
                raise TimeoutError(f"no {word} of ranks {missing} within {timeout_s:g} s\n{logs}")
            time.sleep(0.05)

    def fates(self, ranks: list[int], since: float, timeout_s: float) -> dict[int, Fate]:
        """How the calls of some ranks ended."""
        self.await_word("ERROR", ranks, timeout_s)
        fates = {}
        for rank in ranks:
            at, rest = self.said(rank, "ERROR") or (0.0, "")
            fates[rank] = Fate(at - since, *rest.split(" ", 1))
        return fates

    def exit_codes(self, ranks: list[int], timeout_s: float) -> list[int]:
        """Wait for ranks that end by themselves; return their exit codes."""
        return [self._ranks[rank].wait(timeout_s) for rank in ranks]

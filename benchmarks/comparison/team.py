"""Who starts the ranks of contenders, and tells them when to run?

A team is a set of processes in one environment. They wait without using a core until they get a command, so that teams
of several environments take turns within one round.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from comparison.points import Point
from ringspan.bench.launch import RANK_ENVIRONMENT, keep_to_own_cores

BENCHMARKS = Path(__file__).parents[1]
ENVIRONMENT = RANK_ENVIRONMENT | {
    "GLOO_SOCKET_IFNAME": "lo",
    # Some virtual machines promise matrix instructions that they lack; oneDNN believes them and crashes.
    "ONEDNN_MAX_CPU_ISA": os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"),
}


class Sample(NamedTuple):
    """One run: seconds of the slowest rank, and CPU seconds of all ranks."""

    seconds: float
    cpu_seconds: float


class TeamFailed(Exception):  # noqa: N818
    """A rank failed, died or took too long; the message is one line."""


class Team:
    """The ranks of some contenders."""

    def __init__(
        self,
        python: str,
        point: Point,
        contenders: tuple[str, ...],
        limit_bytes: int | None = None,
        limit_s: float = 600,
    ) -> None:
        self.limit_s = limit_s
        self._directory = tempfile.TemporaryDirectory(prefix="compare-")
        folder = Path(self._directory.name)
        path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._logs = [folder / f"rank-{rank}.log" for rank in range(point.world_size)]
        for rank, log in enumerate(self._logs):
            task = {
                "point": dataclasses.asdict(point),
                "rank": rank,
                "store": str(folder / "store"),
                "contenders": contenders,
                "limit_bytes": limit_bytes,
            }
            with log.open("wb") as errors:
                self._ranks.append(
                    subprocess.Popen(
                        [python, "-m", "comparison.rank", json.dumps(task)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
                    )
                )
            keep_to_own_cores(self._ranks[-1].pid, rank, point.world_size)
        try:
            answers = self._answers()
        except BaseException:
            self.close()
            raise
        self.wrong: dict[str, str] = {name: text for it in answers for name, text in it["wrong"].items()}

    def run(self, contender: str) -> Sample:
        """Run a contender once on all ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(contender).encode() + b"\n")
            rank.stdin.flush()
        answers = self._answers()
        return Sample(max(it["seconds"] for it in answers), sum(it["cpu_seconds"] for it in answers))

    def close(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()
        self._directory.cleanup()

    def _answers(self) -> list[dict[str, Any]]:
        """Return a line of each rank; the first failure ends the team, because others may wait for that rank."""
        deadline = time.monotonic() + self.limit_s
        waiting = {rank.stdout: index for index, rank in enumerate(self._ranks)}
        answers: dict[int, dict[str, Any]] = {}
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TeamFailed(f"no result within {self.limit_s:g} s")
            for stream in readable:
                index = waiting.pop(stream)
                line = stream.readline()
                if not line:
                    raise TeamFailed(self._last_words(index))
                answers[index] = json.loads(line)
                if "failed" in answers[index]:
                    raise TeamFailed(answers[index]["failed"])
        return [answers[index] for index in range(len(self._ranks))]

    def _last_words(self, index: int) -> str:
        code = self._ranks[index].wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        lines = [line.strip() for line in self._logs[index].read_text(errors="replace").splitlines() if line.strip()]
        return f"{how}: {lines[-1]}" if lines else how

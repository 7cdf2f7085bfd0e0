"""A server whose ranks are on several machines: torchrun on each, the front beside rank 0."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.machines import Machines, needs_machines
from support.tiny_model import greedy, make_model, tokens_of_text, words

pytestmark = [pytest.mark.slow, needs_machines, pytest.mark.xdist_group("machines"), pytest.mark.timeout(500)]

CURL = shutil.which("curl")


class ServedMachines:
    """torchrun of `ringspan.serve` on every machine, one rank each."""

    def __init__(self, machines: Machines, folder: Path, logs: Path) -> None:
        self._machines = machines
        self.logs = [logs / f"machine{i}.log" for i in range(machines.count)]
        self.agents = []
        for i, path in enumerate(self.logs):
            launch = ["--nnodes", str(machines.count), "--node-rank", str(i), "--nproc-per-node", "1"]
            where = ["--master-addr", "10.77.0.1", "--master-port", "29500"]
            torchrun = [sys.executable, "-m", "torch.distributed.run"]
            program = ["-m", "ringspan.serve", str(folder), "--no-verify", "--port", "8000", "--rank-timeout", "20"]
            with path.open("wb") as log:
                self.agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", machines.name(i), *torchrun, *launch, *where, *program],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                        start_new_session=True,
                    )
                )

    def __enter__(self) -> "ServedMachines":
        return self

    def __exit__(self, *_: object) -> None:
        for i in range(self._machines.count):
            # Each namespace has the processes of one machine and nothing else.
            found = subprocess.run(
                ["ip", "netns", "pids", self._machines.name(i)], capture_output=True, text=True, check=False
            )
            for pid in map(int, found.stdout.split()):
                os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait(30)

    def ask(self, path: str, body: object = None) -> tuple[int, object]:
        """From the machine of rank 0, since the server listens on its loopback."""
        given = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        command = ["curl", "-s", "-m", "60", "-w", "\n%{http_code}", f"http://127.0.0.1:8000{path}", *given]
        done = subprocess.run(
            ["ip", "netns", "exec", self._machines.name(0), *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=90,
        )
        text, _, status = done.stdout.rpartition("\n")
        return int(status or 0), json.loads(text) if text.startswith("{") else text

    def wait_until_ready(self, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.ask("/health")[0] != 200:
            assert time.monotonic() < deadline, "\n".join(log.read_text()[-2000:] for log in self.logs)
            assert all(agent.poll() is None for agent in self.agents), self.logs[0].read_text()[-2000:]
            time.sleep(0.5)


@pytest.mark.skipif(CURL is None, reason="curl asks the server from inside its namespace")
def test_two_machines_answer_as_one_process_and_end_together_when_one_is_lost(tmp_path):
    folder = tmp_path / "tiny"
    model = make_model(folder)
    with Machines(2) as machines, ServedMachines(machines, folder, tmp_path) as served:
        served.wait_until_ready()
        text, held = "w1 w2 w3", 0
        for _ in range(3):
            tokens = tokens_of_text(text)
            wanted = " " + words(greedy(model, tokens, 6))
            status, answered = served.ask(
                "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 6, "temperature": 0}
            )
            assert status == 200, answered
            assert answered["choices"][0]["text"] == wanted
            assert answered["usage"]["prompt_tokens_details"]["cached_tokens"] == held
            held = len(tokens) + 5
            text = f"{text}{wanted} w9"
        assert "rank 1 of 2" in served.logs[1].read_text()
        machines.cut(1)
        assert served.agents[0].wait(120) != 0  # nothing is left that answers wrongly or hangs

"""A real server for tests: started, asked over loopback, and never left behind."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

_PROGRAM = [sys.executable, "-c", "from ringspan.cli import main\nmain()", "serve"]


class Answered(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def text(self) -> str:
        choice = self.body["choices"][0]
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def cached(self) -> int:
        return self.body["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def error(self) -> dict[str, Any]:
        return self.body["error"]


class Server:
    """A process of `ringspan serve`."""

    def __init__(self, folder: Path, *options: object, env: dict[str, str] | None = None) -> None:
        self.name = folder.name
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [*_PROGRAM, str(folder), "--port", "0", *map(str, options)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | (env or {}),
            start_new_session=True,
        )
        threading.Thread(target=self._read_log, daemon=True).start()
        self.port = 0

    def wait_until_listening(self, timeout_s: float = 60.0) -> None:
        def listening() -> bool:
            found = re.search(r"listening on http://\S+:(\d+);", "\n".join(self.log))
            self.port = int(found[1]) if found else 0
            return bool(found)

        self.wait_until(listening, timeout_s)

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        if not self.port:
            self.wait_until_listening(timeout_s)
        self.wait_until(lambda: self.get("/health").status == 200, timeout_s)

    def wait_until(self, is_so: Any, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert self.process.poll() is None, f"the server ended:\n{self.all_log}"
            assert time.monotonic() < deadline, f"it did not come to that:\n{self.all_log}"
            time.sleep(0.05)

    def wait_for_log(self, text: str, timeout_s: float = 20.0) -> None:
        """The log is read by a thread, so a line may come after the answer that it is about."""
        deadline = time.monotonic() + timeout_s
        while text not in self.all_log:
            assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{self.all_log}"
            time.sleep(0.05)

    @property
    def all_log(self) -> str:
        return "\n".join(self.log)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answered:
        return self.send("GET", path, None, headers)

    def chat(self, messages: Any, **fields: Any) -> Answered:
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: Any, **fields: Any) -> Answered:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def post(self, path: str, body: dict[str, Any]) -> Answered:
        return self.send("POST", path, json.dumps({"model": self.name, "temperature": 0} | body).encode())

    def send(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None = None, timeout_s: float = 90.0
    ) -> Answered:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            given = {"Content-Type": "application/json"} if headers is None else headers
            connection.request(method, path, body, given)
            response = connection.getresponse()
            raw = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return Answered(response.status, dict(response.headers), json.loads(raw) if is_json else raw.decode())
        finally:
            connection.close()

    @contextmanager
    def stream(self, messages: Any, **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a chat, without [DONE]; leaving early hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=90.0)
        body = {"model": self.name, "temperature": 0, "stream": True, "messages": messages, **fields}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            yield _events(response)
        finally:
            connection.close()

    def metric(self, name: str, labels: str = "") -> float:
        """A counter with labels that has not counted yet is absent, and 0."""
        found = re.search(rf"^ringspan_{name}{re.escape(labels)} (\S+)$", self.get("/metrics").body, re.MULTILINE)
        assert found or labels, name
        return float(found[1]) if found else 0.0

    def ranks(self) -> list[int]:
        """The processes of the ranks, in order."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _parent(folder) == self.process.pid:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"ringspan.serve.rank" in words:
                    found[int(words[words.index(b"ringspan.serve.rank") + 1])] = int(folder.name)
        return [pid for _, pid in sorted(found.items())]

    def stop(self, timeout_s: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End everything; ranks find their standard input closed, and those that are stopped are killed."""
        pids = self.ranks() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            for line in stderr:
                self.log.append(line.rstrip("\n"))


@contextmanager
def serving(folder: Path, *options: object, **more: Any) -> Iterator[Server]:
    server = Server(folder, *options, **more)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _parent(folder: Path) -> int:
    try:
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])

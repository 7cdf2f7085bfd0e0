"""The application in process, over ranks that are played: every prompt is answered with some tokens at once."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import ringspan.serve.scheduler
from ringspan.serve.app import make_app
from ringspan.serve.settings import ServeSettings
from ringspan.serve.text import ModelText

NUM_TOKENS = 3


class PlayedSupervisor:
    """Ranks that are always ready; `hold` keeps requests until `release`."""

    def __init__(self, settings: ServeSettings, heard: Callable[[dict[str, Any]], None], lost: object) -> None:
        self.state, self.failure, self.num_restarts, self.max_tokens = "ready", None, 0, 1000
        self.ready = asyncio.Event()
        self.ready.set()
        self.is_holding = False
        self.held: list[dict[str, Any]] = []
        self._heard = heard

    async def run(self) -> None:
        await asyncio.Event().wait()

    def send(self, frame: dict[str, Any]) -> None:
        if frame["kind"] == "generate":
            self.held.append(frame)
            if not self.is_holding:
                asyncio.get_running_loop().call_soon(self.release)

    def release(self, count: int | None = None) -> None:
        frames, self.held = self.held[:count], self.held[count:] if count is not None else []
        for frame in frames:
            number = frame["number"]
            turn = [len(frame["tokens"]), "pass_kv", "pass_kv: played."]
            self._heard({"kind": "prefilled", "number": number, "cached": 0, "turns": [turn], "seconds": 0.0})
            for token in range(4, 4 + min(NUM_TOKENS, frame["max_tokens"])):
                likely = {} if frame["top_logprobs"] is None else {"logprobs": [[token, -0.5]]}
                self._heard({"kind": "token", "number": number, "token": token} | likely)
            done = {"kind": "done", "number": number, "reason": "length", "counts": {}, "cache_bytes": 0}
            self._heard(done)


class Replied(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class PlayedServer:
    """The application, and a loop to call it in."""

    def __init__(self, folder: Path, monkeypatch: Any, **settings: Any) -> None:
        monkeypatch.setattr(ringspan.serve.scheduler, "Supervisor", PlayedSupervisor)
        self._loop = asyncio.new_event_loop()
        # In a thread of its own: the main thread may have a loop already, that of a browser test.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.settings = ServeSettings(folder=folder, **settings)

        async def make() -> Any:
            return make_app(self.settings, ModelText(folder), lambda _: None)

        self.app = self.run(make())
        self._life = self.app.router.lifespan_context(self.app)
        self.run(self._life.__aenter__())

    def run(self, work: Coroutine[Any, Any, Any], timeout_s: float = 20.0) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop).result()

    def post(self, path: str, body: bytes, **headers: str) -> Replied:
        return self.run(self.call("POST", path, body, headers))

    async def call(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> Replied:
        given = {"host": "127.0.0.1", "content-type": "application/json"} | (headers or {})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        }
        parts = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Replied(sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))

    def close(self) -> None:
        self.run(self._life.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

"""Which request is next? Some requests are answered together; the others wait in order of arrival.

A waiting request survives a restart of the ranks; those under way do not.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ringspan.serve.errors import ApiError
from ringspan.serve.frames import Frame
from ringspan.serve.metrics import Metrics
from ringspan.serve.settings import ServeSettings
from ringspan.serve.supervisor import Supervisor


class Generation:
    """One running request. The ranks' messages arrive in `inbox`; the last one is "done" or "failed"."""

    def __init__(self, number: int, tokens: Sequence[int], sampling: dict[str, Any]) -> None:
        self.number = number
        self.tokens = tokens
        self.sampling = sampling
        self.cancelled_as: str | None = None
        self.num_generated = 0
        self.last_s = time.monotonic()  # when the request or its last token came
        self.inbox: asyncio.Queue[Frame] = asyncio.Queue()


class Scheduler:
    """The queue in front of the ranks."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.metrics = metrics
        self.supervisor = Supervisor(settings, self._heard, self._lost)
        self._queue_size = settings.queue_size
        self._batch_size = settings.batch_size
        self._waiting: deque[Generation] = deque()
        self._running: dict[int, Generation] = {}
        self._has_changed = asyncio.Event()
        self._count = 0

    def submit(self, tokens: Sequence[int], sampling: dict[str, Any]) -> Generation:
        """Put a request into the queue."""
        self.check_room()
        self._count += 1
        generation = Generation(self._count, tokens, sampling)
        self._waiting.append(generation)
        self._note_load()
        self._has_changed.set()
        return generation

    def check_room(self) -> None:
        """Refuse a request if the ranks are not ready or the queue is full."""
        if not self.supervisor.ready.is_set():
            state = self.supervisor.state
            raise ApiError(f"the ranks are {state}; try again later", status=503, code="not_ready")
        if len(self._waiting) + len(self._running) >= self._queue_size + self._batch_size:
            raise ApiError("too many requests are waiting; try again later", status=429, code="rate_limit_exceeded")

    def cancel(self, generation: Generation, how: str = "cancelled") -> None:
        """Cancel the answer; does nothing if it is complete or cancelled already. `how` is for the metrics."""
        if generation in self._waiting:
            self._waiting.remove(generation)
            self._end(generation, how)
        elif generation.number in self._running and generation.cancelled_as is None:
            generation.cancelled_as = how
            self.supervisor.send({"kind": "cancel", "number": generation.number})

    async def run(self) -> None:
        """Pass requests to the ranks, up to the number that run together."""
        while True:
            await self._has_changed.wait()
            await self.supervisor.ready.wait()
            self._has_changed.clear()
            while self._waiting and len(self._running) < self._batch_size:
                generation = self._waiting.popleft()
                self._running[generation.number] = generation
                frame = {"kind": "generate", "number": generation.number, "tokens": list(generation.tokens)}
                self.supervisor.send(frame | generation.sampling)
            self._note_load()

    def _heard(self, frame: Frame) -> None:
        generation = self._running.get(frame["number"])
        if generation is None:
            return
        if frame["kind"] == "token":
            self._count_token(generation)
        if frame["kind"] != "done":
            generation.inbox.put_nowait(frame)
            return
        for name, count in frame["counts"].items():
            self.metrics.add(f"{name}_total", count)
        self.metrics.set("cache_bytes", frame["cache_bytes"])
        self._end(generation, frame["reason"], frame)

    def _count_token(self, generation: Generation) -> None:
        """Note the time of a token, when it comes from the ranks: a client may be slow to take it."""
        now = time.monotonic()
        name = "time_per_token_seconds" if generation.num_generated else "time_to_first_token_seconds"
        self.metrics.observe(name, now - generation.last_s)
        self.metrics.add("generated_tokens_total")
        generation.num_generated += 1
        generation.last_s = now

    def _lost(self, reason: str) -> None:
        """Fail the running requests after the ranks are lost; all requests if the ranks are not restarted."""
        self.metrics.set("cache_bytes", 0)
        ended = [*self._running.values()]
        if self.supervisor.state == "failed":
            ended += self._waiting
            self._waiting.clear()
        for generation in ended:
            self._end(generation, "failed", {"kind": "failed", "text": reason})

    def _end(self, generation: Generation, how: str, frame: Frame | None = None) -> None:
        self.metrics.add("requests_total", finish=generation.cancelled_as or how)
        self._running.pop(generation.number, None)
        self._has_changed.set()
        self._note_load()
        generation.inbox.put_nowait(frame or {"kind": "done", "reason": how})

    def _note_load(self) -> None:
        self.metrics.set("requests_waiting", len(self._waiting))
        self.metrics.set("requests_running", len(self._running))

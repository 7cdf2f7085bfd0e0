"""Who is next? Requests are answered one at a time, first come, first served; a waiting one survives a restart."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from ringspan.serve.errors import ApiError
from ringspan.serve.frames import Frame
from ringspan.serve.metrics import Metrics
from ringspan.serve.settings import ServeSettings
from ringspan.serve.supervisor import Supervisor


class Generation:
    """One request on its way: messages of the ranks arrive in `inbox`, the last one is "done" or "failed"."""

    def __init__(self, number: int, tokens: Sequence[int], sampling: dict[str, Any]) -> None:
        self.number = number
        self.tokens = tokens
        self.sampling = sampling
        self.inbox: asyncio.Queue[Frame] = asyncio.Queue()
        self.over = asyncio.Event()

    def end(self, frame: Frame) -> None:
        """The last message."""
        self.inbox.put_nowait(frame)
        self.over.set()


class Scheduler:
    """The queue in front of the ranks."""

    def __init__(self, settings: ServeSettings, metrics: Metrics) -> None:
        self.metrics = metrics
        self.supervisor = Supervisor(settings, self._heard, self._lost)
        self._queue_size = settings.queue_size
        self._waiting: deque[Generation] = deque()
        self._has_more = asyncio.Event()
        self._current: Generation | None = None
        self._count = 0

    def submit(self, tokens: Sequence[int], sampling: dict[str, Any]) -> Generation:
        """Put a request into the queue."""
        self.check_ready()
        if len(self._waiting) >= self._queue_size:
            raise ApiError("too many requests are waiting; try again later", status=429, code="rate_limit_exceeded")
        self._count += 1
        generation = Generation(self._count, tokens, sampling)
        self._waiting.append(generation)
        self._note_waiting()
        self._has_more.set()
        return generation

    def check_ready(self) -> None:
        """Refuse what the ranks cannot answer now."""
        if not self.supervisor.ready.is_set():
            state = self.supervisor.state
            raise ApiError(f"the ranks are {state}; try again later", status=503, code="not_ready")

    def cancel(self, generation: Generation) -> None:
        """Cancel the answer; does nothing if it is complete."""
        if generation in self._waiting:
            self._waiting.remove(generation)
            self._note_waiting()
            self._end(generation, "cancelled")
        elif generation is self._current and not generation.over.is_set():
            self.supervisor.send({"kind": "cancel", "number": generation.number})

    async def run(self) -> None:
        """Hand the ranks one request after the other."""
        while True:
            await self._has_more.wait()
            await self.supervisor.ready.wait()
            if not self._waiting:
                self._has_more.clear()
                continue
            self._current = generation = self._waiting.popleft()
            self._note_waiting()
            frame = {"kind": "generate", "number": generation.number, "tokens": list(generation.tokens)}
            self.supervisor.send(frame | generation.sampling)
            await generation.over.wait()
            self._current = None

    def _heard(self, frame: Frame) -> None:
        generation = self._current
        if generation is None or frame["number"] != generation.number:
            return
        if frame["kind"] != "done":
            generation.inbox.put_nowait(frame)
            return
        self.metrics.add("evictions_total", frame["evicted"])
        self.metrics.set("cache_bytes", frame["cache_bytes"])
        self._end(generation, frame["reason"], frame)

    def _lost(self, reason: str) -> None:
        """The ranks are gone, and the answer under way with them; all answers, if they do not come back."""
        self.metrics.set("cache_bytes", 0)
        ended = [] if self._current is None or self._current.over.is_set() else [self._current]
        if self.supervisor.state == "failed":
            ended += self._waiting
            self._waiting.clear()
            self._note_waiting()
        for generation in ended:
            self._end(generation, "failed", {"kind": "failed", "text": reason})

    def _end(self, generation: Generation, how: str, frame: Frame | None = None) -> None:
        self.metrics.add("requests_total", finish=how)
        generation.end(frame or {"kind": "done", "reason": how})

    def _note_waiting(self) -> None:
        self.metrics.set("requests_waiting", len(self._waiting))

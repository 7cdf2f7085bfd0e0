"""How is an answer sent while it is made? As server-sent events, to a client that may leave or stop reading."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ringspan.serve.errors import ApiError

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


class JsonReply(Response):
    """A JSON response in ASCII, so that text with lone surrogates can be sent."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


def event(content: Any) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content)}\n\n".encode()


class EventReply(Response):
    """A stream of events. `close` is always called at its end."""

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str], close: Callable[[], None]) -> None:
        super().__init__(headers=headers | {"cache-control": "no-store"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events until the client disconnects."""
        del scope
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._close()
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], close: Callable[[], None]) -> T:
    """The result of a coroutine; if the client disconnects, the coroutine is cancelled and `close` is called."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_until_gone(request.receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("the client has left", status=499, code="cancelled")
    except BaseException:
        close()
        raise
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

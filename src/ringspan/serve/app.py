"""Which addresses does the server answer, and whom?"""

import asyncio
import dataclasses
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ringspan.serve.answers import ServedAnswer
from ringspan.serve.errors import ApiError
from ringspan.serve.fields import (
    Body,
    Wishes,
    chat_wishes,
    completion_wishes,
    read_messages,
    read_prompt,
    read_tools,
)
from ringspan.serve.metrics import Metrics
from ringspan.serve.replies import Kind, Reply
from ringspan.serve.scheduler import Scheduler
from ringspan.serve.settings import ServeSettings
from ringspan.serve.streams import DONE, EventReply, JsonReply, event, unless_gone
from ringspan.serve.text import ModelText

# The page's own policy says which script and style sheet may run.
_PAGE_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def make_app(settings: ServeSettings, text: ModelText, on_failure: Callable[[str], None]) -> Starlette:
    """The ASGI application. It runs the ranks during its lifetime, and reports when it stops restarting them."""
    metrics = Metrics()
    scheduler = Scheduler(settings, metrics)
    api = Api(settings, text, scheduler)

    async def supervise() -> None:
        await scheduler.supervisor.run()
        on_failure(scheduler.supervisor.failure or "")

    @asynccontextmanager
    async def live(_: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(work) for work in (supervise(), scheduler.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        metrics.add("errors_total", status=str(error.status))
        return JsonReply(error.body, error.status)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/", api.page),
        ],
        exception_handlers={ApiError: refuse, HTTPException: _no_such_thing, Exception: _our_fault},
        lifespan=live,
    )


class Api:
    def __init__(self, settings: ServeSettings, text: ModelText, scheduler: Scheduler) -> None:
        self._settings = settings
        self._text = text
        self._scheduler = scheduler
        self._model = {"id": settings.name, "object": "model", "created": 0, "owned_by": "local"}

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._body(request)
        wishes, messages, tools = chat_wishes(body), read_messages(body), read_tools(body)
        tokens = await asyncio.to_thread(self._text.encode_chat, messages, tools)
        return await self._answer(request, "chat", tokens, wishes)

    async def complete(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._body(request)
        wishes, prompt = completion_wishes(body), read_prompt(body)
        tokens = await asyncio.to_thread(self._text.encode_prompt, prompt)
        return await self._answer(request, "completion", tokens, wishes)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._check_caller(request)
        return JsonReply({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        self._check_caller(request)
        self._check_model(request.path_params["name"])
        return JsonReply(self._model)

    async def health(self, request: Request) -> Response:
        """GET /health. It needs no key and reveals nothing about requests."""
        del request
        supervisor = self._scheduler.supervisor
        status = 200 if supervisor.ready.is_set() else 503
        return JsonReply({"status": supervisor.state, "ranks": self._settings.num_ranks}, status)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        self._check_caller(request)
        metrics, supervisor = self._scheduler.metrics, self._scheduler.supervisor
        metrics.set("restarts_total", supervisor.num_restarts)
        metrics.set("ready", float(supervisor.ready.is_set()))
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        """GET /: a page to chat with. It contains no secret, so it needs no key."""
        if self._settings.api_key is None:
            self._check_caller(request)
        if not self._settings.home_page:
            raise ApiError("this server has no page", status=404)
        return Response(self._settings.home_page, media_type="text/html", headers=_PAGE_HEADERS)

    async def _answer(self, request: Request, kind: Kind, tokens: list[int], wishes: Wishes) -> Response:
        wishes = self._within_limits(tokens, wishes)
        answer = ServedAnswer(self._scheduler, self._text, tokens, wishes, continues=kind == "completion")
        await unless_gone(request, answer.start(), answer.close)
        headers = {
            "x-ringspan-cache": f"{answer.num_cached} of {answer.num_prompt} tokens reused",
            "x-ringspan-algorithm": answer.algorithm.encode("ascii", "replace").decode(),
        }
        has_logprobs = wishes.top_logprobs is not None
        reply = Reply(kind, self._settings.name, is_stream=wishes.stream, has_logprobs=has_logprobs)
        if wishes.stream:
            events = _events(answer, reply, wishes.include_usage)
            return EventReply(events, headers, answer.close)
        texts = await unless_gone(request, _collect(answer), answer.close)
        return JsonReply(reply.whole(texts, answer), headers=headers)

    def _within_limits(self, tokens: list[int], wishes: Wishes) -> Wishes:
        """The request with a number of tokens that fits."""
        longest = min(self._text.max_positions, self._scheduler.supervisor.max_tokens)
        room = longest - len(tokens)
        if room < (wishes.max_tokens or 1):
            raise ApiError(
                f"a conversation has at most {longest} tokens here; the prompt has {len(tokens)} and "
                f"{wishes.max_tokens or 1} are to be generated",
                code="context_length_exceeded",
            )
        most = self._settings.max_tokens
        if (wishes.max_tokens or 1) > most:
            raise ApiError(f"a request generates at most {most} tokens here", param="max_tokens")
        return dataclasses.replace(wishes, max_tokens=wishes.max_tokens or min(room, most))

    async def _body(self, request: Request) -> Body:
        self._check_caller(request)
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A web page can send other types to this machine without being asked.
            raise ApiError("the body must be sent with Content-Type: application/json", status=415)
        body = _parse(await self._read(request))
        self._check_model(body.get("model"))
        self._scheduler.check_room()  # before the prompt is made into tokens, which takes a while if it is long
        return body

    async def _read(self, request: Request) -> bytes:
        most = self._settings.max_body_bytes
        raw = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise ApiError(f"the body has more than {most} bytes", status=413)
        except TimeoutError:
            raise ApiError("the body did not arrive in time", status=408) from None
        except ClientDisconnect:
            raise ApiError("the client has left", status=499) from None
        return bytes(raw)

    def _check_model(self, name: object) -> None:
        if name != self._settings.name:
            rule = f"model: this server has {self._settings.name!a} only"
            raise ApiError(rule, status=404, code="model_not_found", param="model")

    def _check_caller(self, request: Request) -> None:
        key = self._settings.api_key
        if key is not None:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given), _digest(key)):
                raise ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
        elif (request.url.hostname or "") not in (*LOCAL_NAMES, self._settings.host):
            # A name that was made to point here, by a page in somebody's browser.
            raise ApiError("this server answers to its own address only", status=403, code="wrong_host")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _parse(raw: bytes) -> dict[str, Any]:
    body = None
    with suppress(ValueError, RecursionError):
        body = json.loads(raw)
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object")
    return body


async def _collect(answer: ServedAnswer) -> list[Any]:
    return [text async for text in answer.pieces()]


async def _events(answer: ServedAnswer, reply: Reply, include_usage: bool) -> AsyncIterator[bytes]:
    first = reply.first()
    if first is not None:
        yield event(first)
    try:
        async for text in answer.pieces():
            yield event(reply.piece(text))
    except ApiError as error:  # too late for a status
        yield event(error.body)
        return
    yield event(reply.last(answer.finish_reason))
    if include_usage:
        yield event(reply.usage(answer))
    yield DONE


async def _no_such_thing(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JsonReply(ApiError(error.detail, status=error.status_code).body, error.status_code, error.headers)


async def _our_fault(_: Request, error: Exception) -> Response:
    del error
    return JsonReply(ApiError("the server failed; see its log", status=500, code="internal_error").body, 500)

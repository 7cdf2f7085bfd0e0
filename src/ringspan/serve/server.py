"""How does a server start, listen and end?"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringspan.errors import RingspanError, ShapeError
from ringspan.serve.app import make_app
from ringspan.serve.errors import ApiError
from ringspan.serve.rank import describe
from ringspan.serve.settings import ServeSettings
from ringspan.serve.streams import JsonReply
from ringspan.serve.text import ModelText
from ringspan.serve.torchrun import serve_rank, torchrun_place

log = logging.getLogger("ringspan.serve")


def serve(settings: ServeSettings) -> None:
    """Serve a model until SIGTERM or Ctrl-C. Under torchrun every rank calls this, and rank 0 listens.

    Raises:
        RingspanError: The model cannot be served, or its ranks were lost too often.
        OSError: The address cannot be used.
    """
    _open_log()
    place = torchrun_place() if settings.is_under_torchrun else None
    if place is not None and place.rank:
        serve_rank(place, settings.task(verify=settings.verify))
        return
    text = _load_text(settings.folder)
    with socket.create_server((settings.host, settings.port), family=_family(settings.host), backlog=128) as listener:
        host, port, *_ = listener.getsockname()
        log.info("listening on http://%s:%d; model %s", f"[{host}]" if ":" in host else host, port, settings.name)
        failures: list[str] = []
        server = _make_server(settings, text, failures)
        asyncio.run(server.serve(sockets=[listener]))
    if failures:
        raise RingspanError(f"the server gave up: {failures[0]}")
    log.info("ended")


def _load_text(folder: Path) -> ModelText:
    try:
        return ModelText(folder)
    except RingspanError:
        raise
    except Exception as error:  # transformers and tokenizers raise anything for a damaged file
        rule = f"the configuration or the tokenizer cannot be loaded: {describe(error)}"
        raise ShapeError(
            rule, argument="folder", value=str(folder), remedy="download or convert the model anew"
        ) from error


class _Server(uvicorn.Server):
    """A uvicorn server that returns after a signal; uvicorn's own raises the signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


class _Protocol(H11Protocol):
    """Drops a connection that brings no complete request in time, or takes nothing of what is sent to it."""

    header_timeout_s: float
    write_timeout_s: float
    _request_due: asyncio.TimerHandle | None = None
    _taking_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pause_writing tells of every byte that the client does not take
        self._expect_request()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering():  # the answer under way cannot be followed by another status
            self.transport.abort()
            return
        reply = JsonReply(ApiError(msg).body, headers={"connection": "close"})
        head = b"".join(b"%b: %b\r\n" % header for header in reply.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (head, bytes(reply.body)))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for due in (self._request_due, self._taking_due):
            if due is not None:
                due.cancel()

    def handle_events(self) -> None:
        super().handle_events()
        self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking_due is not None:
            self._taking_due.cancel()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect_request(self) -> None:
        is_answering = self._is_answering()
        if is_answering and self._request_due is not None:
            self._request_due.cancel()
            self._request_due = None
        if not is_answering and self._request_due is None:
            self._request_due = self.loop.call_later(self.header_timeout_s, self.transport.abort)

    def _expect_taking(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._taking_due = self.loop.call_later(self.write_timeout_s, self._check_taken, left)

    def _check_taken(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_taking()
        else:
            self.transport.abort()


def _make_server(settings: ServeSettings, text: ModelText, failures: list[str]) -> _Server:
    def give_up(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    class Protocol(_Protocol):
        header_timeout_s = settings.header_timeout_s
        write_timeout_s = settings.write_timeout_s

    app = make_app(settings, text, give_up)

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(server.server_state.connections) > settings.max_connections:
            error = ApiError("too many connections are open; try again later", status=503, code="too_many_connections")
            await JsonReply(error.body, error.status, {"connection": "close"})(scope, receive, send)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(
        limited,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.grace_s),
    )
    server = _Server(config)
    return server


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _open_log() -> None:
    """Log to standard error without any text of prompts; of uvicorn's log only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("ringspan.serve", logging.INFO), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False

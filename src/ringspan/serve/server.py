"""How does a server start, listen and end?"""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ringspan.errors import RingspanError
from ringspan.serve.app import make_app
from ringspan.serve.settings import ServeSettings
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
    text = ModelText(settings.folder)
    with socket.create_server((settings.host, settings.port), family=_family(settings.host), backlog=128) as listener:
        host, port, *_ = listener.getsockname()
        log.info("listening on http://%s:%d; model %s", f"[{host}]" if ":" in host else host, port, settings.name)
        failures: list[str] = []
        server = _make_server(settings, text, failures)
        asyncio.run(server.serve(sockets=[listener]))
    if failures:
        raise RingspanError(f"the server gave up: {failures[0]}")
    log.info("ended")


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


def _make_server(settings: ServeSettings, text: ModelText, failures: list[str]) -> _Server:
    def give_up(reason: str) -> None:
        failures.append(reason)
        server.should_exit = True

    class Protocol(H11Protocol):
        """Closes a connection that sends no complete headers in time."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.loop.call_later(settings.header_timeout_s, self._check_begun)

        def _check_begun(self) -> None:
            if getattr(self, "cycle", None) is None:
                self.transport.abort()

    config = uvicorn.Config(
        make_app(settings, text, give_up),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
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

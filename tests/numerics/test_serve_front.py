"""The front in process: connections of slow clients, the text of prompts and answers, and damaged folders."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from starlette.responses import Response
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import ringspan.serve.server
from ringspan.cli.serve import serve
from ringspan.errors import ShapeError
from ringspan.serve.errors import ApiError
from ringspan.serve.rank import reason
from ringspan.serve.server import _load_text, _make_server
from ringspan.serve.settings import ServeSettings
from ringspan.serve.text import ModelText
from support.tiny_model import make_model

HEADER_S, WRITE_S = 0.5, 0.5
NEVER_S = 20.0
"""Long enough for a busy machine; a connection that is not dropped fails the test by then."""
BIG = 2**24
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_model(folder)
    return folder


async def big_reply(scope, receive, send) -> None:
    if scope["type"] == "http":
        await Response(b"x" * BIG)(scope, receive, send)


async def dropped(port: int, first: bytes, then: bytes, *, reads: bool) -> bool:
    """Whether a client that drips bytes after its first ones is dropped."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, first)

        async def drip() -> None:
            while True:
                await asyncio.sleep(HEADER_S / 5)
                await loop.sock_sendall(client, then)

        async def read() -> None:
            while await loop.sock_recv(client, 65536):
                pass

        work = [asyncio.create_task(task) for task in ([drip(), read()] if reads else [drip()])]
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(NEVER_S):
                await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        ended = any(task.done() for task in work)
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        return ended


@pytest.mark.parametrize(
    ("first", "then", "reads"),
    [
        (GET, b"A: b\r\n", True),
        (GET + b"\r\n" + GET, b"A: b\r\n", True),
        (GET + b"Content-Length: 100000\r\n\r\n", b"x", True),
        (GET + b"\r\n", b"", False),
    ],
    ids=["headers", "headers of the second request", "a body that nobody reads", "taking the answer"],
)
def test_a_slow_client_is_dropped(folder, monkeypatch, first, then, reads):
    monkeypatch.setattr(ringspan.serve.server, "make_app", lambda *_: big_reply)
    settings = ServeSettings(folder=folder, header_timeout_s=HEADER_S, write_timeout_s=WRITE_S)

    async def run() -> bool:
        server = _make_server(settings, ModelText(folder), [])
        server.config.lifespan = "off"
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                return await dropped(listener.getsockname()[1], first, then or b"x", reads=reads)
            finally:
                server.should_exit = True
                await serving

    assert asyncio.run(run())


def test_bytes_that_are_not_http_and_connections_past_the_bound_are_refused_in_the_form_of_the_api(folder, monkeypatch):
    monkeypatch.setattr(ringspan.serve.server, "make_app", lambda *_: big_reply)

    async def ask(port: int, sent: bytes) -> tuple[int, dict[str, Any]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        head, _, body = (await asyncio.wait_for(reader.read(), NEVER_S)).partition(b"\r\n\r\n")
        writer.close()
        assert b"connection: close" in head.lower()
        return int(head.split()[1]), json.loads(body)["error"]

    async def run() -> None:
        server = _make_server(ServeSettings(folder=folder, max_connections=1), ModelText(folder), [])
        server.config.lifespan = "off"
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as first:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            port = listener.getsockname()[1]
            try:
                status, error = await ask(port, b"hello\r\n\r\n")
                assert (status, error["type"]) == (400, "invalid_request_error")
                first.setblocking(False)
                await asyncio.get_running_loop().sock_connect(first, ("127.0.0.1", port))
                status, error = await ask(port, GET + b"\r\n")
                assert (status, error["code"]) == (503, "too_many_connections")
            finally:
                server.should_exit = True
                first.close()
                await serving

    asyncio.run(run())


def bytes_of(text: ModelText, count: int) -> list[bytes | None]:
    return [text.token_bytes(token) for token in range(count)]


def test_bytes_of_tokens_that_are_parts_of_characters(tmp_path):
    make_model(tmp_path)
    names = ["\u0120caf", "\u00c3", "\u00a9", "a"]  # a space is written as U+0120, other bytes as letters
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(tmp_path)
    assert bytes_of(ModelText(tmp_path), 4) == [b" caf", b"\xc3", b"\xa9", b"a"]


def test_bytes_of_tokens_behind_others_and_of_bytes(tmp_path):
    make_model(tmp_path)
    names = ["\u2581Paris", "<0xC3>", "a", "\ufffd"]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a").save_pretrained(tmp_path)
    assert bytes_of(ModelText(tmp_path), 4) == [b" Paris", b"\xc3", b"a", None]


def test_half_of_a_surrogate_pair_is_refused_wherever_it_comes_from(folder):
    with pytest.raises(ApiError, match="surrogate"):
        ModelText(folder).encode_prompt("w1 \ud800")


def test_a_text_that_cannot_fit_is_refused_before_it_is_made_into_tokens(folder):
    with pytest.raises(ApiError, match="characters") as caught:
        ModelText(folder).encode_prompt("w" * 100_000)
    assert caught.value.code == "context_length_exceeded"


def test_a_completion_keeps_the_space_before_its_first_word(tmp_path):
    make_model(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁capital": 1, "▁Paris": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    text = ModelText(tmp_path)
    assert text.decoder([1, 1]).add(2) == " Paris"
    assert text.decoder([]).add(2) == "Paris"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rank-timeout", "inf"], "--rank-timeout inf: a day is enough"),
        (["--api-key-file", "key"], "--api-key-file key: it cannot be read as text"),
        (["--api-key-file", "empty"], "--api-key-file: a key is printable ASCII"),
        (["--host", "0.0.0.0"], "clients need an API key"),
        (["--storage", "int4"], "--storage int4: no such storage"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_a_line(folder, tmp_path, monkeypatch, options, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RINGSPAN_API_KEY", raising=False)
    Path("key").write_bytes(b"k\xff")
    Path("empty").write_text("")
    ended = CliRunner().invoke(serve, [str(folder), *options])
    assert ended.exit_code == 2
    assert told in ended.output
    assert "Traceback" not in ended.output


def test_a_lost_connection_of_gloo_is_an_echo_and_a_refusal_is_a_cause():
    assert reason(RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")) == "transport"
    assert reason(RuntimeError("probability tensor")) == "error"
    assert reason(NotADirectoryError("/dev/null/x")) == "refused"


@pytest.mark.parametrize(("name", "text"), [("tokenizer.json", "{}"), ("config.json", "{}"), ("config.json", "[")])
def test_a_damaged_folder_is_refused_with_its_name(tmp_path, name, text):
    broken = tmp_path / "broken"
    make_model(broken)
    (broken / name).write_text(text)
    with pytest.raises(ShapeError, match="broken"):
        _load_text(broken)

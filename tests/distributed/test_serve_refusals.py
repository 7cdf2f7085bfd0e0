"""What a server refuses, and how it says so: OpenAI's form, never a 500, never a hang."""

import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.serving import serving
from support.tiny_model import make_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(300)]

HELLO = [{"role": "user", "content": "w1"}]
KEY = "a-key-for-this-test"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, "--ranks", 1, "--no-verify", "--max-tokens", 50) as server:
        yield server


@pytest.fixture(scope="module")
def locked(folder):
    with serving(folder, "--ranks", 1, "--no-verify", env={"RINGSPAN_API_KEY": KEY}) as server:
        yield server


def assert_refused(answered, status: int) -> None:
    assert answered.status == status
    assert {*answered.error} == {"message", "type", "param", "code"}
    assert answered.error["message"]


def test_models_and_health_and_unknown_addresses(server):
    assert [model["id"] for model in server.get("/v1/models").body["data"]] == ["tiny"]
    assert server.get("/health").body == {"status": "ready", "ranks": 1}
    assert server.get("/v1/models/tiny").body["id"] == "tiny"
    assert_refused(server.get("/v1/models/other"), 404)
    assert_refused(server.get("/v1/no_such"), 404)
    assert_refused(server.get("/v1/chat/completions"), 405)


@pytest.mark.parametrize("name", ["", "Tiny", "../tiny", "tiny/", None, 5, "\ud800"])
def test_another_model_is_not_found(server, name):
    answered = server.chat(HELLO, model=name)
    assert_refused(answered, 404)
    assert answered.error["code"] == "model_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"[" * 100_000, b"\xff", b'{"model": ' + b"9" * 10_000])
def test_a_body_that_is_not_an_object(server, body):
    assert_refused(server.send("POST", "/v1/chat/completions", body), 400)


def test_a_body_of_another_type(server):
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    assert_refused(server.send("POST", "/v1/chat/completions", body, {"Content-Type": "text/plain"}), 415)


def test_a_body_that_is_too_long(server):
    assert_refused(server.send("POST", "/v1/chat/completions", b" " * (2**25 + 1)), 413)


def test_more_tokens_than_there_is_room_for(server):
    answered = server.chat([{"role": "user", "content": "w1 " * 2048}])
    assert_refused(answered, 400)
    assert answered.error["code"] == "context_length_exceeded"
    assert_refused(server.chat(HELLO, max_tokens=51), 400)


def test_a_name_that_points_here_is_not_answered(server):
    assert_refused(server.get("/v1/models", {"Host": "attacker.example"}), 403)


def test_a_refusal_of_the_template_shows_nothing_of_the_prompt(server):
    answered = server.chat([{"role": "user", "content": "secret w1"}], n=2)
    assert_refused(answered, 400)
    assert "secret" not in json.dumps(answered.body) + server.all_log


@pytest.mark.parametrize(
    "given",
    [None, "", KEY, f"Basic {KEY}", "Bearer ", f"Bearer {KEY}x", "Bearer \xe9"],
    ids=["none", "empty", "bare", "basic", "no key", "longer", "not ASCII"],  # pytest puts ids into the environment
)
def test_without_the_key_nothing_is_answered(locked, given):
    headers = JSON if given is None else JSON | {"Authorization": given}
    for path in ("/v1/models", "/metrics"):
        assert_refused(locked.send("GET", path, None, headers), 401)
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    assert_refused(locked.send("POST", "/v1/chat/completions", body, headers), 401)


def test_with_the_key_everything_is(locked):
    assert locked.get("/v1/models", {"Authorization": f"Bearer {KEY}"}).status == 200
    assert locked.get("/health").status == 200
    assert KEY not in locked.all_log


def test_ranks_never_see_the_key(locked):
    for pid in locked.ranks():
        assert KEY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_connection_that_says_nothing_is_closed(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=40) as silent:
        silent.sendall(b"GET /heal")
        start_s = time.monotonic()
        with suppress(ConnectionResetError):
            assert silent.recv(100) == b""
        assert time.monotonic() - start_s < 30
    assert server.get("/health").status == 200


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    program = [sys.executable, "-c", "from ringspan.cli import main\nmain()", "serve", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)


def test_an_address_that_others_reach_needs_a_key(folder):
    ended = run(folder, "--host", "0.0.0.0")
    assert ended.returncode == 2
    assert "clients need an API key" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_folder_without_a_model(tmp_path):
    ended = run(tmp_path)
    assert ended.returncode == 2
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_address_in_use(folder, server):
    ended = run(folder, "--port", server.port)
    assert ended.returncode == 1
    assert "in use" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model.safetensors").unlink()
    ended = run(broken, "--port", 0, "--ranks", 2)
    assert ended.returncode == 1
    assert "the server gave up" in ended.stderr
    assert "model.safetensors" in ended.stderr
    assert "Traceback" not in ended.stderr


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["messages", "prompt", "stop", "seed", "max_tokens", "temperature", "top_p", "stream", "logprobs", "tools", "n"]
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": st.text(max_size=8) | VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    max_size=3,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    fields=st.dictionaries(FIELDS | st.text(max_size=8), VALUES, max_size=4),
    messages=MESSAGES,
    prompt=st.text(max_size=8),
)
def test_no_body_gives_a_500(server, path, fields, messages, prompt):
    base = {"messages": messages} if path.startswith("/v1/chat") else {"prompt": prompt}
    answered = server.post(path, {"max_tokens": 1} | base | fields)
    assert answered.status in (200, 400), answered
    if answered.status == 400:
        assert_refused(answered, 400)

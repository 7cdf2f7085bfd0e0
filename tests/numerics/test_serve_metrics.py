"""The figures of a server count what the ranks did and what clients were refused."""

import json
import re

import pytest

from support.serve_app import NUM_TOKENS, PlayedServer
from support.tiny_model import make_model


@pytest.fixture
def server(tmp_path, monkeypatch):
    make_model(tmp_path / "tiny")
    server = PlayedServer(tmp_path / "tiny", monkeypatch, num_ranks=1)
    yield server
    server.close()


def metrics_of(server: PlayedServer) -> dict[str, float]:
    text = server.run(server.call("GET", "/metrics", b"")).body.decode()
    return {name: float(value) for name, value in re.findall(r"^ringspan_(\S+) (\S+)$", text, re.MULTILINE)}


def test_answers_and_errors_are_counted(server):
    body = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 50}
    for stream in (False, True):
        assert server.post("/v1/completions", json.dumps(body | {"stream": stream}).encode()).status == 200
    assert server.post("/v1/completions", json.dumps(body | {"n": 2}).encode()).status == 400
    assert server.post("/v1/completions", json.dumps(body | {"model": "other"}).encode()).status == 404
    found = metrics_of(server)
    assert found['requests_total{finish="length"}'] == 2
    assert found["prompt_tokens_total"] == 4
    assert found["generated_tokens_total"] == 2 * NUM_TOKENS
    assert found["time_to_first_token_seconds_count"] == 2
    assert found["time_per_token_seconds_count"] == 2 * (NUM_TOKENS - 1)
    assert found['errors_total{status="400"}'] == found['errors_total{status="404"}'] == 1
    assert found["requests_running"] == found["requests_waiting"] == 0


def test_tokens_are_counted_when_they_come_from_the_ranks_and_not_when_a_client_takes_them(server):
    body = {"model": "tiny", "prompt": "w1 w2", "max_tokens": 50, "stop": " w1"}  # found in the second token
    replied = server.post("/v1/completions", json.dumps(body).encode())
    assert json.loads(replied.body)["usage"]["completion_tokens"] == 2
    assert metrics_of(server)["generated_tokens_total"] == NUM_TOKENS

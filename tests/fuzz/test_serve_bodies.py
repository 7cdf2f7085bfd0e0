"""Whatever a client sends, the server answers it or refuses it in OpenAI's form: no 500, no hang."""

import asyncio
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.serve_app import NUM_TOKENS, PlayedServer
from support.tiny_model import make_model

PATHS = ("/v1/chat/completions", "/v1/completions")
FIELDS = [
    *("model", "messages", "prompt", "stream", "stream_options", "stop", "max_tokens", "max_completion_tokens"),
    *("temperature", "top_p", "seed", "logprobs", "top_logprobs", "tools", "n", "user", "response_format", "best_of"),
    *("echo", "suffix", "logit_bias", "tool_choice", "functions", "metadata", "store", "modalities"),
]
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "w1 w2", "tiny", "\ud800", "text", "function", "{% for %}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "name", "type", "text", "tool_calls"]) | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text(max_size=20)}
    )
    | st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "refusal"]), values, max_size=4),
    max_size=3,
)
bodies = st.builds(
    lambda base, changes: {**base, **changes},
    st.fixed_dictionaries({"model": st.just("tiny")}, optional={"messages": messages, "prompt": st.text(max_size=20)}),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), values, max_size=3),
)
raws = (
    bodies.map(lambda body: json.dumps(body).encode())
    | st.binary(max_size=40)
    | values.map(lambda value: json.dumps(value).encode())
)


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    make_model(folder)
    server = PlayedServer(folder, monkeypatch, max_body_bytes=2000, num_ranks=1)
    yield server
    server.close()


def check(server: PlayedServer, path: str, raw: bytes) -> int:
    replied = server.post(path, raw)
    if replied.status == 200:
        if replied.headers["content-type"].startswith("application/json"):
            assert json.loads(replied.body)["usage"]["completion_tokens"] <= NUM_TOKENS
        else:
            assert replied.body.endswith(b"data: [DONE]\n\n")
        return 200
    assert 400 <= replied.status < 500, (replied, raw)
    assert json.loads(replied.body)["error"]["message"]
    return replied.status


def campaign(server: PlayedServer, count: int) -> dict[int, int]:
    statuses: dict[int, int] = {}

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=[*HealthCheck])
    @given(st.sampled_from(PATHS), raws)
    def run(path: str, raw: bytes) -> None:
        status = check(server, path, raw)
        statuses[status] = statuses.get(status, 0) + 1

    run()
    return statuses


def test_any_body_is_answered_or_refused(server):
    statuses = campaign(server, 300)
    assert statuses.keys() >= {200, 400}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_five_thousand_bodies_are_answered_or_refused(server):
    statuses = campaign(server, 5500)
    assert sum(statuses.values()) >= 5000
    assert statuses.keys() >= {200, 400, 404}


def test_fifty_clients_are_answered_in_order_and_those_past_the_bound_get_429(server):
    app = server
    body = json.dumps({"model": "tiny", "prompt": "w1", "max_tokens": 2}).encode()
    limit = server.settings.queue_size + server.settings.batch_size

    async def crowd() -> tuple[list[int], list[int]]:
        supervisor = played_of(app)
        supervisor.is_holding = True
        order: list[int] = []

        async def one(number: int) -> int:
            replied = await app.call("POST", "/v1/completions", body)
            order.append(number)
            return replied.status

        tasks = []
        for number in range(50):
            tasks.append(asyncio.create_task(one(number)))
            for _ in range(20):
                await asyncio.sleep(0.001)
        while supervisor.held:
            assert len(supervisor.held) <= server.settings.batch_size
            supervisor.release(1)
            await asyncio.sleep(0.02)
        return [await task for task in tasks], order

    statuses, order = app.run(crowd(), 60)
    assert statuses == [200] * limit + [429] * (50 - limit)
    assert [number for number in order if number < limit] == [*range(limit)]


def played_of(server: PlayedServer):
    for route in server.app.routes:
        if route.path == "/health":
            return route.endpoint.__self__._scheduler.supervisor
    raise AssertionError

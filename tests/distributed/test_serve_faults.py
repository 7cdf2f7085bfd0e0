"""A server whose ranks die, stop or whose parent dies: an error for the client, 503, new ranks, right answers."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from support.serving import Answered, Server, is_alive, serving
from support.tiny_model import greedy, make_model

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(400)]

RANK_TIMEOUT_S = 8
NOTICED_S = 6.0  # three times the promise of 2 s
OPTIONS = ("--ranks", 2, "--no-verify", "--prefill-chunk", 8, "--rank-timeout", RANK_TIMEOUT_S)
QUESTION = [{"role": "user", "content": "w1 w2 w3"}]
LONG = [{"role": "user", "content": " ".join(f"w{i % 190}" for i in range(1500))}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return folder, make_model(folder)


@pytest.fixture
def server(model) -> Iterator[Server]:
    with serving(model[0], *OPTIONS) as server:
        yield server


def assert_answers(server: Server, model) -> None:
    server.wait_until_ready()
    wanted = " ".join(f"w{token - 4}" for token in greedy(model[1], [2, 5, 6, 7, 3], 5))
    assert server.chat(QUESTION, max_tokens=5).text == wanted


def is_down(server: Server) -> bool:
    return server.get("/health").status == 503


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_idle(server, model, rank):
    os.kill(server.ranks()[rank], signal.SIGKILL)
    server.wait_until(lambda: is_down(server), NOTICED_S)
    assert server.chat(QUESTION).status == 503
    assert_answers(server, model)
    assert server.metric("restarts_total") == 1
    server.wait_for_log(f"rank {rank} was killed by SIGKILL")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_decode(server, model, rank):
    with server.stream(QUESTION, max_tokens=1500) as events:
        for _ in range(4):
            next(events)
        os.kill(server.ranks()[rank], signal.SIGKILL)
        start_s = time.monotonic()
        *_, last = events
    assert time.monotonic() - start_s < NOTICED_S
    assert last["error"]["code"] == "ranks_failed"
    assert_answers(server, model)


def test_a_rank_killed_in_prefill_and_a_waiting_request_is_answered_after(model):
    found: dict[str, Answered] = {}
    with serving(model[0], *OPTIONS, "--batch", 1) as server:

        def ask(name: str, messages) -> None:
            found[name] = server.chat(messages, max_tokens=5)

        first = threading.Thread(target=ask, args=("first", LONG))
        first.start()
        time.sleep(0.5)
        second = threading.Thread(target=ask, args=("second", QUESTION))
        second.start()
        server.wait_until(lambda: server.metric("requests_waiting") == 1, 20)
        os.kill(server.ranks()[1], signal.SIGKILL)
        first.join(60)
        second.join(120)
        assert (found["first"].status, found["first"].error["code"]) == (500, "ranks_failed")
        assert found["second"].status == 200
        assert_answers(server, model)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped(server, model, rank):
    with server.stream(QUESTION, max_tokens=1500) as events:
        for _ in range(4):
            next(events)
        os.kill(server.ranks()[rank], signal.SIGSTOP)
        start_s = time.monotonic()
        *_, last = events
    assert time.monotonic() - start_s < 3 * (RANK_TIMEOUT_S + 2)
    assert last["error"]["code"] == "ranks_failed"
    assert_answers(server, model)


def test_an_idle_server_answers_after_three_deadlines(server, model):
    time.sleep(3 * RANK_TIMEOUT_S)
    assert_answers(server, model)
    assert server.metric("restarts_total") == 0


def test_the_fourth_loss_in_a_minute_ends_the_server_with_the_reason(model):
    server = Server(model[0], *OPTIONS)
    try:
        server.wait_until_listening()
        seen: set[int] = set()
        for number in range(4):
            while len(ranks := server.ranks()) < 2 or seen & {*ranks}:
                assert server.process.poll() is None
                time.sleep(0.05)
            seen |= {*ranks}
            os.kill(ranks[number % 2], signal.SIGKILL)
            while any(map(is_alive, ranks)) and server.process.poll() is None:
                time.sleep(0.05)
        assert server.process.wait(30) == 1
        time.sleep(0.2)  # for the thread that reads its last words
        server.wait_for_log("Error: the server gave up")
        # A slow machine may need more than a minute for four starts.
        assert re.search("lost (4 times within 60 s|in 4 starts in a row).* was killed by SIGKILL", server.all_log)
        assert "Traceback" not in server.all_log
    finally:
        server.close()


def test_sigterm_lets_a_stream_finish_and_leaves_nothing_behind(server):
    ranks = server.ranks()
    with server.stream(QUESTION, max_tokens=60) as events:
        for _ in range(4):
            next(events)
        server.process.send_signal(signal.SIGTERM)
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(40) == 0
    assert not any(map(is_alive, ranks))


def test_a_parent_that_is_killed_takes_its_ranks_along(server):
    ranks = server.ranks()
    assert len(ranks) == 2
    server.process.kill()
    deadline = time.monotonic() + 15
    while any(map(is_alive, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""A served model says what one process says, turn after turn, and computes only what is new."""

import random
import socket
import threading
import time

import pytest

from support.serving import Server, serving
from support.tiny_model import greedy, make_gemma, make_model, tokens_of_text, words

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(240)]

CHUNK = 32
DOCUMENT = " ".join(f"w{(7 * i) % 190}" for i in range(100))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return folder, make_model(folder)


@pytest.fixture(scope="module")
def server(model):
    with serving(model[0], "--ranks", 2, "--no-verify", "--prefill-chunk", CHUNK, "--queue", 2, "--batch", 8) as server:
        yield server


def tokens_of(messages: list[dict[str, str]]) -> list[int]:
    """By hand, as the template and the tokenizer of the tiny model have it."""
    roles = {"system": 1, "user": 2, "assistant": 3}
    tokens = []
    for message in messages:
        tokens += [roles[message["role"]], *tokens_of_text(message["content"])]
    return [*tokens, roles["assistant"]]


def expected(model, messages, count: int) -> str:
    return words(greedy(model[1], tokens_of(messages), count))


def ask(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def three_turns(server: Server, model) -> None:
    messages, held = ask(DOCUMENT), 0
    for question in ("w1 w2 w3", "w50", ""):
        answered = server.chat(messages, max_tokens=9)
        assert answered.status == 200, answered
        assert answered.text == expected(model, messages, 9)
        assert answered.cached == held
        held = len(tokens_of(messages)) + 8  # the last token was told, but nothing computed behind it
        messages = [*messages, {"role": "assistant", "content": answered.text}, *ask(question)]


def test_three_turns_are_those_of_one_process_and_reuse_all_that_was_computed(server, model):
    three_turns(server, model)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_three_turns_on_other_numbers_of_ranks(model, num_ranks):
    with serving(model[0], "--ranks", num_ranks, "--prefill-chunk", CHUNK) as server:
        three_turns(server, model)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_three_turns_of_a_model_with_sliding_windows(tmp_path, num_ranks):
    folder = tmp_path / "gemma"
    model = folder, make_gemma(folder)
    with serving(folder, "--ranks", num_ranks, "--prefill-chunk", CHUNK) as server:
        three_turns(server, model)


def test_eight_conversations_at_once_are_those_of_each_alone(server, model):
    conversations = [ask(f"w{number} w{3 * number} {DOCUMENT if number % 3 == 0 else ''}") for number in range(8)]
    found: dict[int, list[str]] = {number: [] for number in range(8)}

    def converse(number: int) -> None:
        messages = conversations[number]
        for _ in range(2):
            found[number].append(server.chat(messages, max_tokens=12 + number).text)
            messages = [*messages, {"role": "assistant", "content": found[number][-1]}, *ask("w7")]

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, messages in enumerate(conversations):
        for text in found[number]:
            assert text == expected(model, messages, 12 + number)
            messages = [*messages, {"role": "assistant", "content": text}, *ask("w7")]


def test_a_long_prompt_does_not_stop_an_answer_under_way(server):
    long = ask(" ".join(f"w{(11 * i) % 190}" for i in range(1400)))  # 44 chunks
    with server.stream(ask("w33"), max_tokens=1500) as events:
        for _ in range(3):
            next(events)
        found = []
        thread = threading.Thread(target=lambda: found.append(server.chat(long, max_tokens=1)))
        thread.start()
        server.wait_until(lambda: server.metric("requests_running") == 2, 20)
        count = 0
        for _ in events:
            count += 1
            if found:
                break
        thread.join()
    assert found[0].status == 200
    assert count >= 30  # about one token for each chunk


def test_the_header_and_the_log_say_what_was_reused_and_by_which_algorithm(server):
    messages = ask("w180 " + DOCUMENT)
    server.chat(messages, max_tokens=1)
    answered = server.chat(messages, max_tokens=1)
    assert answered.headers["x-ringspan-cache"] == "102 of 103 tokens reused"
    assert answered.headers["x-ringspan-algorithm"].split(":")[0] == "one_shot"
    server.wait_for_log(f"{answered.cached} reused")


def test_no_prompt_and_no_answer_is_in_the_log(server):
    answered = server.chat(ask("w11 w22 w33 w44"), max_tokens=4)
    assert "w11" not in server.all_log
    assert answered.text not in server.all_log


def test_a_stream_has_the_same_text_and_usage(server, model):
    messages = ask("w9 w8 w7")
    whole = server.chat(messages, max_tokens=6)
    with server.stream(messages, max_tokens=6, stream_options={"include_usage": True}) as events:
        *chunks, usage = events
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "length"]
    assert usage["usage"]["completion_tokens"] == 6
    assert whole.text == expected(model, messages, 6)


def test_a_plain_completion_continues_the_text(server, model):
    answered = server.complete("w1 w2 w3", max_tokens=5)
    assert answered.text == " " + words(greedy(model[1], [5, 6, 7], 5))


def test_a_stop_string_ends_the_text_before_it(server, model):
    messages = ask("w100 w101")
    whole = expected(model, messages, 8).split()
    answered = server.chat(messages, max_tokens=8, stop=[f" {whole[3]}"])
    assert answered.text == " ".join(whole[: whole.index(whole[3])])
    assert answered.body["choices"][0]["finish_reason"] == "stop"
    assert server.chat(messages, max_tokens=8).text == " ".join(whole)


def test_logprobs_are_those_of_the_model(server, model):
    import torch

    messages = ask("w30 w31")
    answered = server.chat(messages, max_tokens=1, logprobs=True, top_logprobs=3)
    (entry,) = answered.body["choices"][0]["logprobs"]["content"]
    with torch.no_grad():
        logits = model[1](torch.tensor([tokens_of(messages)])).logits[0, -1].double()
    best = torch.log_softmax(logits, -1).topk(3)
    assert [top["token"] for top in entry["top_logprobs"]] == [f" {words([token])}" for token in best.indices.tolist()]
    got = [top["logprob"] for top in entry["top_logprobs"]]
    assert got == pytest.approx(best.values.tolist(), abs=1e-4)
    assert entry["token"] == entry["top_logprobs"][0]["token"]


def test_a_seed_gives_the_same_answer_and_another_seed_another(server):
    def answer(seed: int) -> str:
        return server.chat(ask("w5"), max_tokens=12, temperature=1.5, seed=seed).text

    assert answer(1) == answer(1)
    assert answer(1) != answer(2)


def test_tools_go_into_the_template(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    plain = server.chat(ask("w5"), max_tokens=1).body["usage"]["prompt_tokens"]
    assert server.chat(ask("w5"), max_tokens=1, tools=tools).body["usage"]["prompt_tokens"] == plain + 2


def test_a_client_that_leaves_stops_its_answer_and_the_next_is_right(server, model):
    messages = ask("w60 w61 w62")
    before = server.metric("generated_tokens_total")
    with server.stream(messages, max_tokens=1500) as events:
        for _ in range(4):
            next(events)
    server.wait_until(lambda: server.metric("requests_total", '{finish="cancelled"}') > 0, 20)
    assert server.metric("generated_tokens_total") - before < 1000
    assert server.chat(messages, max_tokens=9).text == expected(model, messages, 9)


@pytest.mark.slow
def test_a_hundred_cancels_at_any_time_leave_answers_and_memory_as_they_are(server, model):
    rng = random.Random(0)
    messages = ask(DOCUMENT)
    wanted = expected(model, messages, 6)
    sizes = []
    for number in range(100):
        prompt = ask(f"w{number % 10} {DOCUMENT} {DOCUMENT}")
        with server.stream(prompt, max_tokens=60) as events:
            for _ in range(rng.randrange(4)):
                next(events)
        with socket.create_connection(("127.0.0.1", server.port)) as half:  # leaves before there is an answer
            half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
            time.sleep(rng.random() / 20)
        if number % 10 == 9:
            assert server.chat(messages, max_tokens=6).text == wanted
            sizes.append(server.metric("cache_bytes"))
    # A prompt comes back to its own slot; that of an answer that went on for longer may be up to a tenth larger.
    assert max(sizes) < 1.2 * sizes[0]
    assert server.metric("requests_total", '{finish="cancelled"}') > 50
    assert server.metric("restarts_total") == 0


@pytest.mark.slow
def test_more_requests_than_the_queue_holds_get_429_and_the_others_their_answers(server, model):
    messages = ask("w77")
    wanted = expected(model, messages, 60)
    found: list[tuple[int, str]] = []

    def one() -> None:
        answered = server.chat(messages, max_tokens=60)
        found.append((answered.status, answered.text if answered.status == 200 else answered.error["code"]))

    threads = [threading.Thread(target=one) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {*found} == {(200, wanted), (429, "rate_limit_exceeded")}
    assert [status for status, _ in found].count(200) >= 10  # eight under way, two in the queue


@pytest.mark.slow
def test_two_hundred_random_conversations_keep_to_the_budget_and_are_answered_right(model):
    budget = 2 * 2 * (16 + 16) * 4 * 1200  # layers, KV heads, k and v, float32: one rank holds 1,200 tokens
    rng = random.Random(0)
    conversations: list[list[dict[str, str]]] = []
    with serving(model[0], "--ranks", 2, "--no-verify", "--cache-bytes", budget) as server:
        for _ in range(200):
            question = ask(" ".join(f"w{rng.randrange(190)}" for _ in range(rng.randint(1, 150))))
            old = rng.choice(conversations[-8:]) if conversations and rng.random() < 0.5 else []
            messages = [*old, *question]
            answered = server.chat(messages, max_tokens=3)
            assert answered.text == expected(model, messages, 3)
            assert 0 < server.metric("cache_bytes") <= budget
            conversations.append([*messages, {"role": "assistant", "content": answered.text}])
        assert server.metric("evictions_total") > 50
        assert server.metric("cached_tokens_total") > 1000
        refused = server.chat(ask(f"{DOCUMENT} " * 18), max_tokens=4)
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")

"""Conversations that were saved by one server are continued by another, on another number of ranks."""

import pytest

from support.serving import serving
from support.tiny_model import greedy, make_model, tokens_of_text, words

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(500)]

LONG = " ".join(f"w{(7 * i) % 190}" for i in range(90))
BYTES_PER_TOKEN = 2 * 2 * (16 + 16) * 4  # layers, KV heads, k and v, float32


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny"
    return folder, make_model(folder)


def expected(model, prompt: str, count: int) -> str:
    return " " + words(greedy(model[1], tokens_of_text(prompt), count))


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_saved_on_two_ranks_and_continued_on_three(model, tmp_path, storage):
    budget = BYTES_PER_TOKEN * 700 // (4 if storage == "int8" else 1)
    options = ["--no-verify", "--cache-bytes", budget, "--save-dir", tmp_path / "saved"]
    stored = [] if storage == "float32" else ["--storage", storage]  # float32 is that of the model, said or not
    prompts = [f"w{number} {LONG}" for number in range(4)]
    answers = {}
    with serving(model[0], "--ranks", 2, *options, "--storage", storage) as server:
        for prompt in prompts:
            answers[prompt] = server.complete(prompt, max_tokens=4).text
            if storage == "float32":
                assert answers[prompt] == expected(model, prompt, 4)
        server.wait_until(lambda: server.metric("evictions_total") > 0, 20)
        assert server.metric("saves_total") > 0
        again = server.complete(f"{prompts[0]}{answers[prompts[0]]} w5", max_tokens=4)
        assert again.cached == 94  # loaded from disk: all but the last token, which was said and never computed
        assert server.metric("loads_total") == 1
        assert server.stop(90) == 0
        server.wait_for_log("ended")
    assert len([*(tmp_path / "saved").glob("conversation-*/tokens.json")]) == 4
    with serving(model[0], "--ranks", 3, *options, *stored) as server:
        server.wait_for_log("4 saved conversations")
        for prompt in prompts[1:]:
            continued = f"{prompt}{answers[prompt]} w9 w8"
            answered = server.complete(continued, max_tokens=4)
            assert answered.cached == 94
            if storage == "float32":
                assert answered.text == expected(model, continued, 4)


def test_damaged_and_foreign_conversations_are_computed_anew(model, tmp_path):
    saved = tmp_path / "saved"
    options = ("--ranks", 2, "--no-verify", "--save-dir", saved)
    with serving(model[0], *options) as server:
        server.complete(LONG, max_tokens=2)
        assert server.stop(90) == 0
    (data,) = saved.glob("conversation-*/data-*/rank-1.safetensors")
    raw = bytearray(data.read_bytes())
    raw[-5] ^= 1
    data.write_bytes(raw)
    with serving(model[0], *options) as server:
        answered = server.complete(f"{LONG} w3", max_tokens=3)
        assert answered.text == expected(model, f"{LONG} w3", 3)
        assert answered.cached == 0
        server.wait_for_log("could not be loaded")
        assert server.stop(90) == 0
    other = tmp_path / "other"
    make_model(other, seed=1)
    with serving(other, *options) as server:
        server.wait_for_log("0 saved conversations")
        assert server.complete(f"{LONG} w3", max_tokens=3).cached == 0

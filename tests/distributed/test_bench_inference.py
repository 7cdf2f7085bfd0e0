"""`ringspan bench prefill` and `decode`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from ringspan import run_in_process
from ringspan.bench import inference
from ringspan.bench.result import MISS_RATES, PARTS, WAYS
from ringspan.bench.settings import InferenceSettings, Job
from ringspan.cache import Turn
from ringspan.cli import main
from ringspan.cli.bench.inference import show_inference

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SMALL = [
    "--transport",
    "threads",
    "--ranks",
    "2",
    "--tokens",
    "256",
    "--heads",
    "2",
    "--repeats",
    "1",
    "--head-dim",
    "8",
]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", "from ringspan.cli import main; main()", "bench", *words]
    environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def test_prefill_over_miss_rates(tmp_path: Path) -> None:
    plot = tmp_path / "prefill.svg"
    result = run("prefill", *SMALL, "--json", "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["is_verified"]
    assert [point["miss_percent"] for point in report["prefill"]] == list(MISS_RATES)
    for point in report["prefill"]:
        assert point["new_tokens"] + point["cached_tokens"] == 256
        assert set(point["times"]) == set(WAYS)
        assert point["reason"].startswith(point["picked"])
        assert 0 <= point["error"] < 2e-5
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_numbers_that_are_none_are_wrong(
    phase: Literal["prefill", "decode"],
    spoilt: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    attend = getattr(Turn, phase)
    monkeypatch.setattr(Turn, phase, lambda *args, **options: attend(*args, **options) * spoilt)
    settings = InferenceSettings(phase, 128, 2, 2, 1, 8, "float32", "auto", 1, 0)
    job = Job("inference", "threads", 2, 60.0, inference=settings)
    cpu = torch.device("cpu")
    result, _ = run_in_process(lambda group: inference.measure_inference(job, group, cpu, lambda _: None), 2)
    show_inference(result, None, True, None)
    report = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["is_verified"] is False
    assert report[phase][0]["error"] is None
    show_inference(result, None, False, Console(width=120))
    assert "largest difference not finite, WRONG" in capsys.readouterr().out


def test_decode_over_contexts(tmp_path: Path) -> None:
    plot = tmp_path / "decode.svg"
    result = run("decode", *SMALL, "--batch", "3", "--kv-heads", "1", "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    for words in ("attention, ms", "send/recv, ms", "all-to-all, ms", "one shot, ms", "verified"):
        assert words in result.stdout
    texts = ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")
    assert sum((it.text or "").startswith("Time per token") for it in texts) == 2
    report = json.loads(run("decode", *SMALL, "--json").stdout)
    assert {tuple(point["times"]) for point in report["decode"]} == {PARTS}


def test_decode_over_the_shortest_contexts() -> None:
    """A context of one token, which one rank has."""
    result = run("decode", *SMALL, "--ranks", "3", "--tokens", "16", "--batch", "2", "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["is_verified"]
    assert [(point["batch"], point["context"]) for point in report["decode"]] == [
        (batch, context) for batch in (1, 2) for context in (1, 4, 16)
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["prefill", "--mask", "full"], "No such option"),
        (["decode", "--layout", "striped"], "No such option"),
        (["prefill", "--batch", "2"], "No such option"),
        (["decode", "--plot", "x.png"], "'x.png': this file is written as SVG; use x.svg"),
        (["prefill", "--plot", "/no/such/folder/x.svg"], "cannot be written"),
        (
            ["prefill", "--heads", "3", "--kv-heads", "2"],
            "--kv-heads 2: every KV head serves the same number",
        ),
        (["prefill", "--tokens", "127"], "--tokens 127: prefill measures miss rates from 1 %; use at least 128 tokens"),
        (
            ["decode", "--tokens", "15"],
            "down to a 16th of the longest; use at least 16 tokens",
        ),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.replace("│", " ").split())

"""`ringspan bench --prefill` and `--decode`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ringspan.bench.inference_result import MISS_RATES, PARTS, WAYS
from ringspan.cli import main

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
    result = run("--prefill", *SMALL, "--json", "--plot", str(plot))
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


def test_decode_over_contexts(tmp_path: Path) -> None:
    plot = tmp_path / "decode.svg"
    result = run("--decode", *SMALL, "--batch", "3", "--kv-heads", "1", "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    for words in ("attention, ms", "send/recv, ms", "all-to-all, ms", "one shot, ms", "verified"):
        assert words in result.stdout
    assert plot.read_text().count("Time per token") == 2
    report = json.loads(run("--decode", *SMALL, "--json").stdout)
    assert {tuple(point["times"]) for point in report["decode"]} == {PARTS}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--prefill", "--mask", "full"], "--mask has no meaning for --prefill"),
        (["--decode", "--layout", "striped"], "--layout has no meaning for --decode"),
        (["--prefill", "--batch", "2"], "--batch has no meaning for --prefill; leave it out"),
        (["--plot", "x.svg"], "it goes with --prefill or --decode"),
        (["--prefill", "--plot", "/no/such/folder/x.svg"], "cannot be written"),
        (["--prefill", "--heads", "3", "--kv-heads", "2"], "use --kv-heads 1 or 3"),
        (["--decode", "--tokens", "9"], "--tokens 9: 1 % of them must be something; use 128 or more"),
    ],
)
def test_what_is_refused(words: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["bench", *words], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.replace("│", " ").split())

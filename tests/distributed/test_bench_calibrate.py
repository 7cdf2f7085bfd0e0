"""`ringspan bench calibrate`: a device file of this machine, which the planner and `bench attention` read."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_bench_cli import invoke, run

from ringspan.cli import main
from ringspan.planner.catalog import load_device

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SMALL = ["--ranks", "2", "--tokens", "1K", "--batch", "1", "--head-dim", "16"]


def test_a_machine_is_calibrated_planned_for_and_predicted(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    done = run(str(path), *SMALL, "--json", command="calibrate")
    assert (done.returncode, done.stderr) == (0, f"Wrote {path}\n")
    device = load_device(str(path))
    assert device.attention.flops_per_s > 1e7
    assert device.near.bytes_per_s > 1e6
    found = json.loads(done.stdout)
    assert found["attention"]["flops_per_s"] == pytest.approx(device.attention.flops_per_s, rel=1e-5)
    small = "dense:layers=2,heads=8,head_dim=64,mlp=1024"
    words = ["plan", "--model", small, "--devices", f"2x{path}", "--tokens", "1K", "--tp", "1"]
    planned = CliRunner().invoke(main, words)
    assert planned.exit_code == 0, planned.output
    measured = run("--predict", str(path), *SMALL, "--repeats", "2", "--json")
    assert measured.returncode == 0, measured.stderr
    result = json.loads(measured.stdout)
    assert 0 < result["predicted_s"] < 100 * result["ranks"]["median_s"]


def test_people_read_what_was_reached_and_what_to_do_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    done = run(str(path), *SMALL, "--tokens", "512", "--transport", "threads", command="calibrate")
    assert done.returncode == 0, done.stderr
    for words in ("GFLOP/s", "GB/s after", f"--devices 2x{path}", f"ringspan bench attention --predict {path}"):
        assert words in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "'mine': this file is written as TOML; use mine.toml"),
        (["/no/such/place/mine.toml"], "cannot be written: the folder /no/such/place does not exist"),
        ([], "Missing argument 'FILE'"),
    ],
)
def test_files_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    result = invoke(*words, command="calibrate")
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_it_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    result = invoke(str(tmp_path / "mine.toml"), command="calibrate")
    assert result.exit_code == 2
    assert "calibrate starts its own ranks; run it without torchrun" in result.output

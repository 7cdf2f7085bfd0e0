"""`ringspan bench --calibrate`: a device file of this machine, which the planner reads and bench predicts from."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_bench_cli import invoke, run

from ringspan.cli import main
from ringspan.planner.catalog import load_device

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SMALL = ["--ranks", "2", "--tokens", "1K", "--batch", "1", "--head-dim", "16", "--repeats", "2"]


def test_a_machine_is_calibrated_planned_for_and_predicted(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    done = run("--calibrate", str(path), *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert "loaded torch" not in done.stderr
    result = json.loads(done.stdout)
    assert 0 < result["predicted_s"] < 100 * result["ranks"]["median_s"]
    device = load_device(str(path))
    assert device.attention.flops_per_s > 1e7
    assert device.near.bytes_per_s > 1e6
    words = ["plan", "--model", "llama-3.1-8b", "--devices", f"2x{path}", "--tokens", "1K", "--tp", "1"]
    planned = CliRunner().invoke(main, words)
    assert planned.exit_code == 0, planned.output
    again = run("--predict", str(path), *SMALL)
    assert again.returncode == 0, again.stderr
    assert "2 ranks, predicted (" in again.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibrate", "mine"], "knows devices by .toml"),
        (["--calibrate", "/no/such/place/mine.toml"], "cannot be written"),
        (["--predict", "none.toml"], "does not exist"),
        (["--calibrate", "a.toml", "--predict", "pyproject.toml"], "give one of them"),
        (["--predict", "README.md"], "--predict README.md: --calibrate writes a .toml file; give that one"),
        (["--calibrate", "a.toml", "--backward"], "forward pass only"),
        (["--calibrate", "a.toml", "--reproducible"], "know the usual mode only; leave out --reproducible"),
        (["--predict", "pyproject.toml", "--reproducible"], "know the usual mode only; leave out --reproducible"),
    ],
)
def test_files_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_file_that_is_no_device_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "other.toml"
    path.write_text("a = 1\n")
    result = invoke("--predict", str(path), *SMALL)
    assert result.exit_code == 2
    assert f"--predict: {path} is no calibrated device" in result.output

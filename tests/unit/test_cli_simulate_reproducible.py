"""`ringspan simulate --reproducible`: what it says about bits is true, and it says so when they differ."""

import json
import math
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ringspan.cli import main
from ringspan.simulate import Simulation, simulate_attention
from ringspan.simulate.lesson import prefill

SMALL = ("--heads", "2", "--kv-heads", "2", "--head-dim", "4")


def simulate(*args: str, width: int = 100) -> Result:
    """The lesson, or JSON if that is asked for."""
    report = () if "--json" in args else ("--lesson",)
    words = ["simulate", *report, *SMALL, *args]
    return CliRunner().invoke(main, words, env={"COLUMNS": str(width), "NO_COLOR": "1"})


def simulate_json(*args: str) -> dict[str, Any]:
    result = simulate(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_bits_are_those_of_one_device_for_any_number_and_algorithm(subtests: pytest.Subtests) -> None:
    digests = set()
    for args in (
        ("--devices", "1"),
        ("--devices", "2", "--algorithm", "ulysses", "--layout", "contiguous"),
        ("--devices", "3", "--algorithm", "pass-q", "--layout", "striped:512", "--direction", "reverse"),
        ("--devices", "4", "--algorithm", "double-ring", "--mesh", "2x2", "--algorithm", "all-gather"),
    ):
        with subtests.test(f"{args}"):
            data = simulate_json("--reproducible", "--tokens", "1100", *args)
            assert data["parameters"]["reproducible"] is True
            assert data["other_bits"] == []
            digests.add(data["prefill"]["one_device_digest"])
            for run in data["prefill"]["runs"]:
                assert run["bits"]["is_same"]
                digests.add(run["bits"]["digest"])
    assert len(digests) == 1
    assert (
        simulate_json("--reproducible", "--tokens", "1100", "--seed", "1")["prefill"]["one_device_digest"]
        not in digests
    )


def test_nodes_and_bytes() -> None:
    """Three nodes wait on one device before the eighth tile comes; default bytes are those that mode sends."""
    (alone, _) = simulate_json("--reproducible", "--devices", "1")["prefill"]["runs"]
    assert alone["bits"]["pending_nodes"] == 3
    on_the_grid = ("--tokens", "2048", "--devices", "4", "--layout", "contiguous", "--mask", "full")
    default, reproducible = (simulate_json(*on_the_grid, *mode) for mode in ((), ("--reproducible",)))
    assert [run["bits"] for run in default["prefill"]["runs"]] == [None, None]
    assert default["prefill"]["one_device_digest"] is None
    for theirs, mine in zip(default["prefill"]["runs"], reproducible["prefill"]["runs"], strict=True):
        assert mine["bits"]["sent_bytes_by_default"] == theirs["sent_bytes"] == mine["sent_bytes"]
    uneven = simulate_json("--reproducible", "--tokens", "3000", "--devices", "3", "--mask", "full")
    _, pass_q = uneven["prefill"]["runs"]
    assert pass_q["sent_bytes"] > pass_q["bits"]["sent_bytes_by_default"]
    for traffic in pass_q["traffic"]:
        assert traffic["largest_bytes"] == sum(map(math.prod, traffic["shapes"])) * traffic["bytes_per_element"]


def test_the_page_says_so_at_any_width() -> None:
    for width in (60, 100):
        result = simulate("--reproducible", width=width)
        assert (result.exit_code, result.stderr) == (0, "")
        assert max(map(len, result.stdout.splitlines())) <= width
        assert "✓ The bits of one device: pass-KV, pass-Q." in result.stdout
        words = " ".join(result.stdout.split())
        assert "4,096 tokens" in words
        assert "The same bits on any number of devices" in words
        assert "Decoding has no reproducible mode" in words
    assert result.stdout.count("✓ the same") == 2
    assert "bits" not in simulate().stdout


def test_other_bits_end_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """One number that is off by its last bit, where several devices computed it with pass-Q."""

    def nudged(*args: Any, **kwargs: Any) -> Simulation:
        simulation = simulate_attention(*args, **kwargs)
        if kwargs["layout"].world_size > 1 and kwargs["algorithm"] == "pass_q":
            simulation.out[0, 1000, 2] = np.nextafter(simulation.out[0, 1000, 2], np.float32(9))
        return simulation

    monkeypatch.setattr(prefill, "simulate_attention", nudged)
    result = simulate("--reproducible")
    assert result.exit_code == 1
    assert result.stdout.count("✓ the same") == result.stdout.count("✗ others") == 1
    assert "✓ All 10 results agree with dense attention." in result.stdout
    assert "✗ Not the bits of one device: pass-Q." in result.stdout
    data = json.loads(simulate("--reproducible", "--json").stdout)
    assert (data["is_verified"], data["failures"], data["other_bits"]) == (False, [], ["pass_q"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--layout striped", "--reproducible, --layout striped: a tile of 512 tokens must lie on one rank;"),
        ("--layout striped", "; use --layout striped:512 (see"),
        ("--layout striped:1400", "; use --layout striped:1536 (see"),
        ("--algorithm ulysses --devices 4", "over more ranks than the 2 KV heads"),
    ],
)
def test_what_has_no_fixed_bits_is_refused_in_one_line(args: str, message: str) -> None:
    result = simulate("--reproducible", *args.split(), "--heads", "4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr

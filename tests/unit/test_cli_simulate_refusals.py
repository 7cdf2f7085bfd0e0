"""What `ringspan simulate` refuses, and how it ends when something is wrong: never with a traceback."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ringspan.cli import main
from ringspan.cli.values import parse_mask
from ringspan.errors import MaskError, ShapeError
from ringspan.mask import causal
from ringspan.simulate import Simulation, simulate_attention
from ringspan.simulate.lesson import LayoutChoice, LessonSettings, decode, prefill

SIZE_FORMS = {"--heads": r"(\d+) heads", "--tokens": r"(\d+) tokens", "--head-dim": r"head_dim of (\d+)"}


def simulate(*args: str, **env: str) -> Result:
    """The lesson, or JSON if that is asked for."""
    report = () if "--json" in args else ("--lesson",)
    return CliRunner().invoke(main, ["simulate", *report, *args], env={"COLUMNS": "100", "NO_COLOR": None, **env})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--devices 0", "'--devices': 0 is not in the range 1<=x<=64"),
        ("--devices -3", "-3 is not in the range"),
        ("--devices 1000000", "1000000 is not in the range"),
        ("--tokens 0", "--tokens 0: expected a number of tokens of at least 1; use a number such as 4096"),
        ("--tokens 99999999999999999999", "expected a number of tokens"),
        ("--tokens 64K", "--tokens 64K: 65,536 tokens are too many here; use at most 8,192"),
        ("--tokens 8K", "--tokens 8192: with 8 heads the dense reference would compute 536,870,912 scores"),
        ("--tokens 8K", "more than 268,435,456; use 4 heads or 5792 tokens\n"),
        (
            "--tokens 1024 --heads 128 --head-dim 1024",
            "more than 16,777,216; use 16 heads, 128 tokens or a head_dim of 128\n",
        ),
        (
            "--heads 6 --kv-heads 4",
            "--kv-heads 4: every KV head serves the same number of query heads, and there are 6; use 1, 2, 3 or 6\n",
        ),
        ("--heads 7 --kv-heads 2", "use 1 or 7\n"),
        ("--heads 1 --kv-heads 2", "use 1\n"),
        ("--heads 99999999999999 --kv-heads 7", "is not in the range"),
        ("--head-dim 0", "'--head-dim': 0 is not in the range"),
        ("--head-dim 100000000000", "is not in the range"),
        ("--seed text", "'--seed': 'text' is not a whole number (see 'ringspan simulate --help')"),
        ("--seed", "Option '--seed' requires an argument (see 'ringspan simulate --help')"),
        ("--seed -1", "-1 is not in the range x>=0"),
        ("--mask nonsense", "--mask nonsense: there is no such mask; use full, causal, window:LEFT[:RIGHT], prefix:N"),
        ("--mask " + "&".join(["causal"] * 1200), ": 1,200 masks are joined here, and 100 is the limit"),
        ("--lesson --json", "--lesson and --json are two reports"),
        ("--mask causal&", "--mask '': there is no such mask"),
        ("--mask window:x", "--mask window:x: there is no such mask"),
        ("--mask prefix:-1", "n counts tokens"),
        (
            "--mask documents:10,20",
            "--mask: its documents have 30 tokens, but --tokens is 64; add a document of 34, or",
        ),
        ("--layout foo", "--layout foo: there is no such layout; use contiguous, zigzag, striped[:BLOCK] or balanced"),
        ("--layout zigzag:2", "--layout zigzag:2: there is no such layout"),
        ("--layout striped:0", "--layout striped:0: a block has at least 1 token; use striped:1"),
        (
            "--mesh 3x5",
            "--mesh 3x5: pass-kv and pass-q have no mesh; leave it out, or use --algorithm hybrid or double-ring",
        ),
        ("--mesh two", "--mesh two: expected a mesh; use OUTERxINNER"),
        (
            "--mesh 3x5 --algorithm hybrid",
            "--mesh 3x5: outer × inner must be the 4 ranks of the group; use one of 4x1, 2x2, 1x4",
        ),
        (
            "--algorithm double-ring",
            "--algorithm double-ring runs on ranks in two dimensions; add --mesh OUTERxINNER, such as --mesh 2x2",
        ),
        ("--algorithm ulysses --devices 3", "Ulysses over 3 ranks with 8 query heads and 2 KV heads"),
        ("--algorithm nope", "'nope' is not one of 'pass-kv', 'pass-q'"),
        (
            "--algorithm all-gather --direction reverse",
            "--direction reverse: all-gather has no direction; leave it out",
        ),
        ("--direction sideways", "'sideways' is not one of 'forward', 'reverse'"),
        ("--bogus", "(see 'ringspan simulate --help')"),
        ("surplus", "unexpected extra argument"),
    ],
)
def test_bad_input_gets_one_clear_line(args: str, message: str) -> None:
    result = simulate(*args.split())
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.parametrize(
    "sizes",
    [
        {"--tokens": 8192, "--heads": 8, "--kv-heads": 2, "--head-dim": 32},
        {"--tokens": 8192, "--heads": 1024, "--kv-heads": 1024, "--head-dim": 1},
        {"--tokens": 8192, "--heads": 9, "--kv-heads": 3, "--head-dim": 512},
        {"--tokens": 8000, "--heads": 1, "--kv-heads": 1, "--head-dim": 4096},
        {"--tokens": 512, "--heads": 1024, "--kv-heads": 1, "--head-dim": 33},
        {"--tokens": 8192, "--heads": 1024, "--kv-heads": 1, "--head-dim": 4096},
    ],
    ids=str,
)
def test_each_smaller_size_that_a_refusal_names_would_do(sizes: dict[str, int]) -> None:
    def check(sizes: dict[str, int]) -> None:
        LessonSettings(4, *sizes.values(), causal(), LayoutChoice("zigzag"), ("pass_kv",), None, None, seed=0)

    with pytest.raises(ShapeError) as refused:
        check(sizes)
    remedy = refused.value.remedy or ""
    ways = [(option, found[1]) for option, form in SIZE_FORMS.items() if (found := re.search(form, remedy))]
    assert ways
    for option, value in ways:
        check(sizes | {option: int(value)})
        with pytest.raises(ShapeError):
            check(sizes | {option: int(value) + (sizes["--kv-heads"] if option == "--heads" else 1)})


def test_unknown_command_gets_one_clear_line() -> None:
    result = CliRunner().invoke(main, ["simulat"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: No such command 'simulat'")
    assert result.stderr.count("\n") == 1


def test_parse_mask_lists_the_forms() -> None:
    with pytest.raises(MaskError, match="use full, causal, window") as error:
        parse_mask("causal | sliding:3")
    assert "'sliding:3'" in str(error.value)


def spoilt(spoil: Callable[[Any], Any]) -> Callable[..., Simulation]:
    def run(*args: Any, **kwargs: Any) -> Simulation:
        simulation = simulate_attention(*args, **kwargs)
        return dataclasses.replace(simulation, out=spoil(simulation.out))

    return run


def test_a_wrong_result_ends_in_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "simulate_attention", spoilt(lambda out: out + np.float32(1e-3)))
    result = simulate()
    assert result.exit_code == 1
    assert "✗ wrong: 1.0e-03" in result.stdout
    assert "✗ 2 of 10 results differ from dense attention: pass-KV, pass-Q." in result.stdout
    data = json.loads(simulate("--json").stdout)
    assert data["is_verified"] is False
    assert data["failures"] == ["pass_kv", "pass_q"]


def test_a_wrong_decode_step_ends_in_exit_code_1_and_json_has_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "simulate_attention", spoilt(lambda out: out * np.float32(np.nan)))
    result = simulate("--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["failures"][0] == "decode step 0 of the one sequence"
    assert len(data["failures"]) == 8
    assert data["decode"]["batch"]["steps"][0]["check"]["out_error"] is None
    assert "✗ wrong: not finite" in simulate().stdout


def test_interrupt_ends_quietly_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: LessonSettings) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LessonSettings, "__post_init__", interrupt)
    result = simulate()
    assert (result.exit_code, result.output) == (130, "")

"""Reports on terminals of any width: no word is broken, nothing is lost, and the short report is short."""

import functools
import io
import re

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from ringspan.cli import main
from ringspan.cli.page import fit_table, new_table

PLAN = ("plan", "--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "128K", "--explain")
REPORTS = [("simulate", "--lesson"), ("simulate",), PLAN]


@functools.cache
def run(words: tuple[str, ...], width: int) -> str:
    result = CliRunner().invoke(main, list(words), env={"COLUMNS": str(width), "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def letters(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-zÀ-ÿ]{2,}", text))


@pytest.mark.parametrize("width", [1, 40, 60, 80])
@pytest.mark.parametrize("words", REPORTS, ids=" ".join)
def test_a_narrow_terminal_breaks_no_word_and_loses_none(words: tuple[str, ...], width: int) -> None:
    narrow, wide = run(words, width), run(words, 300)
    assert letters(narrow) == letters(wide)


def table() -> Table:
    made = new_table("algorithm", ">time", "because of many reasons")
    made.add_row("all-gather", "12.5 ms", "everything is fetched first")
    made.add_row("pass-KV", "9 ms", "")
    return made


def printed(width: int) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=200)
    for item in fit_table(table(), width):
        console.print(item)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", range(33, 60))
def test_columns_of_words_are_wrapped_and_numbers_keep_their_units(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert re.search(r"^all-gather  12.5 ms  everything", "\n".join(lines), re.MULTILINE)
    assert (len(lines) == 4) == (width >= 48)


def test_a_table_that_is_too_wide_is_a_list() -> None:
    assert printed(30) == [
        "algorithm all-gather, time",
        "  12.5 ms, because of many",
        "  reasons everything is",
        "  fetched first",
        "algorithm pass-KV, time 9 ms",
    ]


def test_the_short_report_fits_into_40_lines() -> None:
    lines = run(("simulate",), 80).splitlines()
    assert len(lines) <= 40
    for part in (
        "  0000000011111111222222223333333333333333222222221111111100000000",
        "  1    │ q0×kv3 kv3→1 │ q1×kv0 kv0→2 │ q2×kv1 kv1→3 │ q3×kv2 kv2→0",
        "✓ All 10 results agree with dense attention.",
        "  learn    ringspan simulate --lesson",
    ):
        assert part in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("words", "best"),
    [
        ([], "zigzag"),
        pytest.param(["--reproducible"], "zigzag", marks=pytest.mark.wide),
        (
            ["--tokens", "2K", "--heads", "2", "--mask", "causal & documents:600,1448", "--layout", "balanced"],
            "balanced",
        ),
    ],
)
def test_the_examples_show_what_a_layout_is_for(words: list[str], best: str) -> None:
    text = " ".join(run(("simulate", *words), 100).split())
    times = {name: float(time) for name, time in re.findall(r"(contiguous|zigzag|balanced) (\d\.\d+)", text)}
    assert times[best] < 1.1
    assert times["contiguous"] > 1.5

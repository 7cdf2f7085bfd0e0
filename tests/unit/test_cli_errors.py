"""Errors on the command line: one line in the terms of the command, from the fields of the library's error."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ringspan.algorithms import Mesh
from ringspan.cli import main
from ringspan.cli.errors import Command, render_error
from ringspan.cli.files import OutputFile
from ringspan.errors import NOT_GIVEN, LayoutError, MaskError, RingspanError, ShapeError, UnsupportedError

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["simulate"],
    ["plan"],
    ["bench"],
    *(["bench", name] for name in ("attention", "model", "prefill", "decode", "selfcheck", "calibrate")),
]


@click.command(cls=Command)
@click.option("--kv-heads", type=int)
@click.option("--tokens")
@click.option("--algorithm")
@click.option("--fsdp", is_flag=True)
@click.option("--mesh")
@click.option("--size")
def command(**options: Any) -> None:
    raise ShapeError("the rule", argument="num_kv_heads", value=options["kv_heads"], remedy="use 8")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ShapeError("no", argument="num_kv_heads", value=3), "--kv-heads 3: no"),
        (ShapeError("no", argument="seq_len", value=0, remedy="use 1"), "--tokens 0: no; use 1"),
        (ShapeError("no", argument="seq_len", value=NOT_GIVEN, remedy="use 1"), "--tokens: no; use 1"),
        (UnsupportedError("no", argument="algorithm", value="pass_kv"), "--algorithm pass-kv: no"),
        (UnsupportedError("no", argument="shards_weights", value=True), "--fsdp: no"),
        (LayoutError("no", argument="mesh", value=Mesh(2, 4)), "--mesh 2x4: no"),
        (ShapeError("no", argument="height", value=721), "--size (height 721): no"),
        (MaskError("no", argument="mask", value="x"), "mask='x': no"),
        (RingspanError("no", remedy="yes"), "no; yes"),
    ],
)
def test_an_argument_is_named_by_the_option_that_sets_it(error: RingspanError, text: str) -> None:
    assert render_error(error, command) == text


def test_a_large_value_is_shortened() -> None:
    assert len(render_error(ShapeError("no", argument="seq_len", value=10**400), command)) < 100


def test_a_command_ends_with_one_line_and_exit_code_2() -> None:
    result = CliRunner().invoke(command, ["--kv-heads", "3"])
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: --kv-heads 3: the rule; use 8\n")


@pytest.mark.parametrize("words", [["a\nb"], ["--tokens", "1\n2"], ["--mask", "\x1b[31m"], ["--\r"]])
def test_an_error_about_odd_characters_is_one_line_that_can_be_printed(words: list[str]) -> None:
    result = CliRunner().invoke(main, ["simulate", *words])
    assert result.exit_code == 2
    assert result.stderr.endswith("\n")
    assert result.stderr[:-1].isprintable()


def test_nothing_in_the_library_names_an_option() -> None:
    package = ROOT / "src" / "ringspan"
    writes_command_lines = {
        *("planner/plan/settings.py", "bench/paths.py", "planner/plan/explain.py", "planner/accuracy.py"),
        "verify/pytest_plugin.py",  # an option of pytest
        "serve/torchrun.py",  # an option of torchrun
    }
    sources = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    library = {name: text for name, text in sources.items() if not name.startswith(("cli/", "page/"))}
    assert {name for name, text in library.items() if re.search(r"--[a-z]", text)} <= writes_command_lines


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_a_short_help_with_an_example(words: list[str]) -> None:
    short, long = (CliRunner().invoke(main, [*words, option]) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Example" in short.stdout
    assert f"  ringspan {' '.join(words)}" in short.stdout
    assert "-h, --help" in short.stdout


def test_bench_without_a_subcommand_shows_them() -> None:
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 0
    listed = result.stdout.split("Commands:")[1]
    assert [name for *_, name in COMMANDS[3:] if f"  {name} " not in listed] == []
    assert "..." not in listed.split("Examples:")[0]


def test_version() -> None:
    from ringspan import __version__

    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"ringspan, version {__version__}\n")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("ringspan be", "bench"),
        ("ringspan bench pre", "prefill"),
        ("ringspan bench attention --algorithm dou", "double-ring"),
    ],
)
def test_the_shell_completes_commands_options_and_choices(typed: str, completed: str) -> None:
    program = "from ringspan.cli import main; main(prog_name='ringspan')"
    words = typed.split()
    environment = {"_RINGSPAN_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"plain,{completed}" in done.stdout.splitlines(), done.stderr


# Files to write


def convert(path: Path | str, suffix: str | None = None) -> Path:
    converted: Path = OutputFile(suffix).convert(str(path), None, None)
    return converted


def test_a_destination_that_can_be_written_is_left_alone(tmp_path: Path) -> None:
    assert convert(tmp_path / "new.json") == tmp_path / "new.json"
    assert list(tmp_path.iterdir()) == []
    old = tmp_path / "old.svg"
    old.write_text("old")
    assert convert(old, ".svg") == old
    assert old.read_text() == "old"


@pytest.mark.parametrize(
    ("name", "suffix", "message"),
    [
        ("none/x.json", None, "does not exist; make it first"),
        ("x.png", ".svg", "this file is written as SVG; use x.svg"),
        ("x", ".toml", "this file is written as TOML; use x.toml"),
        ("x.SVG", ".svg", "this file is written as SVG; use x.svg"),
        ("", None, "a file needs a name"),
        (".", None, "is a directory"),
        ("x" * 300, None, "File name too long"),
        ("/proc/x.json", None, "cannot be written: No such file or directory"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused(
    name: str, suffix: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(click.BadParameter) as refused:
        convert(name, suffix)
    assert message in refused.value.message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("option", "name"), [("--plot", "x.svg"), ("--trace", "x.json")])
def test_a_file_that_was_written_is_named(option: str, name: str, tmp_path: Path) -> None:
    words = ["plan", "--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "16K", "--tp", "1", "--json"]
    result = CliRunner().invoke(main, [*words, option, str(tmp_path / name)])
    assert (result.exit_code, result.stderr) == (0, f"Wrote {tmp_path / name}\n")
    assert (tmp_path / name).stat().st_size > 0

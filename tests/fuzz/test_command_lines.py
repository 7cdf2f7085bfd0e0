"""Command lines put together at random: each ends with an exit code of ours, and a wrong one with a line that says why.

Options come from the commands themselves, so a new one is tried too. What starts processes or a server is cut off where
it would: everything before that, and what the environment says, is read as always.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st

from ringspan.bench.launch import RanksFailed
from ringspan.cli import main
from support.campaign import HOW_MANY, count

EXIT_CODES = {0, 1, 2, 3}
NOT_STARTED = "not started here"

JUNK = [
    *(
        "",
        " ",
        "-1",
        "0",
        "1",
        "3",
        "1.5",
        "-0",
        "1e9",
        "nan",
        "inf",
        "1e308",
        "99999999999999",
        "9" * 400,
        "0x10",
        "1_0",
    ),
    *(
        "abc",
        "ß",
        "🎉",
        "\ud800",
        "x" * 3000,
        "--",
        "-",
        ",",
        ":",
        "=",
        "a=b",
        "x=1=2",
        "1,2",
        "1,,2",
        ",1",
        "2x2",
        "0x0",
    ),
    *(
        "causal &",
        "& causal",
        "window:5",
        "documents:",
        "None",
        "True",
        "[]",
        "{}",
        "../..",
        "/",
        ".",
        "/dev/null",
        "~",
    ),
    *("%s", "{0}", "\n", "a\nb", "\t", "\x1b[31m", "${HOME}", "*"),
]
GOOD = {
    "tokens": ["1", "7", "64", "200", "1K"],
    "devices": ["1", "2", "3", "8xh100", "2x8xh100", "1xa100", "4xl20", "100000xh100", "FILE.toml", "2xFILE.toml"],
    "heads": ["1", "4", "8"],
    "kv_heads": ["1", "2", "8"],
    "head_dim": ["1", "8", "32"],
    "mask": [
        "full",
        "causal",
        "window:3",
        "window:2:2",
        "prefix:5",
        "documents:3,4",
        "frames:4:1",
        "causal & window:9",
    ],
    "layout": ["contiguous", "zigzag", "striped", "striped:2", "balanced"],
    "algorithm": ["pass-kv", "pass_q", "all-gather", "ulysses", "hybrid", "double-ring"],
    "mesh": ["1x1", "2x2", "1x3"],
    "model": ["llama-3.1-8b", "llama-3.1-405b", "wan2.1-14b", "dense:layers=2,heads=4", "FILE.json"],
    "size": ["720x1280", "16x16"],
    "link": ["pcie4-x16-p2p"],
    "network": ["infiniband-hdr"],
    "price": ["h100=2.5", "h100=0"],
    "target_ttft": ["10s", "800ms"],
    "sweep": ["tokens=4K,64K", "devices=8xh100,2x8xh100"],
    "ranks": ["1", "2", "1,2"],
    "target": ["nope", "nope:x", "os:nope", "os.path:sep", ":", "os:", ""],
    "trace": ["out.json", "missing/out.json", "FILE.json"],
    "html": ["out.html", "out.txt", "missing/out.html"],
    "output": ["out.html", "out"],
    "plot": ["out.svg"],
    "junit": ["out.xml"],
    "predict": ["FILE.toml", "FILE.json"],
    "timeout_s": ["600", "0.5"],
}
NUMBERS = ["0", "1", "-1", "1e308", "1e-308", "nan", "inf", '"x"', "[]", "true", "1e3", "9" * 30]
ENVIRONMENT = {
    "RANK": ["0", "1", "abc", "", "-1", "9" * 30],
    "WORLD_SIZE": ["1", "2", "abc", "", "0", "1.5"],
    "LOCAL_RANK": ["0", "x"],
    "MASTER_ADDR": ["127.0.0.1", ""],
    "MASTER_PORT": ["1", "x"],
    "OMPI_COMM_WORLD_RANK": ["0", "x"],
    "OMPI_COMM_WORLD_SIZE": ["2", "x"],
    "SLURM_PROCID": ["0", "1", "x"],
    "SLURM_STEP_NUM_TASKS": ["1", "2", "x"],
    "COLUMNS": ["1", "0", "-3", "abc", "80", "9" * 30],
    "LINES": ["1", "x"],
    "NO_COLOR": ["", "1"],
    "FORCE_COLOR": ["1"],
    "TERM": ["dumb", "x"],
    "RINGSPAN_SILENCE_S": ["soon", "5"],
}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(main))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    path = draw(st.sampled_from(sorted(COMMANDS)))
    is_wild = draw(st.booleans())  # else values are of the kind that the option takes
    options: list[str] = []
    arguments: list[str] = []
    for param in draw(st.lists(st.sampled_from(COMMANDS[path].params), max_size=6)):
        value = draw(st.sampled_from(values_of(param, is_wild)))
        if isinstance(param, click.Argument):
            arguments.append(value)
        elif getattr(param, "is_flag", False):
            options.append(draw(st.sampled_from([*param.opts, *param.secondary_opts])))
        else:
            spelled = draw(st.sampled_from(param.opts))
            ways = [[spelled, value], [f"{spelled}={value}"], *([[spelled]] if is_wild else [])]
            options += draw(st.sampled_from(ways))
    if path == ("plan",) and (not is_wild or draw(st.booleans())):
        options = ["--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "8K", *options]
    if path == ("simulate",):  # its own sizes are for looking at
        options = ["--tokens", "24", "--heads", "2", "--head-dim", "4", *options]
    extra = draw(st.sampled_from([[], *([text] for text in JUNK)])) if is_wild else []
    return [*path, *options, *arguments, *extra]


def values_of(param: click.Parameter, is_wild: bool) -> list[str]:
    """Values that the option may take, and then anything at all."""
    good = [*GOOD.get(param.name or "", ()), *map(str, getattr(param.type, "choices", ()))] or ["1", "2", "3"]
    return [*good, *JUNK] if is_wild else good


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str]:
    """A device file and a JSON file with numbers in it that may be anything."""
    fields = ["flops", "memory_bytes", "memory_bytes_per_s", "latency_s", "bytes_per_s", "hidden_size"]
    fields += ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"]
    given = draw(st.dictionaries(st.sampled_from(fields), st.sampled_from(NUMBERS), max_size=8))
    head = draw(st.sampled_from(["", '[device]\nid = "mine"\n', "[", 'id = "mine"\n', "\ufeff"]))
    toml = head + "".join(f"{name} = {number}\n" for name, number in given.items())
    body = ", ".join(f'"{name}": {number}' for name, number in given.items())
    opening = draw(st.sampled_from(['{"model_type": "llama", ', "{", "", "["]))
    return toml, opening + body + draw(st.sampled_from(["}", "", "]"]))


@contextmanager
def nothing_started() -> Iterator[None]:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RanksFailed(NOT_STARTED)

    with ExitStack() as stack:
        stack.enter_context(mock.patch("ringspan.cli.bench.options.run_job", refuse))
        stack.enter_context(mock.patch("ringspan.bench.rank.run_here", refuse))
        stack.enter_context(mock.patch("ringspan.bench.paths.check_paths", return_value=[]))
        stack.enter_context(mock.patch("click.launch", return_value=0))
        yield


def run(words: list[str], environment: dict[str, str], toml: str = "", config: str = "") -> None:
    """Run a command line in a folder of its own."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, nothing_started():
        os.chdir(folder)
        try:
            Path("FILE.toml").write_text(toml, encoding="utf-8", errors="replace")
            Path("FILE.json").write_text(config, encoding="utf-8", errors="replace")
            result = CliRunner().invoke(main, words, env=environment)
        finally:
            os.chdir(home)
            for path in Path(folder).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    told = f"ringspan {' '.join(map(repr, words))} with {environment}:\n{result.output[-2000:]}"
    assert result.exception is None or isinstance(result.exception, SystemExit), (told, result.exception)
    assert result.exit_code in EXIT_CODES, told
    assert "Traceback" not in result.output, told
    if result.exit_code == 2:
        before, found, reason = result.stderr.partition("Error: ")
        assert found, told
        assert reason.count("\n") == 1, told
        assert not before or "FORCE_COLOR" in environment, told  # a progress bar that was there for a moment
    if result.exit_code == 0 and "--json" in words and result.stdout.startswith("{"):
        json.loads(result.stdout, parse_constant=lambda text: (_ for _ in ()).throw(AssertionError(f"{told}: {text}")))
    count(f"command line, {words[0]}: {'ran' if result.exit_code in (0, 3) else 'refused'}")


@HOW_MANY
@given(
    command_lines(),
    st.dictionaries(st.sampled_from(sorted(ENVIRONMENT)), st.integers(0, 5), max_size=3),
    files(),
)
@example(["bench", "attention"], {"RANK": 2, "WORLD_SIZE": 1}, ("", ""))
@example(["simulate"], {"COLUMNS": 0}, ("", ""))
def test_any_command_line(words: list[str], environment: dict[str, int], texts: tuple[str, str]) -> None:
    values = {name: ENVIRONMENT[name][number % len(ENVIRONMENT[name])] for name, number in environment.items()}
    run(words, values, *texts)

"""Traces on the page: what is in them is shown, and what is broken, huge or hostile is refused or is data."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ringspan.cli import main
from ringspan.errors import ShapeError
from ringspan.page import build_trace_page, read_trace
from ringspan.page.traces import MOST_EVENTS, describe_trace
from support.page import HOSTILE, payload_of

SLICES = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
    {"ph": "X", "name": "q0×kv0", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 500.0, "args": {"step": 0}},
    {"ph": "X", "name": "wait for kv1 from 1", "pid": 0, "tid": 1, "ts": 1500.0, "dur": 250.0, "args": {}},
    {"ph": "X", "name": "send kv1 to 0", "pid": 1, "tid": 1, "ts": 1000.0, "dur": 0.0, "args": {"bytes": 64}},
    {"ph": "s", "id": 1, "pid": 1, "ts": 1000.0},
]
TRACE: dict[str, Any] = {"traceEvents": SLICES, "otherData": {"model": "tiny"}}


def test_slices_are_bars_in_seconds_from_the_beginning() -> None:
    chart = describe_trace(TRACE, "run")
    assert chart["lanes"] == ["rank 0", "rank 1"]
    assert chart["total_s"] == pytest.approx(0.00075)
    assert chart["bars"] == [
        [0, "compute", 0.0, 0.0005, "q0×kv0", "step 0"],
        [1, "start", 0.0, 0.0, "send kv1 to 0", "bytes 64"],
        [0, "wait", 0.0005, 0.00075, "wait for kv1 from 1", ""],
    ]


def arrow(kind: str, number: Any, pid: int, ts: Any) -> dict[str, Any]:
    return {"ph": kind, "name": "kv1", "cat": "hop", "id": number, "pid": pid, "ts": ts}


def test_an_arrow_is_a_message_on_the_lane_of_its_receiver() -> None:
    trace = {"traceEvents": [*SLICES, arrow("s", 7, 1, 1000.0), arrow("f", 7, 0, 1600.0)]}
    messages = [bar for bar in describe_trace(trace, "run")["bars"] if bar[1] == "message"]
    assert messages == [[0, "message", 0.0, 0.0006, "kv1", "from rank 1"]]


@pytest.mark.parametrize(
    "broken",
    [
        [arrow("f", 1, 0, 1600.0)],
        [arrow("s", 1, 1, 1000.0)],
        [arrow("s", 1, 1, 1700.0), arrow("f", 1, 0, 1600.0)],
        [arrow("s", 1, 1, 1000.0), arrow("f", 2, 0, 1600.0)],
        [arrow("s", 1, 9, 1000.0), arrow("f", 1, 0, 1600.0)],
        [arrow("s", 1, 1, "x"), arrow("f", 1, 0, None)],
        [arrow("s", [], 1, 1000.0), arrow("f", {}, 0, float("nan"))],
    ],
)
def test_a_broken_arrow_is_not_drawn(broken: list[dict[str, Any]]) -> None:
    bars = describe_trace({"traceEvents": [*SLICES, *broken]}, "run")["bars"]
    assert [bar for bar in bars if bar[1] == "message"] == []


def test_steps_are_compared_with_the_predicted_ones() -> None:
    slower = [event | {"dur": 2 * event["dur"]} if event["ph"] == "X" else event for event in SLICES]
    compared = payload_of(build_trace_page({"traceEvents": slower}, TRACE))["sections"][2]
    ((rank, step, measured, predicted, ratio),) = compared["rows"]
    assert (rank["text"], step["value"]) == ("rank 0", 0)
    assert (measured["value"], predicted["value"], ratio["value"]) == (0.001, 0.0005, 2.0)


def test_a_measured_run_carries_the_predicted_tiles() -> None:
    page = build_trace_page(TRACE, TRACE)
    payload = payload_of(page)
    measured, predicted = payload["sections"][0]["charts"]
    assert measured["overlay"] == [bar for bar in predicted["bars"] if bar[1] == "compute"]
    assert measured["total_s"] == predicted["total_s"]


def test_what_was_run_is_told_in_words() -> None:
    told = {"model": "tiny", "predicted": True, "measured": False}
    page = build_trace_page({"traceEvents": SLICES, "otherData": told})
    about = payload_of(page)["sections"][-1]
    assert about["rows"] == [["model", "tiny"], ["predicted", "yes"], ["measured", "no"]]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        3,
        "x",
        {},
        {"traceEvents": {}},
        {"traceEvents": []},
        {"traceEvents": [1, "x", None]},
        {"traceEvents": [{"ph": "X", "ts": "1", "dur": 1}]},
        {"traceEvents": [{"ph": "X", "ts": 1, "dur": -1}]},
        {"traceEvents": [{"ph": "X", "ts": float("nan"), "dur": 1}]},
        {"traceEvents": [{"ph": "X", "ts": True, "dur": 1}]},
        {"traceEvents": [{"ph": "X", "ts": 10**400, "dur": 1}]},
        {"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "pid": pid} for pid in range(2000)]},
        {"traceEvents": [{}] * (MOST_EVENTS + 1)},
    ],
)
def test_a_text_that_is_not_a_trace_or_is_too_long_is_refused(broken: Any) -> None:
    with pytest.raises(ShapeError):
        build_trace_page(broken)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_names_are_data(hostile: str) -> None:
    trace = {
        "traceEvents": [{"ph": "X", "name": hostile, "pid": hostile, "ts": 0, "dur": 1, "args": {hostile: hostile}}],
        "otherData": {hostile: [hostile]},
    }
    page = build_trace_page(trace)
    assert page.count("<script") == 2
    payload = payload_of(page)
    assert payload["sections"][0]["charts"][0]["bars"][0][4] == hostile


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", '{"traceEvents": 1}', "\ufeff{}"])
def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ShapeError, match="trace="):
        read_trace(file)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ShapeError, match="the file cannot be read"):
        read_trace(Path("\ud800"))


def test_the_name_of_a_file_may_be_bytes_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "\udcff.html"
    monkeypatch.setattr("sys.argv", ["ringspan", "page", "--output", str(output)])
    assert CliRunner().invoke(main, ["page", "--output", str(output)]).exit_code == 0
    assert "\\udcff.html" in output.read_text(encoding="utf-8")


def test_an_endless_file_is_refused() -> None:
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no /dev/zero on this system")
    with pytest.raises(ShapeError, match="more than 200,000,000 bytes"):
        read_trace(endless)


# The command line


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


def test_page_writes_the_lesson_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "lesson.html"
    result = run("page", "--output", file)
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(file) in result.stderr
    assert "Ring attention, step by step" in file.read_text(encoding="utf-8")


def test_page_shows_a_trace(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.json", tmp_path / "page.html"
    trace.write_text(json.dumps(TRACE))
    assert run("page", "--trace", trace, "--predicted", trace, "--output", file).exit_code == 0
    assert "predicted" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--trace", "no_such_file.json"), "no_such_file.json"),
        (("--predicted", "x.json"), "--predicted"),
        (("--output", "no/such/folder/page.html"), "folder"),
        (("--output", ""), "a file needs a name"),
    ],
)
def test_page_refuses_what_it_cannot_use(args: tuple[str, ...], words: str) -> None:
    result = run("page", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("sizes", ["--tokens 1 --devices 2", "--tokens 3 --devices 5", "--tokens 20 --devices 9"])
def test_simulate_writes_runs_of_ranks_without_tokens(sizes: str, tmp_path: Path) -> None:
    """Also decode steps in which some ranks have no query: nine ranks decode a batch of eight."""
    file = tmp_path / "run.html"
    result = run("simulate", *sizes.split(), "--html", file)
    assert result.exit_code == 0, result.stderr
    runs = payload_of(file.read_text(encoding="utf-8"))["sections"][0]["runs"]
    assert all(one["error"] < 1e-5 for one in runs)
    assert len(runs) == 4


def test_simulate_writes_its_runs(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    result = run("simulate", "--devices", "3", "--tokens", "17", "--html", file, "--json")
    assert result.exit_code == 0
    assert [one["algorithm"] for one in json.loads(result.stdout)["prefill"]["runs"]] == ["pass_kv", "pass_q"]
    payload = payload_of(file.read_text(encoding="utf-8"))
    names = [one["key"] for one in payload["sections"][0]["runs"]]
    assert names == ["pass-kv", "pass-q", "decode, one sequence", "decode, batch"]


def test_simulate_refuses_a_page_of_too_many_tokens(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    result = run("simulate", "--tokens", "512", "--html", file)
    assert result.exit_code == 2
    assert "256 tokens" in result.stderr
    assert not file.exists()


def test_plan_writes_its_page(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    result = run("plan", "--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "128K", "--html", file, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["options"]
    assert "Every way, ranked" in file.read_text(encoding="utf-8")


def test_a_hostile_config_injects_nothing(tmp_path: Path) -> None:
    config = tmp_path / "<img src=x onerror=alert(1)>.json"
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512}
    rest = {"intermediate_size": 1024, "vocab_size": 1000, "model_type": "llama", "_name_or_path": HOSTILE[0]}
    config.write_text(json.dumps(sizes | rest))
    file = tmp_path / "plan.html"
    result = run("plan", "--model", config, "--devices", "4xh100", "--tokens", "16K", "--html", file)
    assert result.exit_code == 0, result.stderr
    page = file.read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("<script") == 2

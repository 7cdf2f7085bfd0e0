"""`ringspan verify`: what it prints, writes and returns."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ringspan.cli import main
from support.page import payload_of

pytest.importorskip("torch")


def run(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(main, ["verify", *words])
    assert result.exit_code == exit_code, result.output
    return result.output if exit_code == 2 else result.stdout


def zeros(q, k, v):
    return q * 0


TARGET = f"{__name__}:zeros"


def test_this_library_passes_on_two_ranks():
    assert run("ringspan", "--ranks", "2").startswith("ringspan: right (27 right, ")


def test_a_wrong_attention_is_told_with_its_mistake_and_exit_code_1(tmp_path: Path):
    path = tmp_path / "report.xml"
    report = json.loads(run(TARGET, "--ranks", "2", "--json", "--junit", str(path), exit_code=1))
    assert report["target"] == TARGET
    assert not report["has_passed"]
    assert report["diagnosis"]["mistake"] == "output left at zero"
    suite = ElementTree.parse(path).getroot()
    assert int(suite.get("failures", 0)) == report["counts"]["wrong"]


def test_the_page_shows_every_case_and_the_mistake(tmp_path: Path):
    path = tmp_path / "report.html"
    report = json.loads(run(TARGET, "--ranks", "2", "--json", "--html", str(path), exit_code=1))
    text = path.read_text()
    for case in report["cases"]:
        assert json.dumps(case["case"], ensure_ascii=False) in text
    assert report["diagnosis"]["mistake"] in text
    assert "NOT right" in text


def test_the_page_of_a_right_target_has_no_empty_column(tmp_path: Path):
    path = tmp_path / "report.html"
    run("ringspan", "--ranks", "1", "--html", str(path))
    cases = payload_of(path.read_text(encoding="utf-8"))["sections"][-1]
    assert [column["label"] for column in cases["columns"]] == ["case", "status", "passed"]
    assert {len(row) for row in cases["rows"]} == {3}


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "target_of_this_folder.py").write_text("def zeros(q, k, v):\n    return q * 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert "output left at zero" in run("target_of_this_folder:zeros", "--ranks", "2", exit_code=1)


def test_layouts_and_features_are_passed_on():
    text = run(TARGET, "--ranks", "2", "--layout", "zigzag", "--feature", "full", "--feature", "float32", exit_code=1)
    assert "zigzag, full" in text
    assert "contiguous" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "TARGET nobody: "),
        (["torch:nothing"], "TARGET torch:nothing: the module has no nothing; "),
        (["ringspan", "--feature", "sinks"], "--feature sinks: this describes a function"),
        (["ringspan", "--layout", "zigzag"], "--layout zigzag: this describes a function"),
        (["ringspan", "--processes"], "--processes processes: this describes a function"),
        (["ringspan", "--ranks", "9"], "use numbers from 1 to 8"),
        (["ringspan", "--ranks", "two"], "use numbers from 1 to 8"),
        (["ringspan:magic"], "the verifier runs"),
        (["no_such_module:f"], "cannot be imported"),
        ([TARGET, "--feature", "magic"], "a feature is one of"),
        (["ringspan", "--junit", "no/such/folder/x.xml"], "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message):
    output = run(*words, exit_code=2)
    assert message in output
    assert len(output.strip().splitlines()) == 1


def test_help_has_examples():
    assert "ringspan verify ringspan" in run("--help")

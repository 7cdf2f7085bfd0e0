"""The documents show what really happens: every snippet is run as written and its output compared."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspan.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "learn.md", ROOT / "docs" / "plan.md"]
WITH_TORCH = [
    ROOT / "docs" / f"{name}.md"
    for name in ("inference", "reproducible", "reproducible_model", "transformers", "verify")
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OMITTED = "…"


def fences(document: Path) -> list[tuple[str, str]]:
    return FENCE.findall(document.read_text())


@pytest.mark.parametrize(
    "document",
    [*DOCUMENTS, *WITH_TORCH],
    ids=lambda path: path.name,
)
def test_python_snippets_print_what_is_shown(document):
    blocks = fences(document)
    namespace: dict[str, object] = {}
    num_checked = 0
    for (kind, source), (next_kind, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, document.name, "exec"), namespace)
        if next_kind == "text":
            assert printed.getvalue() == shown
        num_checked += 1
    assert num_checked > 0


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_print_what_is_shown(subtests, document):
    commands = [block for kind, block in fences(document) if kind == "console"]
    assert commands
    for block in commands:
        with subtests.test(block.splitlines()[0]):
            first, *shown = block.splitlines()
            words = first.removeprefix("$ ringspan ").split()
            result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(main, words)
            assert result.exit_code == 0, result.output
            assert_shown(shown, [line.rstrip() for line in result.output.splitlines()])


def assert_shown(shown: list[str], printed: list[str]) -> None:
    """Each shown line is printed, in order; a line "…" skips any number of lines, and "…" at an end what follows."""
    at = 0
    may_skip = False
    for line in shown:
        if line == OMITTED:
            may_skip = True
            continue
        is_same = (
            (lambda other, line=line: other.startswith(line.removesuffix(OMITTED)))
            if line.endswith(OMITTED)
            else line.__eq__
        )
        found = next((i for i in range(at, len(printed)) if is_same(printed[i])), None)
        assert found is not None, f"not printed after line {at}: {line!r}"
        assert may_skip or found == at, (
            f"line {found} comes directly after line {at - 1} in the document only: {line!r}"
        )
        at, may_skip = found + 1, False


def test_a_changed_line_is_noticed():
    with pytest.raises(AssertionError, match="not printed"):
        assert_shown([OMITTED, "b"], ["a", "c"])
    with pytest.raises(AssertionError, match="directly after"):
        assert_shown(["a", "c"], ["a", "b", "c"])
    assert_shown(["a", OMITTED, "c 1…"], ["a", "b", "c 12"])


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_links_of_the_documents_lead_somewhere(subtests):
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        with subtests.test(document.name):
            for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
                assert (document.parent / target).exists(), f"{document.name}: {target}"

"""Do the documents show what the library does? Snippets and commands are run as written, links are followed."""

import contextlib
import importlib
import io
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringspan.cli import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WITH_COMMANDS = [ROOT / "README.md", DOCS / "learn.md", DOCS / "plan.md", DOCS / "plan_questions.md"]
WITH_SNIPPETS = [
    DOCS / f"{name}.md"
    for name in ("index", "learn", "plan", "plan_questions", "inference", "reproducible", "transformers", "verify")
]
WITH_DIFFUSERS = pytest.param(
    DOCS / "video.md",
    marks=pytest.mark.skipif(find_spec("diffusers") is None, reason="needs diffusers: pip install '.[diffusers]'"),
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OMITTED = "…"


def fences(document: Path) -> list[tuple[str, str]]:
    return FENCE.findall(document.read_text())


@pytest.mark.parametrize("document", [*WITH_SNIPPETS, WITH_DIFFUSERS], ids=lambda path: path.name)
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


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_print_what_is_shown(subtests, document):
    commands = [block for kind, block in fences(document) if kind == "console" and block.startswith("$ ringspan ")]
    assert commands
    for block in commands:
        with subtests.test(block.splitlines()[0]):
            first, *shown = block.splitlines()
            words = first.removeprefix("$ ringspan ").split()
            result = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"}).invoke(main, words)
            assert result.exit_code == exit_code(shown), result.output
            assert_shown(shown, [line.rstrip() for line in result.output.splitlines()])


def exit_code(shown: list[str]) -> int:
    """A command that refuses its input exits with 2, a plan of what does not fit with 3."""
    return 2 if shown[0].startswith("Error: ") else 3 if any(line.startswith("✗") for line in shown) else 0


def assert_shown(shown: list[str], printed: list[str]) -> None:
    """Each shown line is printed, in order. A line "…" skips any lines; a trailing "…" skips the rest of a line."""
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
    for document in (*ROOT.glob("*.md"), *DOCS.rglob("*.md")):
        with subtests.test(str(document.relative_to(ROOT))):
            for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_that_documents_name_exist(subtests):
    for document in (ROOT / "CONTRIBUTING.md", DOCS / "architecture.md"):
        for file in sorted({*re.findall(r"`([\w/]+\.py)`", document.read_text())}):
            with subtests.test(f"{document.name}: {file}"):
                places = (ROOT, ROOT / "src" / "ringspan", ROOT / "src" / "ringspan" / "algorithms")
                assert any((place / file).exists() for place in places)


ROOMS = ("schedule", "verify", "compat", "adapters", "adapters.transformers", "adapters.diffusers", "reproducible")


@pytest.mark.parametrize("room", ["", *ROOMS])
def test_the_reference_has_every_public_name(subtests, room):
    pages = "\n".join(path.read_text() for path in (DOCS / "api").glob("*.md"))
    prefix = f"ringspan.{room}".rstrip(".")
    # `rs.schedule` also offers the builders of `rs.algorithms`.
    rooms = rf"algorithms\.|{re.escape(room)}\.(\w+\.)*" if room else r"(\w+\.)*"
    for name in sorted({*importlib.import_module(prefix).__all__} - {"__version__"}):
        is_error = name.endswith("Error")  # `::: ringspan.errors` shows them all
        with subtests.test(f"{prefix}.{name}"):
            assert is_error or re.search(rf"^::: ringspan\.({rooms})?{name}(\.|$)", pages, re.MULTILINE)

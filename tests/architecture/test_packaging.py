"""Does a source distribution contain what tests and README need, and do messages name only published packages?"""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SDIST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]


def folders_that_tests_open() -> set[str]:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    return {name for name in re.findall(r'(?:parents\[2\]|ROOT) / "([\w.]+)"', sources) if (ROOT / name).exists()}


def test_the_source_distribution_has_what_tests_open() -> None:
    assert {"docs", "examples", "pyproject.toml"} <= folders_that_tests_open()
    packed = {*(name.removeprefix("/") for name in SDIST), "pyproject.toml"}  # hatch always packs the latter
    assert folders_that_tests_open() - packed == set()


@pytest.mark.parametrize("name", ["src", "tests", "constraints", "README.md", "LICENSE", "Makefile"])
def test_the_source_distribution_has(name: str) -> None:
    assert f"/{name}" in SDIST
    assert (ROOT / name).exists()


def test_nothing_says_to_install_what_is_not_published() -> None:
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    assert [str(path) for path in texts if re.search(r"pip install '?ringspan", path.read_text())] == []

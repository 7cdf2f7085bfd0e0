"""Do the classes of the glossary in docs/architecture.md exist, each once?"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOSSARY = (ROOT / "docs" / "architecture.md").read_text().partition("## Glossary")[2]
ROWS = [line.split("|")[1:4] for line in GLOSSARY.splitlines() if line.startswith("| ")][2:]


@pytest.fixture(scope="module")
def class_names() -> Counter[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    return Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


@pytest.mark.parametrize("name", re.findall(r"`(\w+)`", "".join(row[1] for row in ROWS)))
def test_a_class_of_the_glossary_exists_once(name: str, class_names: Counter[str]) -> None:
    assert class_names[name] == 1


def test_each_word_has_one_entry() -> None:
    words = [word.strip() for row in ROWS for word in row[0].split(",")]
    assert len(words) > 15
    assert len(words) == len(set(words))

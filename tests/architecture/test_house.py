"""Do the rooms keep their rules: plain `__init__` files, class names used once, private modules, short files?"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ringspan"
MODULES = sorted(SOURCE.rglob("*.py"))
LAZY = {"__getattr__", "__dir__"}
MOST_LINES = 400


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", [path for path in MODULES if path.name == "__init__.py"], ids=name_of)
def test_an_init_file_exports_and_does_nothing_else(path: Path) -> None:
    body = parse(path).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    others = [node for node in body if not isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom)]
    kinds = {type(node) for node in others if not is_type_checking(node)}
    assert functions <= LAZY
    assert kinds <= {ast.Expr, ast.Assign, ast.AnnAssign}
    assert "__all__" in {target.id for node in others for target in targets(node)}


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def targets(node: ast.stmt) -> Iterator[ast.Name]:
    found = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    yield from (target for target in found if isinstance(target, ast.Name))


def test_a_class_name_is_used_once() -> None:
    names = Counter(node.name for path in MODULES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef))
    assert [name for name, number in names.items() if number > 1] == []


def test_a_private_module_is_imported_by_its_own_package_only() -> None:
    for path in MODULES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module and re.match(r"ringspan\..*\._", node.module):
                package, _, _ = node.module.rpartition("._")
                home = ROOT / "src" / package.replace(".", "/")
                assert home in path.parents, f"{name_of(path)} imports {node.module}"


def test_a_file_is_short() -> None:
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_modules_that_a_document_names_exist(document: str) -> None:
    for name in re.findall(r"`(\w+/[\w/]+\.py)`", (ROOT / document).read_text(encoding="utf-8")):
        assert (SOURCE / name).exists() or (ROOT / name).exists(), name

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


AGREED = {
    "cache/_saving.py": "in a call that the ranks agreed on",
    "cache/_turn.py": "in a call that the ranks agreed on",
    "runtime/calibrate.py": "in a call that the ranks agreed on",
    "runtime/contract.py": "the agreement itself",
    "training/_batches.py": "in a call that the ranks agreed on",
}


def test_ranks_agree_before_they_gather() -> None:
    """Elsewhere `RankCall.gather` agrees first: gloo kills a process that receives more bytes than it expects."""
    callers = {name_of(path) for path in MODULES if ".all_gather_bytes(" in path.read_text(encoding="utf-8")}
    assert {name for name in callers if not name.startswith(("bench/", "transports/"))} == set(AGREED)


def test_only_a_call_of_the_session_agrees_and_refuses() -> None:
    found = {
        name_of(path) for path in MODULES if re.search(r"contract\.(agree|refuse)\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"runtime/session.py"}


ERRORS = {"CacheError", "LayoutError", "MaskError", "ScheduleError", "ShapeError", "UnsupportedError"}
SUBJECT = re.compile(r"[\w.]+(\[[^\]]*\][\w.]*)*=\0")  # argument=value


def test_an_error_has_its_argument_and_value_as_fields() -> None:
    """A message that only says `argument=value: …` cannot be shown with the options of a command."""
    texts = {
        f"{name_of(path)}:{node.lineno}": text_of(node.args[0])
        for path in MODULES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args
    }
    assert len(texts) > 500
    assert {where: text for where, text in texts.items() if SUBJECT.fullmatch(text.partition(": ")[0])} == {}


def text_of(message: ast.expr) -> str:
    """The literal parts of a message, with a zero byte for each value."""
    parts = message.values if isinstance(message, ast.JoinedStr) else [message]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)

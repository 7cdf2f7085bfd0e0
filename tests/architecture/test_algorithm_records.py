"""What a room knows about an algorithm it reads from the record: no file outside `algorithms/` spells a name."""

import re
from pathlib import Path

from ringspan.algorithms import ALGORITHMS

SOURCE = Path(__file__).parents[2] / "src" / "ringspan"
ALLOWED = {
    "adapters/diffusers/compare.py": "the algorithm that a model is compared with",
    "adapters/diffusers/frame_cache.py": "default of a public argument",
    "adapters/transformers/handle.py": "docstring of a public argument",
    "cache/_kv_cache.py": "docstring of a public argument",
    "compat/ringmaster/config.py": "names of another library",
    "compat/ringmaster/runtime.py": "names of another library, and which of our algorithms each means",
    "compat/torch_context_parallel.py": "names of another library, and which of our algorithms each means",
    "page/cases.py": "the runs of the lesson",
    "planner/published/attention_rows.py": "what published tables call algorithms",
    "planner/published/model_rows.py": "what published tables call algorithms",
    "planner/software.py": "the algorithms that other software has",
    "runtime/api.py": "docstring of a public argument",
    "transports/groups.py": "names of mesh dimensions",
    "verify/targets/ringspan.py": "the algorithms that `ringspan verify ringspan` runs",
}


def test_names_of_algorithms_are_spelled_in_their_files_only() -> None:
    quoted = re.compile(rf"[\"'](?:{'|'.join(ALGORITHMS)})[\"']")
    found = {
        str(path.relative_to(SOURCE)): quoted.findall(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if SOURCE / "algorithms" not in path.parents
    }
    assert {path for path, names in found.items() if names} == set(ALLOWED)


def test_every_algorithm_has_its_file() -> None:
    for name, record in ALGORITHMS.items():
        assert f"{name.upper()} = Algorithm(" in (SOURCE / "algorithms" / f"{name}.py").read_text(encoding="utf-8")
        assert record.name == name

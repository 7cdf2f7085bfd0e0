"""Are the pictures in docs/images those that the scripts beside them draw?"""

import importlib
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["ring", "rooms", "steps", "way"])
def test_a_picture_is_drawn_by_its_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    script, svg = (importlib.import_module(module) for module in (f"draw_{name}", "svg"))
    for palette in svg.PALETTES:
        assert (DOCS / "images" / f"{name}-{palette.name}.svg").read_text() == script.draw(palette)
    for module in (f"draw_{name}", "svg"):
        del sys.modules[module]

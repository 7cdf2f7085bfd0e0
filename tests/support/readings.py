"""The table of docs/page.md: questions, the view of the lesson that answers each, and the answer read there."""

import re
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).parents[2] / "docs" / "page.md"
ROW = re.compile(r"^\| (?P<question>[^|]*\?) \| `(?P<view>#[^`]*)` \| (?P<answer>[^|]*) \|$", re.MULTILINE)


class Reading(NamedTuple):
    """One row."""

    question: str
    view: str
    answer: str


def list_readings() -> list[Reading]:
    """All rows, in their order."""
    rows = [Reading(**row.groupdict()) for row in ROW.finditer(DOCUMENT.read_text(encoding="utf-8"))]
    return [row._replace(view=row.view.replace("\\|", "|")) for row in rows]

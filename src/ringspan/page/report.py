"""What are the other pages made of? Sections of text, facts, tables, curves, bars and timelines, as plain data.

A command that has something to show puts such sections together and calls `build_report`; it needs to know nothing of
HTML. Every text may come from a hostile file: it is data to the page, never markup.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ringspan.page.html import assemble

Section = dict[str, Any]
Point = tuple[float, float] | tuple[float, float, float, float]
FOOT = "This file loads nothing from the network. All numbers were computed when it was written."


def build_report(title: str, lead: Sequence[str], sections: Iterable[Section], command: str = "") -> str:
    """One HTML file of some sections; `command` is what made it."""
    return assemble(
        {
            "title": title,
            "lead": list(lead),
            "command": command,
            "foot": FOOT,
            "sections": list(sections),
        }
    )


def text(key: str, title: str, paragraphs: Sequence[str], code: str = "") -> Section:
    """Sentences, and perhaps a block of fixed-width text."""
    return {"kind": "text", "id": key, "title": title, "paragraphs": list(paragraphs), "code": code}


def facts(key: str, title: str, rows: Iterable[tuple[str, object]]) -> Section:
    """Names and values."""
    return {"kind": "facts", "id": key, "title": title, "rows": [[name, str(value)] for name, value in rows]}


def table(key: str, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Section:
    """A table that sorts. A column whose name begins with > holds numbers.

    A cell is a text, or a pair of a text and the number it sorts by.
    """
    return {
        "kind": "table",
        "id": key,
        "title": title,
        "caption": caption,
        "columns": [{"label": name.removeprefix(">"), "numeric": name.startswith(">")} for name in columns],
        "rows": [[_cell(cell) for cell in row] for row in rows],
    }


def curves(key: str, title: str, charts: Iterable[Section], lead: Sequence[str] = ()) -> Section:
    """Line charts; see `chart`."""
    return {"kind": "curves", "id": key, "title": title, "lead": list(lead), "charts": list(charts)}


def chart(
    title: str,
    x: str,
    lines: Iterable[tuple[str, Sequence[Point]]],
    *,
    dots: Iterable[tuple[str, Sequence[Point]]] = (),
    mark: float | None = None,
    band: tuple[float, float] = (1.0, 1.0),
) -> Section:
    """Seconds against a count, both logarithmic.

    A point is (x, seconds) or (x, seconds, low, high). `band` is the uncertainty of points without their own, as
    factors of each value. `dots` are drawn as single points without a line, such as measurements beside a fitted curve.
    """
    return {
        "title": title,
        "x": x,
        "lines": _with_bands(lines, band),
        "dots": _with_bands(dots, (1.0, 1.0)),
        "mark": mark,
    }


def measured_point(x: float, median_s: float, fastest_s: float, slowest_s: float) -> Point:
    """A point whose band reaches from the fastest to the slowest run."""
    return x, median_s, fastest_s, slowest_s


def _with_bands(lines: Iterable[tuple[str, Sequence[Point]]], band: tuple[float, float]) -> list[Section]:
    return [
        {
            "name": name,
            "points": [[*point[:2], *(point[2:] or [point[1] * factor for factor in band])] for point in line],
        }
        for name, line in lines
    ]


def bars(
    key: str,
    title: str,
    parts: Sequence[str],
    rows: Iterable[tuple[str, Sequence[float]]],
    *,
    unit: Literal["bytes", "seconds"] = "bytes",
    limit: tuple[str, float] | None = None,
    lead: Sequence[str] = (),
) -> Section:
    """Stacked bars; `limit` is a labelled line across them."""
    return {
        "kind": "bars",
        "id": key,
        "title": title,
        "lead": list(lead),
        "unit": unit,
        "parts": list(parts),
        "rows": [{"label": label, "values": list(values)} for label, values in rows],
        "limit": limit and {"label": limit[0], "value": limit[1]},
    }


def gantt(key: str, title: str, charts: Iterable[Section], lead: Sequence[str] = ()) -> Section:
    """Timelines, as `gantt.describe_timeline` and `traces.describe_trace` make them."""
    return {"kind": "gantt", "id": key, "title": title, "lead": list(lead), "charts": list(charts)}


def _cell(cell: object) -> dict[str, object]:
    if isinstance(cell, tuple):
        shown, value = cell
        return {"text": str(shown), "value": value}
    return {"text": str(cell)}

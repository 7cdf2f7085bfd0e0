"""Diagrams that can be read, together, and without colour."""

import re
import xml.etree.ElementTree as ET

import pytest

from ringspan.cli.console import format_seconds
from ringspan.cli.svg import COLOURS, TITLE_LENGTH, Chart, Line, draw_charts

POINTS = [(1.0, 1.0), (2.0, 3.0)]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_name_looks_the_same_in_all_charts_and_like_no_other() -> None:
    charts = [Chart("one", "x", "y", [Line(name, POINTS) for name in names]) for names in ("abc", "cab", "bd")]
    text = draw_charts(charts)
    look = r'stroke-dasharray="([\w ]+)" stroke="(#\w+)"'
    legend = re.findall(rf'{look} stroke-width="3"/>\s*<text[^>]*>(\w)</text>', text)
    assert len(legend) == 8
    assert len(set(legend)) == 4  # four names, four looks
    assert len({dashes for dashes, _, _ in legend}) == len({colour for _, colour, _ in legend}) == 4
    drawn = re.findall(rf'<polyline [^>]*{look} stroke-width="2"/>', text)
    assert drawn == [(dashes, colour) for dashes, colour, _ in legend]


def luminance(colour: str) -> float:
    """The relative luminance of an sRGB colour, as WCAG 2 defines it."""
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_lines_stand_out_from_white(subtests: pytest.Subtests) -> None:
    for colour in COLOURS:
        with subtests.test(f"{colour}"):
            assert 1.05 / (luminance(colour) + 0.05) >= 3, colour


def test_a_long_title_is_shortened_where_it_is_drawn_and_whole_where_it_is_read_out() -> None:
    title = "dense:" + 20 * "layers=16,"
    root = ET.fromstring(draw_charts([Chart(title, "x", "y", [Line("a", POINTS)])]))
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}title") == title
    drawn = next(root.iter(f"{SVG}text")).text or ""
    assert len(drawn) == TITLE_LENGTH
    assert drawn == title[: TITLE_LENGTH - 1] + "…"


def test_the_mark_says_what_it_is() -> None:
    text = draw_charts([Chart("one", "tokens", "time", [Line("a", [(1.0, 1.0), (4e5, 3.0)])], mark=131072)])
    assert ">asked for: 131,072</text>" in text


@pytest.mark.parametrize(("mark", "side"), [(1.0, "start"), (1000.0, "middle")])
def test_what_the_mark_says_is_not_written_over_the_axis(mark: float, side: str) -> None:
    text = draw_charts([Chart("one", "tokens", "time", [Line("a", [(1.0, 1.0), (4e5, 3.0)])], mark=mark)])
    assert re.search(rf'text-anchor="{side}"[^>]*>asked for: {mark:,.0f}<', text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (-1e-19, "0 µs"),
        (2e-7, "0.2 µs"),
        (12.34e-6, "12.3 µs"),
        (999.6e-6, "1 ms"),
        (0.4567, "457 ms"),
        (0.9996, "1 s"),
        (-0.25, "-250 ms"),
        (99.96, "100 s"),
        (2100.4, "2,100 s"),
        (1_234_567.0, "1,230,000 s"),
    ],
)
def test_times_have_three_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text

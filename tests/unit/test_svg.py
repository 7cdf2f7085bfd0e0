"""Diagrams that can be read together."""

import re

from ringspan.report.svg import Chart, Line, draw_charts


def test_a_name_has_one_colour_in_all_charts() -> None:
    points = [(1.0, 1.0), (2.0, 3.0)]
    charts = [Chart("one", "x", "y", [Line(name, points) for name in names]) for names in ("abc", "cab", "bd")]
    text = draw_charts(charts)
    legend = re.findall(r'stroke="(#\w+)" stroke-width="3"/>\s*<text[^>]*>(\w)</text>', text)
    assert len(legend) == 8
    assert len(set(legend)) == 4  # four names, four pairs
    assert len({colour for colour, _ in legend}) == 4

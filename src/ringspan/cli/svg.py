"""How is a line chart drawn as SVG? Logarithmic axes and a legend, without a library."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from ringspan.cli.console import format_seconds

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 200, 44, 56
MARK_WIDTH = 120  # of the text beside the mark
TITLE_LENGTH = 72  # characters that fit
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#c45a00", "#00838f", "#8c564b", "#7f7f7f")
DASHES = ("none", "7 3", "2 2", "9 3 2 3", "14 4", "5 2 1 2 1 2", "4 5", "1 4")  # lines differ without colour too


class LineStyle(NamedTuple):
    colour: str
    dashes: str


class Line(NamedTuple):
    """A named line through points; both coordinates are above 0."""

    name: str
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """One diagram. `mark` is the x that was asked for."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    mark: float | None = None
    format_y: Callable[[float], str] = format_seconds


def draw_charts(charts: Sequence[Chart]) -> str:
    """All charts below one another, as one file. A name has the same colour and dashes in all of them."""
    names = dict.fromkeys(line.name for chart in charts for line in chart.lines)
    looks = dict(zip(names, map(LineStyle, itertools.cycle(COLOURS), itertools.cycle(DASHES)), strict=False))
    height = HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape('; '.join(chart.title for chart in charts))}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate(0 {i * HEIGHT})">', *_draw(chart, looks), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis(NamedTuple):
    low: float
    high: float
    start: float
    stop: float

    def place(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.stop - self.start)

    def ticks(self, base: int) -> list[float]:
        """Powers of the base within the axis, no more than about eight; with 2 and 5 in a single decade."""
        first, last = math.ceil(math.log(self.low, base) - 1e-9), math.floor(math.log(self.high, base) + 1e-9)
        if base == 10 and last - first == 1:
            return [step * 10.0**first for step in (1, 2, 5, 10)]
        every = max(1, -(-(last - first) // 8))
        return [float(base) ** k for k in range(first, last + 1, every)]


def _draw(chart: Chart, looks: Mapping[str, LineStyle]) -> list[str]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    x_axis = _Axis(min(xs), max(max(xs), min(xs) * 2), LEFT, WIDTH - RIGHT)
    low = 10.0 ** math.floor(math.log10(min(ys)))
    y_axis = _Axis(low, max(10.0 ** math.ceil(math.log10(max(ys))), low * 10), HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, TOP - 18, _shorten(chart.title), 'font-size="15" font-weight="bold"')]
    for y in y_axis.ticks(10):
        at = y_axis.place(y)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, at + 4, chart.format_y(y), 'text-anchor="end"'))
    for x in x_axis.ticks(2):
        at = x_axis.place(x)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 18, _count(x), 'text-anchor="middle"'))
    if chart.mark is not None and x_axis.low <= chart.mark <= x_axis.high:
        at = x_axis.place(chart.mark)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#888" stroke-dasharray="4 3"/>')
        asked = f"asked for: {chart.mark:,.0f}"
        side = "start" if at < LEFT + MARK_WIDTH / 2 else "middle"  # not over the numbers of the axis
        parts.append(_text(at, TOP - 3, asked, f'text-anchor="{side}" font-size="11"'))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, chart.x_name, 'text-anchor="middle"'))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle})"'
    parts.append(_text(18, middle, chart.y_name, turned))
    for i, line in enumerate(chart.lines):
        parts += _draw_line(line, looks[line.name], x_axis, y_axis)
        parts += _draw_entry(line.name, looks[line.name], TOP + 10 + 18 * i)
    return parts


def _draw_line(line: Line, look: LineStyle, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    places = [(f"{x_axis.place(x):.1f}", f"{y_axis.place(y):.1f}") for x, y in line.points]
    points = " ".join(f"{x},{y}" for x, y in places)
    return [
        f'<polyline points="{points}" fill="none" {_stroke(look, 2)}/>',
        *(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{look.colour}"/>' for x, y in places),
    ]


def _draw_entry(name: str, look: LineStyle, at: int) -> list[str]:
    sample = f'<path d="M{WIDTH - RIGHT + 8} {at - 4}h26" {_stroke(look, 3)}/>'
    return [sample, _text(WIDTH - RIGHT + 40, at, name, "")]


def _stroke(look: LineStyle, width: int) -> str:
    return f'stroke-dasharray="{look.dashes}" stroke="{look.colour}" stroke-width="{width}"'


def _shorten(title: str) -> str:
    return title if len(title) <= TITLE_LENGTH else f"{title[: TITLE_LENGTH - 1]}…"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _count(value: float) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

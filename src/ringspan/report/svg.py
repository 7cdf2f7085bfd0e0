"""Line charts as SVG text: logarithmic axes, a legend, nothing else, and no library."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 84, 190, 44, 56
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")


def format_seconds(value: float) -> str:
    """In s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size * 0.999:
            return f"{value / size:g} {unit}"
    return f"{value:g} s"


class Line(NamedTuple):
    """A named line through points; both coordinates are above 0."""

    name: str
    points: Sequence[tuple[float, float]]


class Chart(NamedTuple):
    """One diagram. `mark` is an x to be pointed out, such as the length that was asked for; most are about time."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    mark: float | None = None
    format_y: Callable[[float], str] = format_seconds


def draw_charts(charts: Sequence[Chart]) -> str:
    """All charts below one another, as one file; a name has the same colour in all of them."""
    names = dict.fromkeys(line.name for chart in charts for line in chart.lines)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    height = HEIGHT * len(charts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        parts += [f'<g transform="translate(0 {i * HEIGHT})">', *_draw(chart, colours), "</g>"]
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


def _draw(chart: Chart, colours: Mapping[str, str]) -> list[str]:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    x_axis = _Axis(min(xs), max(max(xs), min(xs) * 2), LEFT, WIDTH - RIGHT)
    low = 10.0 ** math.floor(math.log10(min(ys)))
    y_axis = _Axis(low, max(10.0 ** math.ceil(math.log10(max(ys))), low * 10), HEIGHT - BOTTOM, TOP)
    parts = [_text(LEFT, TOP - 18, chart.title, 'font-size="15" font-weight="bold"')]
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
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, chart.x_name, 'text-anchor="middle"'))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 18 {middle})"'
    parts.append(_text(18, middle, chart.y_name, turned))
    for i, line in enumerate(chart.lines):
        colour = colours[line.name]
        points = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x_axis.place(x):.1f}" cy="{y_axis.place(y):.1f}" r="2.5" fill="{colour}"/>'
            for x, y in line.points
        ]
        at = TOP + 10 + 18 * i
        parts.append(f'<path d="M{WIDTH - RIGHT + 12} {at - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(WIDTH - RIGHT + 36, at, line.name, ""))
    return parts


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _count(value: float) -> str:
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"

"""A layout as a picture for notebooks: a row per rank, the sequence from left to right."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringspan.layout._layouts import Layout
    from ringspan.span import Span

COLOURS = ("#5aa2ef", "#f0a23c", "#35b08a", "#d183b8", "#a294f0", "#cdb22a", "#6cc5e0", "#b99a76")
MOST_RANKS = 32
MOST_BARS = 256  # of a strided span; more are drawn as one pale bar
WIDTH, LEFT, ROW = 640, 64, 18


def draw_layout(layout: "Layout") -> str:
    """An SVG picture; positions that every rank holds are grey in every row."""
    spans = [span for of_rank in (*layout.spans_by_rank, layout.replicated) for span in of_rank]
    stop = max((span.stop for span in spans), default=1)
    shown = min(layout.world_size, MOST_RANKS)
    rows = [_draw_row(layout, rank, stop) for rank in range(shown)]
    height = ROW * (shown + 1)
    more = f", the first {shown} shown" if shown < layout.world_size else ""
    title = f"{layout.num_positions:,} positions on {layout.world_size} ranks{more}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="currentColor" role="img"><title>{title}</title>'
        f'{"".join(rows)}<text x="{LEFT}" y="{height - 5}">{title}</text></svg>'
    )


def _draw_row(layout: "Layout", rank: int, stop: int) -> str:
    top = rank * ROW
    label = f'<text x="0" y="{top + 13}">rank {rank}</text>'
    bars = [_draw_span(span, stop, top, COLOURS[rank % len(COLOURS)]) for span in layout.spans_by_rank[rank]]
    return label + "".join(bars) + "".join(_draw_span(span, stop, top, "#8b949e") for span in layout.replicated)


def _draw_span(span: "Span", stop: int, top: int, colour: str) -> str:
    unit = (WIDTH - LEFT) / stop
    if span.step == 1 or len(span) > MOST_BARS:
        opacity = "" if span.step == 1 else ' fill-opacity="0.4"'
        return _bar(LEFT + span.start * unit, top, (span.stop - span.start) * unit, colour, opacity)
    return "".join(_bar(LEFT + start * unit, top, unit, colour) for start in span.positions().tolist())


def _bar(x: float, y: int, width: float, colour: str, style: str = "") -> str:
    return f'<rect x="{x:.2f}" y="{y + 2}" width="{max(width, 0.5):.2f}" height="{ROW - 4}" fill="{colour}"{style}/>'

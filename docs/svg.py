"""A few SVG shapes and two palettes, for the pictures of these documents."""

from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent / "images"
RANKS = ("#2f7ed8", "#e08a1e", "#1f9e78", "#b8609f")  # distinguishable with the common colour blindnesses


class Palette(NamedTuple):
    """The colours of one variant; the background stays transparent."""

    name: str
    ink: str
    muted: str
    line: str
    card: str
    accent: str


PALETTES = (
    Palette("light", ink="#1f2328", muted="#59636e", line="#d1d9e0", card="#f6f8fa", accent="#2f7ed8"),
    Palette("dark", ink="#f0f6fc", muted="#9198a1", line="#3d444d", card="#151b23", accent="#6cb0ff"),
)


def rect(x: float, y: float, width: float, height: float, fill: str, style: str = "") -> str:
    """A rectangle; `style` is a list of further attributes."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" {style}/>'


def text(x: float, y: float, words: str, fill: str, style: str = "") -> str:
    """One line of text that begins at x, on the baseline y."""
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" {style}>{escape(words)}</text>'


def arrow(path: str, colour: str, style: str = "") -> str:
    """A path with an arrowhead at its end; needs `document` to define the head of that colour."""
    head = f'marker-end="url(#head-{colour.strip("#")})"'
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" {head} {style}/>'


def document(width: int, height: int, title: str, parts: list[str], heads: tuple[str, ...]) -> str:
    """The whole file; `heads` are the colours of its arrows."""
    markers = "".join(
        f'<marker id="head-{colour.strip("#")}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for colour in dict.fromkeys(heads)
    )
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13" role="img">'
    )
    return "\n".join([begin, f"<title>{escape(title)}</title>", f"<defs>{markers}</defs>", *parts, "</svg>"]) + "\n"

"""Draw the way of a token through one call of rs.attention.

python docs/draw_way.py        # writes docs/images/way-*.svg
"""

from svg import IMAGES, PALETTES, Palette, arrow, document, rect, text

WIDTH, BOX_WIDTH, BOX_HEIGHT, GAP = 860, 400, 46, 24
LEFT, RIGHT = 10, 500
MAIN = (  # file, what happens there
    ("runtime/api.py", "q, k, v of this rank: (batch, heads, seq, dim)"),
    ("runtime/engine.py · check", "dtypes, shapes, layouts, options: exact or refused"),
    ("program/prepare.py · prepare", "visible → build → validate → compile → bind; cached"),
    ("runtime/session.py · agree", "all ranks make the same call, or all raise the error"),
    ("program/execute.py · run", "for each step: Post, Do, Wait, Drop"),
    ("runtime/engine.py · finish", "out in the dtype of q; lse on request"),
)
SIDE = (  # beside the run
    ("transports/", "K and V of a block travel to the next rank"),
    ("kernels/", "q of this rank × K, V of the block → out, lse"),
    ("kernels/softmax.py", "merge: weights exp(lse − joint lse)"),
)
RUN = 4  # the row of MAIN that SIDE belongs to
MIDDLE, BOLD = 'text-anchor="middle"', 'font-weight="600"'


def draw(palette: Palette) -> str:
    """The rows of a call on the left; what the run calls in every step on the right."""
    parts: list[str] = []
    height = len(MAIN) * (BOX_HEIGHT + GAP)
    for row, (name, says) in enumerate(MAIN):
        y = 10 + row * (BOX_HEIGHT + GAP)
        parts += _box(LEFT, y, BOX_WIDTH, name, says, palette)
        if row + 1 < len(MAIN):
            x = LEFT + BOX_WIDTH / 2
            parts.append(arrow(f"M{x} {y + BOX_HEIGHT}L{x} {y + BOX_HEIGHT + GAP - 2}", palette.accent))
    run_y = 10 + RUN * (BOX_HEIGHT + GAP) + BOX_HEIGHT / 2
    for i, (name, says) in enumerate(SIDE):
        y = 10 + (RUN - 1 + i) * (BOX_HEIGHT + GAP)
        parts += _box(RIGHT, y, WIDTH - RIGHT - 10, name, says, palette)
        start, end = LEFT + BOX_WIDTH, RIGHT - 2
        middle, target = (start + end) / 2, y + BOX_HEIGHT / 2
        parts.append(arrow(f"M{start} {run_y}C{middle} {run_y} {middle} {target} {end} {target}", palette.accent))
    parts.append(text(RIGHT, 10 + (RUN - 1) * (BOX_HEIGHT + GAP) - 10, "in every step", palette.muted))
    parts.append(text(RIGHT, 28, "A repeated call finds its prepared program in a", palette.muted))
    parts.append(text(RIGHT, 46, "cache: only agree, run and finish do work.", palette.muted))
    title = "The way of a token through rs.attention: check, prepare, agree, run, finish"
    return document(WIDTH, height, title, parts, (palette.accent,))


def _box(x: float, y: float, width: float, name: str, says: str, palette: Palette) -> list[str]:
    return [
        rect(x, y, width, BOX_HEIGHT, palette.card, f'rx="7" stroke="{palette.line}" stroke-width="1.5"'),
        text(x + width / 2, y + 19, name, palette.ink, f"{MIDDLE} {BOLD}"),
        text(x + width / 2, y + 37, says, palette.muted, f'{MIDDLE} font-size="12"'),
    ]


if __name__ == "__main__":
    for palette in PALETTES:
        (IMAGES / f"way-{palette.name}.svg").write_text(draw(palette))

"""Draw the rooms of the package, and the way of a call through them.

python docs/draw_rooms.py        # writes docs/images/rooms-*.svg and way-*.svg
"""

from svg import IMAGES, PALETTES, Palette, arrow, document, rect, text

WIDTH = 860
# From the top: what a user starts, down to what everything rests on. Imports point down only.
FLOORS = (
    ("start", ("cli", "bench")),
    ("models", ("adapters", "training", "cache", "reproducible")),
    ("the call", ("runtime",)),
    ("compute and carry", ("kernels", "transports", "simulate", "planner")),
    ("one rank's program", ("program",)),
    ("schedules", ("algorithms", "schedule")),
    ("who holds, who sees", ("layout", "mask", "span", "errors")),
)
SAYS = {
    "cli": "commands",
    "bench": "measure this machine",
    "adapters": "transformers",
    "training": "batch, labels, loss",
    "cache": "KV cache over ranks",
    "reproducible": "layers, same bits",
    "runtime": "check, prepare, agree, run, finish: rs.attention on real ranks",
    "kernels": "attend a piece, merge",
    "transports": "carry a message",
    "simulate": "all ranks in NumPy",
    "planner": "cost before renting",
    "program": "pieces, bind, prepare, execute: from a schedule to instructions",
    "algorithms": "one file per algorithm",
    "schedule": "actions, validate, compile",
    "layout": "who holds a token",
    "mask": "who sees whom",
    "span": "runs of positions",
    "errors": "what is refused",
}
NO_TORCH = {"simulate", "planner", "program", "algorithms", "schedule", "layout", "mask", "span", "errors"}
# Down, the turn, and up: (room, what happens there).
DOWN = (
    ("layout", "this rank's tokens: q, k, v"),
    ("runtime", "check arguments and shapes"),
    ("algorithms", "build a schedule"),
    ("schedule", "complete, validate, compile"),
    ("program", "cut pieces, bind sizes (cached)"),
)
UP = (
    ("training", "gather, or the loss"),
    ("runtime", "autograd keeps out and lse"),
    ("runtime", "finish: out in q's dtype"),
    ("program", "sums go home and are merged"),
    ("runtime", "agree: all ranks mean one call"),
)
LOOP = (
    ("transports", "post: send K/V on"),
    ("kernels", "compute the pieces"),
    ("kernels", "merge by lse"),
    ("transports", "wait for the next block"),
)

MIDDLE = 'text-anchor="middle"'
BOLD = 'font-weight="600"'


def draw_rooms(palette: Palette) -> str:
    """Floors from top to bottom; rooms with a coloured edge run without torch."""
    parts: list[str] = []
    for floor, (name, rooms) in enumerate(FLOORS):
        y = 10 + floor * 62
        parts.append(text(10, y + 30, name, palette.muted, 'font-size="12"'))
        room_width = (WIDTH - 200) / len(rooms)
        for i, room in enumerate(rooms):
            x = 190 + i * room_width
            edge = palette.accent if room in NO_TORCH else palette.line
            parts.append(rect(x, y, room_width - 8, 50, palette.card, f'rx="7" stroke="{edge}" stroke-width="1.5"'))
            centre = x + (room_width - 8) / 2
            parts.append(text(centre, y + 21, room, palette.ink, f"{MIDDLE} {BOLD}"))
            parts.append(text(centre, y + 39, SAYS[room], palette.muted, f'{MIDDLE} font-size="12"'))
    y = 10 + len(FLOORS) * 62 + 12
    parts.append(text(190, y, "Imports point down only. Rooms with a blue edge need no torch.", palette.muted))
    return document(WIDTH, y + 12, "The rooms of the package, from commands down to errors", parts, ())


def draw_way(palette: Palette) -> str:
    """Down through the rooms on the left, the ring loop at the bottom, up again on the right."""
    parts = [
        text(140, 22, "down: prepare, once per kind of call", palette.ink, f"{MIDDLE} {BOLD}"),
        text(720, 22, "up: the result", palette.ink, f"{MIDDLE} {BOLD}"),
    ]
    for i, (room, what) in enumerate(DOWN):
        parts += _stop(10, 40 + 62 * i, room, what, palette)
        if i:
            parts.append(arrow(f"M140 {40 + 62 * i - 18}V{40 + 62 * i - 3}", palette.accent))
    for i, (room, what) in enumerate(UP):
        parts += _stop(590, 40 + 62 * i, room, what, palette)
        if 0 < i < len(UP) - 1:
            parts.append(arrow(f"M720 {40 + 62 * i}V{40 + 62 * i - 15}", palette.accent))
    parts += _loop(palette)
    return document(
        WIDTH, 470, "The way of one call through the rooms: down, around the ring, up", parts, (palette.accent,)
    )


def _loop(palette: Palette) -> list[str]:
    parts = [
        rect(10, 364, WIDTH - 20, 100, "none", f'rx="9" stroke="{palette.accent}" stroke-dasharray="5 4"'),
        text(24, 384, "program/execute: one turn per step of the ring", palette.ink, BOLD),
        arrow("M270 306H580", palette.accent),
        text(425, 299, "every call", palette.muted, MIDDLE),
        arrow("M640 334V360", palette.accent),
    ]
    for i, (room, what) in enumerate(LOOP):
        x = 24 + i * 208
        parts += _stop(x, 396, room, what, palette, width=188)
        if i:
            parts.append(arrow(f"M{x - 20} 421H{x - 3}", palette.accent))
    return parts


def _stop(x: float, y: float, room: str, what: str, palette: Palette, width: float = 260) -> list[str]:
    return [
        rect(x, y, width, 44, palette.card, f'rx="7" stroke="{palette.line}"'),
        text(x + 12, y + 18, f"{room}/", palette.ink, BOLD),
        text(x + 12, y + 35, what, palette.muted, 'font-size="12"'),
    ]


if __name__ == "__main__":
    for palette in PALETTES:
        (IMAGES / f"rooms-{palette.name}.svg").write_text(draw_rooms(palette))
        (IMAGES / f"way-{palette.name}.svg").write_text(draw_way(palette))

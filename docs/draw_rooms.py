"""Draw the rooms of the package.

python docs/draw_rooms.py        # writes docs/images/rooms-*.svg
"""

from svg import IMAGES, PALETTES, Palette, document, rect, text

WIDTH = 860
# From commands at the top to the foundations at the bottom. Imports point down only.
FLOORS = (
    ("start", ("cli", "page", "bench", "serve")),
    ("other software", ("adapters", "compat", "verify")),
    ("models", ("training", "cache", "reproducible")),
    ("the call", ("runtime",)),
    ("compute and carry", ("kernels", "transports", "simulate", "planner")),
    ("one rank's program", ("program",)),
    ("schedules", ("algorithms", "schedule")),
    ("who holds, who sees", ("layout", "mask", "span", "arguments", "errors")),
)
SAYS = {
    "cli": "commands",
    "page": "look at results",
    "bench": "measure this machine",
    "serve": "an API over ranks",
    "adapters": "whole models on ranks",
    "compat": "names of other libraries",
    "verify": "is this attention right?",
    "training": "batch, labels, loss",
    "cache": "KV cache over ranks",
    "reproducible": "layers, same bits",
    "runtime": "check, prepare, agree, run, finish: rs.attention on real ranks",
    "kernels": "attend a piece, merge",
    "transports": "carry a message",
    "simulate": "all ranks in NumPy",
    "planner": "cost before renting",
    "program": "pieces, bind, execute: from a schedule to one rank's instructions",
    "algorithms": "one file per algorithm",
    "schedule": "actions, validate, compile",
    "layout": "who holds a token",
    "mask": "who sees whom",
    "span": "runs of positions",
    "arguments": "kinds of values",
    "errors": "what is refused",
}
NO_TORCH = {
    "page",
    "simulate",
    "planner",
    "program",
    "algorithms",
    "schedule",
    "layout",
    "mask",
    "span",
    "arguments",
    "errors",
}

MIDDLE = 'text-anchor="middle"'
BOLD = 'font-weight="600"'


def draw(palette: Palette) -> str:
    """Draw the floors from top to bottom; rooms with a coloured edge run without torch."""
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


if __name__ == "__main__":
    for palette in PALETTES:
        (IMAGES / f"rooms-{palette.name}.svg").write_text(draw(palette))

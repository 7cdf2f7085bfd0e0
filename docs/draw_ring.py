"""Draw one step of ring attention from the schedule the library runs: four ranks, zigzag, causal, 16 tokens.

python docs/draw_ring.py        # writes docs/images/ring-light.svg and ring-dark.svg
"""

import numpy as np
from svg import IMAGES, PALETTES, RANKS, Palette, arrow, document, rect, text

import ringspan as rs

SEQ_LEN, WORLD_SIZE, STEP = 16, 4, 1
MASK, LAYOUT = rs.causal(), rs.zigzag(SEQ_LEN, WORLD_SIZE)
SCHEDULE = rs.simulate_attention(*np.zeros((3, SEQ_LEN, 8)), mask=MASK, layout=LAYOUT).schedule

WIDTH, HEIGHT = 860, 400
CARD_WIDTH, CARD_HEIGHT, CELL = 164, 76, 8  # a card shows a rank, a cell one token
CARDS = ((168, 60), (318, 162), (168, 264), (18, 162))  # clockwise, so that blocks move clockwise
HOPS = (  # from card to card, each with the position of its label
    ("M332 98C400 98 400 120 400 154", (396, 102)),
    ("M400 238C400 280 400 302 340 302", (396, 308)),
    ("M168 302C100 302 100 280 100 246", (104, 308)),
    ("M100 162C100 120 100 98 160 98", (104, 102)),
)
GRID_X, GRID_Y, GRID_CELL = 556, 76, 17


def draw(palette: Palette) -> str:
    """Draw the ring on the left and the grid of queries and keys on the right."""
    parts = [
        text(18, 24, f"Step {STEP} of steps 0 to {SCHEDULE.num_steps - 1}", palette.ink, BOLD),
        *(part for rank in range(WORLD_SIZE) for part in _card(rank, palette)),
        *(part for rank in range(WORLD_SIZE) for part in _hop(rank)),
        text(18, 376, "Each rank attends its queries to the block it holds", palette.muted),
        text(18, 393, "and meanwhile sends that block to the next rank.", palette.muted),
        *_grid(palette),
    ]
    title = "One step of ring attention on four ranks, and the pairs of queries and keys that it computes"
    return document(WIDTH, HEIGHT, title, parts, RANKS)


BOLD = 'font-weight="600" font-size="15"'
MIDDLE = 'text-anchor="middle"'


def _attended(rank: int, t: int) -> list[tuple[int, int]]:
    """Return the owners of the query and key blocks that a rank attends in step t."""
    return [(q.owner, kv.owner) for attend in SCHEDULE.actions(rank, t).attends for q in attend.qs for kv in attend.kvs]


def _card(rank: int, palette: Palette) -> list[str]:
    x, y = CARDS[rank]
    ((q_owner, kv_owner),) = _attended(rank, STEP)
    return [
        rect(x, y, CARD_WIDTH, CARD_HEIGHT, palette.card, f'rx="8" stroke="{palette.line}"'),
        text(x + 10, y + 19, f"rank {rank}", palette.ink, 'font-weight="600"'),
        *_strip(x + 10, y + 31, f"q{q_owner}", q_owner, palette),
        *_strip(x + 10, y + 53, f"kv{kv_owner}", kv_owner, palette),
    ]


def _strip(x: float, y: float, name: str, owner: int, palette: Palette) -> list[str]:
    """Draw the sequence as a row of cells, those of the owner filled."""
    held = set(LAYOUT.positions(owner).tolist())
    cells = [
        rect(x + 28 + position * (CELL - 0.75), y, CELL - 1.5, 12, RANKS[owner] if position in held else palette.line)
        for position in range(SEQ_LEN)
    ]
    return [text(x, y + 11, name, palette.ink), *cells]


def _hop(rank: int) -> list[str]:
    (transfer,) = SCHEDULE.actions(rank, STEP).sends
    assert transfer.dst == (rank + 1) % WORLD_SIZE
    path, (x, y) = HOPS[rank]
    colour = RANKS[transfer.block.owner]
    side = "start" if x > 200 else "end"
    label = text(x, y, str(transfer.block), colour, f'text-anchor="{side}" font-weight="600"')
    return [arrow(path, colour), label]


def _grid(palette: Palette) -> list[str]:
    """Draw every pair of query and key: filled in this step, pale in another step, empty if masked."""
    side = SEQ_LEN * GRID_CELL
    turned = f'transform="rotate(-90 {GRID_X - 34} {GRID_Y + side / 2})"'
    parts = [
        text(GRID_X + side / 2, GRID_Y - 26, "keys", palette.muted, MIDDLE),
        text(GRID_X - 34, GRID_Y + side / 2, "queries", palette.muted, f"{MIDDLE} {turned}"),
        rect(GRID_X, GRID_Y, side, side, "none", f'stroke="{palette.line}"'),
    ]
    for position in range(SEQ_LEN):
        (owner,) = (rank for rank in range(WORLD_SIZE) if position in LAYOUT.positions(rank))
        at = position * GRID_CELL
        small = 'font-size="10" text-anchor="middle"'
        parts.append(text(GRID_X + at + GRID_CELL / 2, GRID_Y - 7, str(owner), RANKS[owner], small))
        parts.append(text(GRID_X - 11, GRID_Y + at + 12, str(owner), RANKS[owner], small))
    for t in range(SCHEDULE.num_steps):
        for rank in range(WORLD_SIZE):
            for q_owner, kv_owner in _attended(rank, t):
                parts += _pairs(rank, q_owner, kv_owner, 1.0 if t == STEP else 0.28)
    parts.append(text(GRID_X, 376, "Filled: this step. Pale: another step.", palette.muted))
    parts.append(text(GRID_X, 393, "Empty: the causal mask forbids it.", palette.muted))
    return parts


def _pairs(rank: int, q_owner: int, kv_owner: int, opacity: float) -> list[str]:
    q_positions, kv_positions = LAYOUT.positions(q_owner), LAYOUT.positions(kv_owner)
    allowed = MASK.allowed(q_positions, kv_positions)
    return [
        rect(
            GRID_X + int(kv_positions[j]) * GRID_CELL + 1,
            GRID_Y + int(q_positions[i]) * GRID_CELL + 1,
            GRID_CELL - 2,
            GRID_CELL - 2,
            RANKS[rank],
            f'fill-opacity="{opacity:g}" rx="2"',
        )
        for i, j in np.argwhere(allowed)
    ]


if __name__ == "__main__":
    for palette in PALETTES:
        (IMAGES / f"ring-{palette.name}.svg").write_text(draw(palette))

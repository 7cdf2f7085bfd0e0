"""Draw the four steps of the lesson's ring, and its two timelines, from the values that the interactive page shows.

python docs/draw_steps.py        # writes docs/images/steps-light.svg and steps-dark.svg
"""

import itertools

from svg import IMAGES, PALETTES, RANKS, Palette, document, rect, text

from ringspan.page.cases import Combination, run_combination
from ringspan.page.gantt import describe_timeline
from ringspan.page.hiding import LAYOUTS, build_loads, time_ring
from ringspan.page.runs import describe_run
from ringspan.page.units import format_seconds

RING = Combination(4, "zigzag", "causal", "pass_kv", "forward")
TOKENS, GIGABYTES_PER_S = 2**16, 25.0
WIDTH, HEIGHT, CELL, LEFT = 860, 408, 6, 12
GAP = (WIDTH - 2 * LEFT - 4 * 32 * CELL) / 3
LANE, TIMES_Y, TIMES_WIDTH = 26, 286, 330


def draw(palette: Palette) -> str:
    """Draw the steps above, the timelines below."""
    run = describe_run(run_combination(RING))
    longest = max(_timeline(name)["total_s"] for name in LAYOUTS)
    parts = [part for t in range(run["num_steps"]) for part in _step(run, t, palette)]
    parts += [part for i, name in enumerate(LAYOUTS) for part in _times(name, LEFT + i * (WIDTH / 2), longest, palette)]
    title = "The four steps of ring attention on four ranks, and how long they take with two layouts"
    return document(WIDTH, HEIGHT, title, parts, ())


def _step(run: dict, t: int, palette: Palette) -> list[str]:
    """Draw the pairs that are computed in a step strongly, earlier ones pale, later ones in grey."""
    x, y = LEFT + t * (32 * CELL + GAP), 34
    owners = run["rows"]["owners"]
    done = {}
    for step, cells in enumerate(run["steps"]):
        for rank, (_, tiles, _) in enumerate(cells):
            for q, kv, _ in tiles:
                done[q.removeprefix("q"), kv.removeprefix("kv")] = step, rank
    parts = [text(x, y - 12, f"step {t}", palette.ink, 'font-weight="600"')]
    for i, row in enumerate(run["visible"]):
        looks = [None if sees == "0" else done[owners[i], owners[j]] for j, sees in enumerate(row)]
        first = 0
        for look, same in itertools.groupby(looks):
            width = len(list(same))
            if look is not None:
                fill, opacity = (palette.line, 1.0) if look[0] > t else (RANKS[look[1]], 1.0 if look[0] == t else 0.35)
                at = x + first * CELL, y + i * CELL
                parts.append(rect(*at, width * CELL - 0.5, CELL - 0.5, fill, f'fill-opacity="{opacity:g}"'))
            first += width
    sends = [f"{block}→{dst}" for _, _, of in run["steps"][t] for block, dst, _ in of]
    parts.append(text(x, y + 32 * CELL + 18, ", ".join(sends) or "nothing is sent", palette.muted, 'font-size="12"'))
    return parts


def _timeline(name: str) -> dict:
    return describe_timeline(time_ring(build_loads(name, TOKENS), GIGABYTES_PER_S), name)


def _times(name: str, x: float, longest_s: float, palette: Palette) -> list[str]:
    """Draw computing as bars and messages as thin bars below, one lane for each rank."""
    chart = _timeline(name)
    scale = TIMES_WIDTH / longest_s
    told = f"{name}, {TOKENS // 1024}K tokens: {format_seconds(chart['total_s'])}"
    parts = [text(x, TIMES_Y, told, palette.ink, 'font-weight="600"')]
    for lane, words in enumerate(chart["lanes"]):
        parts.append(text(x, TIMES_Y + 26 + lane * LANE, words, palette.muted, 'font-size="12"'))
    for lane, kind, start, stop, *_ in chart["bars"]:
        y, left, width = TIMES_Y + 12 + lane * LANE, x + 48 + start * scale, max(0.5, (stop - start) * scale - 0.75)
        if kind == "compute":
            parts.append(rect(left, y, width, 15, RANKS[lane]))
        elif kind == "message":
            parts.append(rect(left, y + 17, width, 4, palette.muted))
    return parts


if __name__ == "__main__":
    for palette in PALETTES:
        (IMAGES / f"steps-{palette.name}.svg").write_text(draw(palette))

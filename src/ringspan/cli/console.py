"""Where does a command print its report, how wide is it, and how are numbers and characters written there?

A terminal whose encoding lacks ✓, × or box-drawing characters gets words and ASCII instead of "?".
"""

import codecs
import os
from collections.abc import Iterable
from typing import Any

FILE_WIDTH = 100  # columns, if the output is not a terminal and COLUMNS is not set
LEAST_WIDTH = 40  # columns: a narrower terminal wraps lines by itself


def new_console() -> Any:
    """Standard output, as wide as the terminal but not narrower than LEAST_WIDTH."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    console.width = max(console.width, LEAST_WIDTH)
    return console


HANDLER = "ringspan.plain"
SPELLED = {
    "✓": "ok",
    "✗": "no",
    "×": "x",
    "·": ".",
    "µ": "u",
    "²": "^2",
    "→": "->",
    "↔": "<->",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "–": "-",
    "…": "...",
    "─": "-",
    "━": "-",
    "│": "|",
    "┼": "+",
    "█": "#",
    "▏": "|",
    **{level: str(i) for i, level in enumerate("▁▂▃▄▅▆▇", 1)},
    "\N{NO-BREAK SPACE}": " ",
}


def spell(error: UnicodeError) -> tuple[str, int]:
    """Spell the characters that cannot be encoded; those without a spelling become "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(SPELLED.get(letter, "?") for letter in letters), error.end


codecs.register_error(HANDLER, spell)


BAR_WIDTH = 16
LEVELS = "·▁▂▃▄▅▆▇█"


def format_bar(value: int, most: int) -> str:
    """A bar of at most BAR_WIDTH characters; anything above zero shows."""
    length = round(BAR_WIDTH * value / most) if most else 0
    return "█" * length or ("▏" if value else "")


def format_level(value: int, most: int) -> str:
    """One character: a dot for 0, else a block as high as the share of `most`."""
    return LEVELS[-(-(len(LEVELS) - 1) * value // most)] if value else LEVELS[0]


def format_count(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_percent(ratio: float, decimals: int = 1) -> str:
    """0.125 as 12.5 %. A share above 0 is never shown as 0 %, a share below 1 never as 100 %."""
    step = 10**-decimals
    if 0 < ratio < step / 200:
        return f"< {step:g} %"
    if 1 - step / 200 <= ratio < 1:
        return f"> {100 - step:g} %"
    return f"{100 * ratio:.{decimals}f} %"


def format_list(items: Iterable[object], most: int) -> str:
    """Items separated by spaces, and the number of those left out."""
    words = list(map(str, items))
    return " ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def format_seconds(seconds: float) -> str:
    """Three digits in s, ms or µs. Rounding comes first: 999.6 ms is 1 s, and the smallest time shown is 1 ns."""
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    rounded = [(round(float(f"{seconds / size:.3g}"), 3), unit) for unit, size in units]
    number, unit = next((it for it in rounded if abs(it[0]) >= 1), rounded[-1])
    return f"{number or 0:,.12g} {unit}"

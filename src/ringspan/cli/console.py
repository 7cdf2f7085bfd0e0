"""Where does a command print its report, how wide is it, and which characters can the terminal show?

A terminal whose encoding lacks ✓, × or box-drawing characters gets words and ASCII instead of "?".
"""

import codecs
import os
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

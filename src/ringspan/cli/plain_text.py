"""What does a terminal print whose encoding lacks ✓, × or box-drawing characters? Words and ASCII instead of "?"."""

import codecs

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

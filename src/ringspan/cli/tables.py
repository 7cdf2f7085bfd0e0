"""How does a table fit a narrow terminal?

Columns of words are wrapped, widest first, down to their longest word; numbers are never wrapped. A table that is still
too wide is printed as a list, one paragraph for each row.
"""

import textwrap
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

COLUMN_GAP = 2
NO_BREAK = "\N{NO-BREAK SPACE}"


def new_table(*columns: str) -> Table:
    """An empty table; a column whose name begins with > holds numbers and is right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", show_edge=False)
    for column in columns:
        name = column.removeprefix(">")
        table.add_column(Text(name), justify="left" if name == column else "right", overflow="fold")
    return table


def fit_table(table: Table, width: int) -> list[RenderableType]:
    """What to print for a table in so many columns of characters: the table itself, or lines."""
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    for column, texts in zip(table.columns, columns, strict=True):
        if column.justify == "right":
            texts[1:] = [text.strip().replace(" ", NO_BREAK) for text in texts[1:]]  # a number keeps its unit
    widths = [max(map(cell_len, texts)) for texts in columns]
    least = [max(map(_longest_word, texts)) for texts in columns]
    room = width - COLUMN_GAP * (len(columns) - 1)
    if sum(least) > room:
        return list(_as_lines(columns, width))
    while sum(widths) > room:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    for column, fitted in zip(table.columns, widths, strict=True):
        column.width = fitted
    return [table]


def _plain(cell: RenderableType) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split(" ")))


def _as_lines(columns: Sequence[Sequence[str]], width: int) -> Iterator[Text]:
    """One paragraph for each row: every cell behind the name of its column."""
    headers = [column[0] for column in columns]
    for row in zip(*(column[1:] for column in columns), strict=True):
        parts = [f"{header} {cell.strip()}".strip() for header, cell in zip(headers, row, strict=True) if cell.strip()]
        text = ", ".join(parts)
        for line in textwrap.wrap(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False):
            yield Text(line.replace(NO_BREAK, " "))

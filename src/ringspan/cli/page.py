"""What is a report on the terminal made of? Sections, sentences, tables and schedule grids.

Nothing is cut off and no word is broken: text wraps, a table that is too wide becomes a list, and a grid wider than the
screen is continued below. Colour only repeats what the characters say.
"""

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ringspan.schedule import Attend, Block, Transfer, parse_schedule

PROSE_WIDTH = 96
INDENT = 2

TABLE_RANKS = 16  # rows
GRID_RANKS = 8  # larger grids are not readable; --json has them
GRID_STEPS = 10
GRID_BANDS = 4  # groups of ranks below one another, at most
GRID_SEPARATOR = " │ "
IN_WORDS = {"q": "queries", "kv": "keys and values"}
GRID_STYLES = (
    (r"\S+×\S+", "bold"),  # computes
    (r"(q|kv)[\d*]\S*→\d+", "cyan"),  # sends an input on
    (r"out[\d*]\S*(→\d+|↔all)", "magenta"),  # a partial result goes home
    (r"│", "dim"),
)


class Page:
    """A report being printed. Sections are numbered as they come."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._numbers = itertools.count(1)

    @property
    def width(self) -> int:
        """Columns for sentences: lines longer than this are hard to read."""
        return min(self.console.width, PROSE_WIDTH)

    def section(self, title: str) -> None:
        """A numbered heading."""
        self.console.print()
        heading = Text(f"{next(self._numbers)}. {title} ", "bold")
        self.console.print(heading.append("─" * (self.width - len(heading)), "not bold dim"))

    def note_hidden(self, num_ranks: int) -> None:
        """Say how many ranks are not in the table above."""
        if num_ranks > TABLE_RANKS:
            self.show(Text(f"(and {num_ranks - TABLE_RANKS} more ranks; --json has them all)", "dim"))

    def prose(self, *sentences: str) -> None:
        """Sentences, wrapped; empty ones are left out, and a no-break space keeps words together."""
        for line in textwrap.wrap(" ".join(filter(None, sentences)), self.width):
            self.console.print(Text(line.replace(NO_BREAK, " ")))

    def show(self, *items: RenderableType) -> None:
        """Lines or tables, indented."""
        for item in items:
            parts = fit_table(item, self.console.width - INDENT) if isinstance(item, Table) else [item]
            for part in parts:
                self._print(Padding(part, (0, 0, 0, INDENT), expand=False), self.console.width)

    def facts(self, rows: Iterable[tuple[str, str]]) -> None:
        """A list of names and values."""
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        self._print(Padding(table, (0, 0, 0, INDENT), expand=False), self.width)

    def grid(self, grid: str) -> None:
        """A schedule's grid, as `format_schedule` writes it."""
        self.show(*_grid_lines(grid, self.console.width - INDENT))

    def _print(self, item: RenderableType, width: int) -> None:
        """Print. In a file, the blanks with which rich pads lines are removed."""
        if self.console.is_terminal:
            self.console.print(item, width=width)
            return
        with self.console.capture() as capture:
            self.console.print(item, width=width)
        self.console.file.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def explain_grid(grid: str) -> Iterator[tuple[str, str]]:
    """Topics and sentences about them, with examples from the part of the grid that `Page.grid` shows."""
    schedule = parse_schedule(grid)
    steps, ranks = range(min(schedule.num_steps, GRID_STEPS)), range(min(schedule.world_size, GRID_RANKS))
    cells = [schedule.actions(rank, t) for t in steps for rank in ranks]
    yield "grid", "Steps go down, ranks across."
    attends = [attend for cell in cells for attend in cell.attends]
    if attends:
        yield "attend", _about_attends(attends)
    send = "meanwhile send" if any(cell.attends and cell.sends for cell in cells) else "send"
    transfers: dict[str, Transfer] = {}
    for transfer in (transfer for cell in cells for transfer in cell.sends):
        transfers.setdefault(transfer.block.kind, transfer)
    for kind, (block, _, dst) in transfers.items():
        if kind in IN_WORDS:
            what = f"{IN_WORDS[kind]} of rank {block.owner}"
            yield kind, f"{block}→{dst}: {send} the {what} to rank {dst}, for a later step."
        else:
            yield kind, f"{block}→{dst}: a partial result goes home to rank {dst} and is merged there."
    blocks = [transfer.block for transfer in transfers.values()]
    ranges = [block for block in blocks if block.heads is not None]
    if ranges:
        yield "heads", _about_heads(ranges[0])


def _grid_lines(grid: str, width: int) -> Iterator[Text]:
    """The grid in bands of ranks that fit the width, and a note of what was left out."""
    title, *lines = grid.splitlines()
    yield Text(title, "dim")
    rows = [[cell.strip() for cell in line.split("│")] for line in lines]
    num_steps, num_ranks = len(rows) - 1, len(rows[0]) - 1
    rows = rows[: 1 + GRID_STEPS]
    widths = [max(len(row[column]) for row in rows) for column in range(1 + min(num_ranks, GRID_RANKS))]
    bands = _bands(widths, width)[:GRID_BANDS]
    for i, band in enumerate(bands):
        if i:
            yield Text(" ")
        for row in rows:
            line = GRID_SEPARATOR.join(row[column].ljust(widths[column]) for column in (0, *band)).rstrip()
            hanging = " " * widths[0] + GRID_SEPARATOR
            for part in textwrap.wrap(line, width, subsequent_indent=hanging, break_on_hyphens=False) or [line]:
                yield _styled(part, is_header=row is rows[0])
    ranks, steps = bands[-1].stop - 1, len(rows) - 1
    if ranks < num_ranks or steps < num_steps:
        yield Text(f"({steps} of {num_steps} steps, {ranks} of {num_ranks} ranks; --json has them all)", "dim")


def _bands(widths: list[int], width: int) -> list[range]:
    """Split columns 1, 2, … into as few equal groups as fit beside column 0. One column may exceed the screen."""
    num_ranks = len(widths) - 1
    bands: list[range] = []
    for num_bands in range(1, num_ranks + 1):
        size = -(-num_ranks // num_bands)
        bands = [range(first, min(first + size, num_ranks + 1)) for first in range(1, num_ranks + 1, size)]
        if all(widths[0] + sum(len(GRID_SEPARATOR) + widths[column] for column in band) <= width for band in bands):
            break
    return bands


def _styled(line: str, *, is_header: bool) -> Text:
    text = Text(line, "dim" if is_header else "")
    for pattern, style in GRID_STYLES:
        text.highlight_regex(pattern, style)
    return text


def _about_attends(attends: Sequence[Attend]) -> str:
    """An example of two blocks, if possible of two ranks; or the first of many blocks."""
    short = [(attend.qs[0], attend.kvs[0]) for attend in attends if len(attend.qs) == len(attend.kvs) == 1]
    if not short:
        q = attends[0].qs[0]
        return f"{q} is queries of rank {q.owner}; × attends the blocks on its left to those on its right."
    q, kv = next((pair for pair in short if pair[0].owner != pair[1].owner), short[0])
    return f"{q}×{kv}: attend the queries of rank {q.owner} to the keys and values of rank {kv.owner}."


def _about_heads(block: Block) -> str:
    heads = block.heads or range(0)
    names = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
    return f"[{heads.start}:{heads.stop}]: only head{'' if len(heads) == 1 else 's'} {names}."


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
    """The table itself if it fits into the width, else its rows as lines."""
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

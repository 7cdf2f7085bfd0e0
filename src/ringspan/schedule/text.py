"""How is a schedule written as text? As a grid of steps (rows) and ranks (columns), which parses back.

A cell lists attends (`q0×kv3`, several blocks joined by commas), the rank's sends (`kv3→1`), and sums that all ranks
merge (`out*↔all`). `*` is a block that every rank holds, `[0:4]` a range of heads. The grid is complete:
`parse_schedule(format_schedule(s)) == s`.
"""

import re
from collections.abc import Iterable

from ringspan.arguments import TEXT, WHOLE, check_arguments, list_of, optional
from ringspan.errors import ScheduleError, ShapeError
from ringspan.schedule.actions import (
    A_SCHEDULE,
    ALL,
    INPUTS,
    SUMS,
    AllMerge,
    Attend,
    Block,
    Heads,
    Schedule,
    Step,
    Transfer,
)

_BLOCK = re.compile(r"(?P<kind>[a-z_]+)(?P<owner>\d+|\*)(?:\[(?P<start>\d+):(?P<stop>\d+)\])?")
_HEADER = re.compile(r"(?P<ranks>\d+) ranks?(?:, heads (?P<heads>\d+)/(?P<kv_heads>\d+))?")


def format_schedule(schedule: Schedule, steps: range | None = None, marked: int | None = None) -> str:
    """Write a schedule as a grid.

    Args:
        schedule: The schedule.
        steps: The steps to write; all by default.
        marked: A step to mark with an arrow.
    """
    check_arguments(
        schedule=(A_SCHEDULE, schedule), steps=(optional(list_of(WHOLE)), steps), marked=(optional(WHOLE), marked)
    )
    if steps is not None and not all(0 <= t < schedule.num_steps for t in steps):
        remedy = f"use some of range({schedule.num_steps})"
        raise ShapeError("the schedule has no such step", argument="steps", value=steps, remedy=remedy)
    heads = "" if schedule.heads is None else f", heads {schedule.heads.num_heads}/{schedule.heads.num_kv_heads}"
    shown = range(schedule.num_steps) if steps is None else steps
    rows = [["step", *(f"rank {rank}" for rank in range(schedule.world_size))]]
    rows += [[str(t), *_cells(schedule.step(t), schedule.world_size)] for t in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" │ ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if marked is not None:
        lines = [("▶ " if row[0] == str(marked) else "  ") + line for row, line in zip(rows, lines, strict=True)]
    plural = "" if schedule.world_size == 1 else "s"
    return "\n".join([f"{schedule.world_size} rank{plural}{heads}", *lines])


def parse_schedule(text: str) -> Schedule:
    """Read a schedule from the grid that `format_schedule` writes.

    Raises:
        ScheduleError: The text is not a complete grid; the message names the line and the expected form.
    """
    check_arguments(text=(TEXT, text))
    lines = [line for line in text.strip().splitlines() if line.strip()]
    world_size, heads = _parse_header(lines[0] if lines else "")
    columns = [cell.strip() for cell in lines[1].split("│")] if len(lines) > 1 else []
    wanted = ["step", *(f"rank {rank}" for rank in range(world_size))]
    if columns != wanted:
        found = lines[1].strip() if len(lines) > 1 else ""
        raise ScheduleError(
            f"the second line is {found!r}; it must name the columns, {' │ '.join(wanted)!r}, unwrapped"
        )
    return Schedule.of_steps(world_size, heads, [_parse_step(line, t, world_size) for t, line in enumerate(lines[2:])])


def _parse_header(line: str) -> tuple[int, Heads | None]:
    match = _HEADER.fullmatch(line.strip())
    if match is None or not int(match["ranks"]):
        raise ScheduleError(
            f"the grid begins with {line!r}; its first line must be like '4 ranks' or '4 ranks, heads 8/2'"
        )
    if match["heads"] is None:
        return int(match["ranks"]), None
    heads = Heads(int(match["heads"]), int(match["kv_heads"]))
    if not heads.num_kv_heads or not heads.num_heads or heads.num_heads % heads.num_kv_heads:
        raise ScheduleError(f"heads {match['heads']}/{match['kv_heads']}: query heads are a multiple of the KV heads")
    return int(match["ranks"]), heads


def _cells(step: Step, world_size: int) -> Iterable[str]:
    for rank in range(world_size):
        attends, sends, _, merges = step.actions(rank)
        yield " ".join(map(str, (*attends, *sends, *merges)))


def _parse_step(line: str, t: int, world_size: int) -> Step:
    number, *cells = (cell.strip() for cell in line.split("│"))
    if number != str(t) or len(cells) != world_size:
        raise ScheduleError(
            f"line {line!r}: expected step {t} and {world_size} cells, one per rank, separated by │; "
            f"found step {number!r} and {len(cells)} cells"
        )
    attends: list[list[Attend]] = [[] for _ in range(world_size)]
    merges: list[list[AllMerge]] = [[] for _ in range(world_size)]
    transfers = []
    for rank, cell in enumerate(cells):
        for word in cell.split():
            match _parse_action(word, rank):
                case Attend() as attend:
                    attends[rank].append(attend)
                case Transfer() as transfer:
                    transfers.append(transfer)
                case AllMerge() as merge:
                    merges[rank].append(merge)
    if any(of_rank != merges[0] for of_rank in merges):
        words = " ".join(map(str, next(filter(None, merges))))
        raise ScheduleError(f"line {line!r}: {words} is an action of all ranks", remedy="write it into every cell")
    return Step(attends, transfers, merges[0])


def _parse_action(word: str, rank: int) -> Attend | Transfer | AllMerge:
    left, mark, right = next((word.partition(mark) for mark in "×→↔" if mark in word), (word, "", ""))
    if mark == "×":
        return Attend(_parse_blocks(left), _parse_blocks(right))
    if mark == "→" and right.isdecimal():
        return Transfer(_parse_block(left), rank, int(right))
    if mark == "↔" and right == "all":
        return AllMerge(_parse_block(left))
    raise ScheduleError(f"{word!r} is not an action; an action is like 'q0×kv3', 'kv3→1' or 'out*↔all'")


def _parse_blocks(text: str) -> tuple[Block, ...]:
    return tuple(map(_parse_block, text.split(",")))


def _parse_block(text: str) -> Block:
    match = _BLOCK.fullmatch(text)
    if match is None or match["kind"] not in INPUTS | SUMS:
        raise ScheduleError(
            f"{text!r} is not a block; a block is a kind ({', '.join(sorted(INPUTS | SUMS))}), an owner (a rank or *) "
            "and optionally heads, like 'kv3', 'q*' or 'q1[0:4]'"
        )
    heads = range(int(match["start"]), int(match["stop"])) if match["start"] else None
    return Block(match["kind"], ALL if match["owner"] == "*" else int(match["owner"]), heads)  # type: ignore[arg-type]

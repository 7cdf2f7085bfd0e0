"""What does a rank obey? Commands made of integers, of one form: an operation and parts (slot, keep, tokens).

RUN crops the cache of each part's slot to `keep` tokens and runs the model on the new tokens of all parts together.
Decode of several conversations, prefill in chunks and the reuse of a prefix are all that command, and a request is
cancelled by sending no further part for it. Rank 0 sends commands and obeys them like the others.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringspan.adapters.transformers import Handle
from ringspan.errors import RingspanError

_HEADER = 64  # integers that one message carries: a decode step of 15 conversations


class Op(IntEnum):
    """The operation of a command."""

    NOTHING = 0  # shows that rank 0 lives
    RUN = 1
    DROP = 2
    END = 3
    SAVE = 4  # `keep` is the number of the saved conversation, the token the length that the slot is cut to first
    LOAD = 5  # `keep` is the same, the token the slot that it was saved from


class SlotPart(NamedTuple):
    slot: int
    keep: int = 0
    tokens: Sequence[int] = ()


class RankCommand(NamedTuple):
    op: Op
    parts: Sequence[SlotPart] = ()


class CommandLine:
    """Sends commands from rank 0 to all ranks, in a separate process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, command: RankCommand) -> None:
        """Send a command from rank 0. A short command is a single message."""
        numbers = _encode(command)
        header = [len(numbers), *numbers[: _HEADER - 1]]
        dist.broadcast(torch.tensor(header + [0] * (_HEADER - len(header))), 0, group=self._group)
        if len(numbers) >= _HEADER:
            dist.broadcast(torch.tensor(numbers[_HEADER - 1 :]), 0, group=self._group)

    def receive(self) -> RankCommand:
        """Receive a command on another rank."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._group)
        count, *numbers = header.tolist()
        if count >= _HEADER:
            rest = torch.zeros(count - _HEADER + 1, dtype=torch.int64)
            dist.broadcast(rest, 0, group=self._group)
            numbers += rest.tolist()
        return _decode(numbers)

    def all_did(self, mine: bool) -> bool:
        """Whether all ranks succeeded; every rank reports for itself."""
        flag = torch.tensor([int(mine)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)


def _encode(command: RankCommand) -> list[int]:
    numbers = [int(command.op), len(command.parts)]
    for part in command.parts:
        numbers += [part.slot, part.keep, len(part.tokens), *part.tokens]
    return numbers


def _decode(numbers: list[int]) -> RankCommand:
    op, count, at = numbers[0], numbers[1], 2
    parts = []
    for _ in range(count):
        slot, keep, size = numbers[at : at + 3]
        parts.append(SlotPart(slot, keep, numbers[at + 3 : at + 3 + size]))
        at += 3 + size
    return RankCommand(Op(op), parts)


class RankModel:
    """The model of one rank and its part of every slot's cache."""

    def __init__(self, handle: Handle, line: CommandLine, storage: str | None, folder: str | None) -> None:
        self._handle = handle
        self._line = line
        self._folder = None if folder is None else Path(folder)
        self.cache = handle.cache(storage=storage)

    @property
    def chosen(self) -> tuple[str, str]:
        """The algorithm of the last run, and why it was chosen."""
        turn = self._handle.last_turn
        assert turn is not None
        return turn

    def obey(self, command: RankCommand) -> dict[int, torch.Tensor]:
        """Execute a command: RUN returns the logits of each slot's last token, SAVE and LOAD those that succeeded."""
        match command.op:
            case Op.RUN:
                return self._run(command.parts)
            case Op.DROP:
                for part in command.parts:
                    self.cache.drop(part.slot)
            case Op.SAVE:
                return self._each(command.parts, self._save)
            case Op.LOAD:
                return self._each(command.parts, self._load)
            case _:
                pass
        return {}

    def _run(self, parts: Sequence[SlotPart]) -> dict[int, torch.Tensor]:
        lengths = self.cache.lengths
        for part in parts:
            if lengths.get(part.slot, 0) != part.keep:
                self.cache.truncate(part.slot, part.keep)
        return self._handle.step(self.cache, {part.slot: part.tokens for part in parts})

    def _each(self, parts: Sequence[SlotPart], work: Callable[[Path, SlotPart], None]) -> dict[int, torch.Tensor]:
        """Run an operation for each slot. A full disk or a damaged file does not end the ranks; a lost rank does."""
        assert self._folder is not None
        done = {}
        for part in parts:
            try:
                work(saved_folder(self._folder, part.keep), part)
                is_done = True
            except (RingspanError, OSError):
                is_done = False
            if self._line.all_did(is_done):
                done[part.slot] = torch.ones(1)
        return done

    def _save(self, folder: Path, part: SlotPart) -> None:
        self.cache.truncate(part.slot, part.tokens[0])
        self.cache.save(folder, sequences=[part.slot])

    def _load(self, folder: Path, part: SlotPart) -> None:
        self.cache.load(folder, numbers={part.tokens[0]: part.slot})


def saved_folder(folder: Path, number: int) -> Path:
    return folder / f"conversation-{number:016x}"

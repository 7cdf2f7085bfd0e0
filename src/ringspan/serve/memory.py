"""Where are conversations remembered? In slots of the cache, and, if there is a folder for them, on disk.

A conversation that must leave the cache is saved first, unless the disk has it. A prompt that continues a saved
conversation further than any slot gets it loaded into a slot of its own.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ringspan.serve.archive import Archive
from ringspan.serve.commands import Op, RankCommand, SlotPart
from ringspan.serve.frames import Frame
from ringspan.serve.slots import SlotBook

log = logging.getLogger("ringspan.serve")
Command = Callable[[RankCommand], dict[int, torch.Tensor]]


class Remembered(NamedTuple):
    """The slot of a prompt, and how many of its first tokens are cached."""

    slot: int
    keep: int


class ConversationMemory:
    """The book of slots and the archive."""

    def __init__(self, book: SlotBook, archive: Archive | None) -> None:
        self._book = book
        self._archive = archive
        self._counts: Counter[str] = Counter()

    def place(self, tokens: Sequence[int], num_total: int, command: Command) -> Remembered | None:
        """A slot for a prompt, with its cached tokens; None if there is no room now."""
        found = self._book.find(tokens)
        saved, num_saved = (0, 0) if self._archive is None else self._archive.find(tokens)
        if self._archive is None or num_saved <= found[1] or self._archive.length(saved) > self._book.max_tokens:
            place = self._book.place(tokens, num_total, found)
            if place is not None:
                self._evict(place.evicted, command)
            return None if place is None else Remembered(place.slot, place.keep)
        # All of it is loaded, and cut then; what a server with a larger cache has saved may have no room here.
        place = self._book.place(tokens, max(num_total, self._archive.length(saved)), (0, 0))
        if place is None:
            return None
        held = self._archive.tokens(saved)
        self._evict(place.evicted, command)
        is_loaded = command(RankCommand(Op.LOAD, [SlotPart(place.slot, saved, [self._archive.slot(saved)])]))
        if not is_loaded:
            log.warning("a saved conversation could not be loaded; it is computed anew")
            self._archive.remove(saved)
            return Remembered(place.slot, 0)
        self._counts["loads"] += 1
        self._book.extend(place.slot, held)
        self._book.cut(place.slot, num_saved)
        return Remembered(place.slot, num_saved)

    def length(self, slot: int) -> int:
        """The number of tokens in a slot."""
        return self._book.length(slot)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Record computed tokens of a slot."""
        self._book.extend(slot, tokens)

    def release(self, slot: int) -> None:
        """Release the slot of a request that ended."""
        self._book.release(slot)

    def save_all(self, command: Command) -> None:
        """Save every conversation, at the end."""
        for slot, tokens in self._book.idle.items():
            self._save(slot, tokens, command)

    def figures(self) -> Frame:
        """Counters since the last call, and the bytes in use."""
        counts, self._counts = self._counts, Counter()
        return {"counts": dict(counts), "cache_bytes": self._book.nbytes}

    def _evict(self, evicted: Sequence[tuple[int, "array[int]"]], command: Command) -> None:
        for slot, tokens in evicted:
            self._save(slot, tokens, command)
            command(RankCommand(Op.DROP, [SlotPart(slot)]))
            self._counts["evictions"] += 1

    def _save(self, slot: int, tokens: "array[int]", command: Command) -> None:
        if self._archive is None or self._archive.holds(tokens):
            return
        number = self._archive.new_number()
        if not command(RankCommand(Op.SAVE, [SlotPart(slot, number, [len(tokens)])])):
            log.warning("a conversation could not be saved; it will be computed anew")
            self._archive.remove(number)
            return
        try:
            self._archive.note(number, slot, tokens)
            self._counts["saves"] += 1
        except OSError as error:
            log.warning("a conversation could not be saved: %s", type(error).__name__)
            self._archive.remove(number)

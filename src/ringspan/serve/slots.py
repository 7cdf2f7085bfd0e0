"""Which conversation does a prompt continue, how much of it is cached already, and which must go to make room?

Rank 0 keeps this book. A slot is one conversation's cache on all ranks; the book knows its tokens and an upper bound of
its memory on any rank, so that the budget holds without asking the ranks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

SPARE = 256
"""Tokens of spare room that a cache keeps behind a sequence, and a quarter of its length."""


@dataclass(slots=True)
class _Slot:
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    peak: int = 0
    """Upper bound of the tokens that a rank has ever held: memory is freed in large blocks only."""


class SlotPlace(NamedTuple):
    """Where a prompt is computed."""

    slot: int
    keep: int
    """Tokens at its beginning that are cached."""


class SlotBook:
    """The conversations in the cache, least recently used first."""

    def __init__(self, num_ranks: int, bytes_per_token: int, budget_bytes: int) -> None:
        self._num_ranks = num_ranks
        self._bytes_per_token = bytes_per_token
        self._budget_bytes = budget_bytes
        self._slots: dict[int, _Slot] = {}
        self._next = 1

    @property
    def max_tokens(self) -> int:
        """The longest conversation that fits the budget by itself."""
        per_rank = (self._budget_bytes // self._bytes_per_token - SPARE) * 4 // 5
        return max(0, per_rank) * self._num_ranks

    @property
    def nbytes(self) -> int:
        """Upper bound of the memory in use on any rank."""
        return sum(self._bytes(slot.peak) for slot in self._slots.values())

    def length(self, slot: int) -> int:
        """The tokens in a slot."""
        return len(self._slots[slot].tokens)

    def place(self, tokens: Sequence[int]) -> SlotPlace:
        """The slot with the longest common prefix, cut there.

        A slot that would lose half of its tokens stays as it is and a new one is begun: two conversations with the same
        system prompt do not destroy each other. At least one token is left to compute, since it says what comes next.
        """
        wanted = np.array(tokens, np.int64)
        found = {number: _common(slot.tokens, wanted) for number, slot in self._slots.items()}
        number = max(found, key=found.__getitem__, default=0)
        keep = min(found.get(number, 0), len(tokens) - 1)
        if not keep or 2 * keep < len(self._slots[number].tokens):
            number, keep, self._next = self._next, 0, self._next + 1
            self._slots[number] = _Slot()
        slot = self._slots[number] = self._slots.pop(number)  # now the most recently used
        del slot.tokens[keep:]
        return SlotPlace(number, keep)

    def make_room(self, number: int, num_new: int) -> list[int]:
        """Count in room for new tokens of a slot; returns the slots that must be dropped first."""
        slot = self._slots[number]
        # New tokens level the ranks, so none holds more than its share unless it did before.
        slot.peak = max(slot.peak, -(-(len(slot.tokens) + num_new) // self._num_ranks))
        dropped = []
        for other in [*self._slots]:
            if self.nbytes <= self._budget_bytes:
                break
            if other != number:
                dropped.append(other)
                del self._slots[other]
        assert self.nbytes <= self._budget_bytes, "admitted a conversation that does not fit"
        return dropped

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Tokens that were computed."""
        self._slots[number].tokens.extend(tokens)

    def _bytes(self, peak: int) -> int:
        return self._bytes_per_token * (SPARE + peak + -(-peak // 4))


def _common(held: "array[int]", wanted: np.ndarray) -> int:
    """The length of the common prefix."""
    size = min(len(held), len(wanted))
    if not size:  # which frombuffer refuses
        return 0
    differs = np.flatnonzero(np.frombuffer(held, np.int64)[:size] != wanted[:size])
    return int(differs[0]) if len(differs) else size

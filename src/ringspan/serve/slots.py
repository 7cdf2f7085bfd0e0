"""Which conversation does a prompt continue, how much of it is cached already, and which must go to make room?

Rank 0 keeps this book. A slot is one conversation's cache on all ranks; the book knows its tokens and an upper bound of
its memory on any rank, so that the budget holds without asking the ranks. A slot in use counts with all tokens that its
request may still generate: no answer that was begun runs out of room, and no slot in use is evicted.
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
    reserved: int = 0
    """Tokens that a rank will hold at most when the request under way is through."""
    is_used: bool = False


class SlotPlace(NamedTuple):
    """The slot in which a prompt is computed, and its cached tokens."""

    slot: int
    keep: int
    """Tokens at its beginning that are cached."""
    evicted: tuple[tuple[int, "array[int]"], ...]
    """Slots that must be dropped first, and their tokens."""


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
        """Upper bound of the memory in use on any rank, with what is reserved."""
        return sum(map(self._bytes, self._slots.values()))

    @property
    def idle(self) -> dict[int, "array[int]"]:
        """The tokens of each slot that is not in use."""
        return {number: slot.tokens for number, slot in self._slots.items() if not slot.is_used}

    def length(self, slot: int) -> int:
        """The number of tokens in a slot."""
        return len(self._slots[slot].tokens)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The idle slot with the longest common prefix, and its length; 0 if no slot is worth cutting.

        A slot that would lose half of its tokens stays as it is: two conversations with the same system prompt do not
        destroy each other. At least one token is left to compute, since it says what comes next.
        """
        return longest(self.idle, tokens)

    def place(self, tokens: Sequence[int], num_total: int, found: tuple[int, int] | None = None) -> SlotPlace | None:
        """Take a slot into use for a request that ends with `num_total` tokens at most; None if there is no room now.

        Args:
            tokens: The prompt.
            num_total: Prompt and answer.
            found: What `find` gave; (0, 0) begins a new slot.
        """
        number, keep = self.find(tokens) if found is None else found
        slot = self._slots.get(number, _Slot())
        reserved = -(-num_total // self._num_ranks)
        room = self._budget_bytes - self._bytes_of(max(slot.peak, reserved))
        evicted = self._choose(number, room)
        if evicted is None:
            return None
        if not keep:
            number, self._next = self._next, self._next + 1
        dropped = tuple((other, self._slots.pop(other).tokens) for other in evicted)
        self._slots.pop(number, None)
        self._slots[number] = slot  # now the most recently used
        slot.reserved, slot.is_used = reserved, True
        del slot.tokens[keep:]
        return SlotPlace(number, keep, dropped)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Record computed or loaded tokens of a slot."""
        slot = self._slots[number]
        slot.tokens.extend(tokens)
        # New tokens level the ranks, so none holds more than its share unless it did before.
        slot.peak = max(slot.peak, -(-len(slot.tokens) // self._num_ranks))

    def cut(self, number: int, keep: int) -> None:
        """Remove the tokens of a slot after the first `keep`."""
        del self._slots[number].tokens[keep:]

    def release(self, number: int) -> None:
        """Release the slot of a request that ended; a slot without computed tokens is removed."""
        slot = self._slots[number]
        slot.reserved, slot.is_used = 0, False
        if not slot.peak:
            del self._slots[number]

    def _choose(self, kept: int, room: int) -> list[int] | None:
        """Idle slots to evict, oldest first, so that the other slots fit into the budget; None if they cannot."""
        others = {number: self._bytes(slot) for number, slot in self._slots.items() if number != kept}
        used, evicted = sum(others.values()), []
        for number, size in others.items():
            if used <= room:
                break
            if not self._slots[number].is_used:
                evicted.append(number)
                used -= size
        return evicted if used <= room else None

    def _bytes(self, slot: _Slot) -> int:
        return self._bytes_of(max(slot.peak, slot.reserved))

    def _bytes_of(self, peak: int) -> int:
        return self._bytes_per_token * (SPARE + peak + -(-peak // 4))


def longest(known: "dict[int, array[int]]", tokens: Sequence[int]) -> tuple[int, int]:
    """The conversation with the longest common prefix, of those that keep half of their tokens; (0, 0) if none does."""
    wanted = np.array(tokens, np.int64)
    found = {number: min(_common(held, wanted), len(tokens) - 1) for number, held in known.items()}
    kept = {number: keep for number, keep in found.items() if keep and 2 * keep >= len(known[number])}
    return max(kept.items(), key=lambda item: item[1], default=(0, 0))


def _common(held: "array[int]", wanted: np.ndarray) -> int:
    """The length of the common prefix."""
    size = min(len(held), len(wanted))
    if not size:  # which frombuffer refuses
        return 0
    differs = np.flatnonzero(np.frombuffer(held, np.int64)[:size] != wanted[:size])
    return int(differs[0]) if len(differs) else size

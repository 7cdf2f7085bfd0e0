"""What does a rank obey? One command, made of integers: RUN(slot, keep, tokens).

The rank crops the slot's cache to `keep` tokens and runs the model on the new ones. Prefill in chunks, decode and the
reuse of a prefix are all that command, and a request is cancelled by sending no further one. Rank 0 sends commands and
obeys them like the others.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers import DynamicCache, PreTrainedModel

from ringspan.adapters.transformers import Handle


class Op(IntEnum):
    """What to do."""

    NOTHING = 0  # shows that rank 0 lives
    RUN = 1
    DROP = 2
    END = 3


class RankCommand(NamedTuple):
    """What all ranks do next."""

    op: Op
    slot: int = 0
    keep: int = 0
    tokens: Sequence[int] = ()


class CommandLine:
    """Carries commands from rank 0 to all ranks, in a group of its own."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, command: RankCommand) -> None:
        """On rank 0. A single token travels in the header."""
        tokens = command.tokens
        header = (command.op, command.slot, command.keep, len(tokens), tokens[0] if tokens else 0)
        dist.broadcast(torch.tensor(header, dtype=torch.int64), 0, group=self._group)
        if len(tokens) > 1:
            dist.broadcast(torch.tensor(tokens, dtype=torch.int64), 0, group=self._group)

    def receive(self) -> RankCommand:
        """On the other ranks."""
        header = torch.zeros(5, dtype=torch.int64)
        dist.broadcast(header, 0, group=self._group)
        op, slot, keep, count, first = header.tolist()
        if count <= 1:
            return RankCommand(Op(op), slot, keep, [first][:count])
        tokens = torch.zeros(count, dtype=torch.int64)
        dist.broadcast(tokens, 0, group=self._group)
        return RankCommand(Op(op), slot, keep, tokens.tolist())


class RankModel:
    """The model of one rank and its part of every slot's cache."""

    def __init__(self, model: PreTrainedModel, handle: Handle) -> None:
        self._model = model
        self._handle = handle
        self._caches: dict[int, DynamicCache] = {}

    @property
    def chosen(self) -> tuple[str, str]:
        """The algorithm of the last run, and why it was chosen."""
        turn = self._handle.last_turn
        assert turn is not None
        return turn

    def obey(self, command: RankCommand) -> torch.Tensor | None:
        """Do it; a RUN gives the logits of its last token, (vocabulary,)."""
        if command.op is Op.DROP:
            self._caches.pop(command.slot, None)
        return self._run(command) if command.op is Op.RUN else None

    def _run(self, command: RankCommand) -> torch.Tensor:
        cache = self._caches.setdefault(command.slot, DynamicCache())
        extra = cache.get_seq_length() - command.keep
        assert extra >= 0
        if extra:
            cache.crop(-extra)
        positions = torch.arange(command.keep, command.keep + len(command.tokens))[None]
        output = self._model(
            torch.tensor([command.tokens], dtype=torch.int64),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits

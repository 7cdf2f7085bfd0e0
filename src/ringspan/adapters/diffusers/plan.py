"""The plan of a model: for each call of a block, the dims and integers that follow its tokens, and its attention calls.

A sequence of "tokens" is split over the ranks. Whatever else stands in front of it or behind it in a tensor, such as
the tokens of a prompt, every rank holds. Nothing here depends on how many tokens there are, nor on the rank: ranks
compare their plans as texts.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ringspan.adapters.diffusers.leaves import SizePlace


class Side(NamedTuple):
    """The number of rows before and after the tokens along a dim."""

    has_others: bool
    others_first: bool = False


ONLY_TOKENS = Side(False)


class TokenDim(NamedTuple):
    """The dim of a tensor that follows the tokens."""

    dim: int
    side: Side
    is_shard: bool  # a rank has its own rows only: made of other blocks' outputs, and not gathered


class Attends(NamedTuple):
    """A call of attention; a side that has no tokens is None, and every rank holds it."""

    q: Side | None
    keys: Side | None

    @property
    def is_local(self) -> bool:
        """Whether every rank holds all keys."""
        return self.keys is None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One call of a block."""

    name: str
    tensors: tuple[str, ...]  # the paths of all tensors among its arguments
    tokens: dict[str, TokenDim]  # by the path of an argument
    outputs: dict[str, TokenDim]
    counts: tuple[str, ...]  # ints that may count tokens from the first one on
    attends: tuple[Attends, ...]

    @property
    def takes_part(self) -> bool:
        """Whether the block receives tokens."""
        return bool(self.tokens)


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """All calls of blocks in one forward, in order."""

    calls: tuple[AttentionPlan, ...]
    cut_counts: tuple[str, ...]  # the names of ints that do count tokens
    fixed: dict[SizePlace, int]  # sizes of the model's arguments that were not changed while learning

    def describe(self) -> str:
        """In a line; every rank runs the blocks that are not split on all tokens."""
        mine = [call for call in self.calls if call.takes_part]
        kinds: dict[str, int] = {}
        for attends in (x for call in mine for x in call.attends):
            kinds[describe_attends(attends)] = kinds.get(describe_attends(attends), 0) + 1
        number = len(mine) if len(mine) == len(self.calls) else f"{len(mine)} of {len(self.calls)}"
        return f"{number} blocks; " + ", ".join(f"{number} × {kind}" for kind, number in kinds.items())


def describe_attends(attends: Attends) -> str:
    """The kind of a call of attention, in words."""
    if attends.keys is None:
        return "local" if attends.q is None else "cross"
    if attends.q is None:
        return "replicated queries"
    if attends.q == attends.keys:
        where = "before" if attends.q.others_first else "behind"
        return f"joint, text {where}" if attends.q.has_others else "self"
    return "mixed"

"""How do sequences of different lengths run through a model together?

The new tokens of all sequences are concatenated without padding, each at its own position. If every sequence has one
new token, as in decode, all ranks compute all of them; otherwise each rank computes a part. Sequences join with their
first tokens and leave when the caller drops them: no step depends on which sequences were in the one before.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ringspan.adapters.transformers.cache import Conversation, ShardedCache
from ringspan.adapters.transformers.layers import AttentionLayer
from ringspan.adapters.transformers.shards import ShardOptions
from ringspan.adapters.transformers.turns import Begun, Keep, TurnRun, share_out
from ringspan.arguments import WHOLE, list_of
from ringspan.errors import CacheError, ShapeError
from ringspan.runtime.contract import describe

_TOKENS = list_of(WHOLE)


class NewTokensOf(NamedTuple):
    """The checked new tokens of each sequence."""

    conversation: Conversation
    by_sequence: dict[int, list[int]]


def check_step(cache: object, new: Mapping[int, Sequence[int]], model: PreTrainedModel, owner: object) -> NewTokensOf:
    """Refuse a step that cannot be computed."""
    if not isinstance(cache, ShardedCache) or cache.conversation.owner is not owner:
        raise CacheError(
            f"step takes a cache of this model, got {type(cache).__name__}",
            argument="cache",
            remedy="use handle.cache()",
        )
    size = num_tokens_known(model)
    if not isinstance(new, Mapping) or not new:
        raise ShapeError("a step has at least one sequence", argument="new", remedy="give {sequence: tokens}")
    by_sequence = {}
    for sequence, tokens in new.items():
        known = [operator.index(token) for token in tokens] if _TOKENS.holds(tokens) else []
        if not known or not all(0 <= token < size for token in known):
            raise ShapeError(
                f"the new tokens of a sequence are one or more numbers below {size}",
                argument=f"new[{sequence}]",
                remedy="give tokens of the model",
            )
        by_sequence[sequence] = known
    cache.conversation.as_sequences()
    return NewTokensOf(cache.conversation, by_sequence)


def num_tokens_known(model: PreTrainedModel) -> int:
    """The size of the vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    return int(embeddings.weight.shape[0])


def begin_step(
    new: NewTokensOf,
    options: ShardOptions,
    layers: Mapping[nn.Module, AttentionLayer],
    device: torch.device,
    *,
    keeps_all: bool,
) -> Begun:
    """Deal the new tokens to the ranks and begin a turn; `keeps_all` if the model computes the logits of all tokens."""
    kv = new.conversation.kv
    cached = kv.lengths
    lengths = {sequence: len(tokens) for sequence, tokens in new.by_sequence.items()}
    starts = {sequence: cached.get(sequence, 0) for sequence in lengths}
    turn = share_out(kv, lengths, starts, options, is_shared=max(lengths.values()) > 1)
    ids = np.concatenate([np.array(tokens, np.int64) for tokens in new.by_sequence.values()])
    positions = np.concatenate([np.arange(starts[each], starts[each] + lengths[each]) for each in lengths])
    mine = turn.layout.positions(options.rank)
    inputs = {
        name: torch.from_numpy(x[mine])[None].to(device)
        for name, x in (("input_ids", ids), ("position_ids", positions))
    }
    # No columns: the lengths of the sequences are those of the KVCache.
    columns = np.zeros((0, 0), np.bool_)
    run = TurnRun(
        options,
        layers,
        new.conversation,
        turn,
        columns,
        False,
        kv.dtype,
        inputs["position_ids"][0],
        torch.from_numpy(positions[mine]),
        None,
    )
    new.conversation.run = run
    turn.said = describe({"tokens": ids})
    is_kept = np.ones(len(ids), np.bool_) if keeps_all else _is_last(lengths)
    return Begun(inputs, run, Keep.of(is_kept, np.ones((1, int(is_kept.sum())), np.bool_), turn.layout))


def by_sequence(new: NewTokensOf, logits: torch.Tensor) -> dict[int, Any]:
    """The logits of each sequence's last token, (vocabulary,), from those of the kept tokens, (1, kept, vocabulary)."""
    lengths = {sequence: len(tokens) for sequence, tokens in new.by_sequence.items()}
    if logits.shape[1] == len(lengths):
        return dict(zip(lengths, logits[0], strict=True))
    return dict(zip(lengths, logits[0, torch.from_numpy(np.flatnonzero(_is_last(lengths)))], strict=True))


def _is_last(lengths: Mapping[int, int]) -> Any:
    is_last = np.zeros(sum(lengths.values()), np.bool_)
    is_last[np.cumsum([*lengths.values()]) - 1] = True
    return is_last

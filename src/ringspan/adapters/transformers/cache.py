"""Which cache do the layers of a model write, and which one can a caller make, look into and save?"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from ringspan.adapters.transformers.masks import Tokens
from ringspan.cache import KVCache
from ringspan.errors import CacheError, UnsupportedError


class Updated(Protocol):
    """A run that learns which layer of a cache is next."""

    pending: int | None

    def end(self, is_done: bool) -> None:
        """Commit the run's tokens, or drop them."""


class Conversation:
    """The state that the layers of one cache share."""

    def __init__(self, kv: Any, owner: object) -> None:
        self.kv: KVCache = kv
        self.owner = owner  # the adapter of the model that the cache belongs to
        self.columns: Tokens = np.zeros((0, 0), np.bool_)  # (batch, columns so far): which are tokens
        self.run: Updated | None = None
        self.whole: EncoderDecoderCache | None = None  # the cache that this is the decoder's half of
        self.num_encoded = 0  # columns of the encoder's sequence

    @property
    def num_columns(self) -> int:
        """The length of each row, padding included; transformers calls it the length of a cache."""
        return int(self.columns.shape[1])

    def forget_run(self) -> None:
        """Drop the tokens of an interrupted run."""
        if self.run is not None:
            self.run.end(is_done=False)

    def extend(self, new: Tokens) -> None:
        self.columns = np.concatenate([self.columns, new], 1) if self.num_columns else new

    def check_rows(self) -> None:
        """Refuse what needs rows of equal length on sequences that `handle.step` or `load` made."""
        if self.kv.lengths and not self.num_columns:
            raise CacheError("past_key_values holds sequences of handle.step; continue them with handle.step")

    def as_sequences(self) -> None:
        """Let go of the columns, so that each row can go on by itself."""
        self.forget_run()
        if not self.columns.all():
            raise CacheError("the rows of this cache have padding; step and save take rows without")
        self.columns = np.zeros((0, 0), np.bool_)

    def crop(self, num_columns: int) -> None:
        self.forget_run()
        self.check_rows()
        columns = self.columns[:, :num_columns]
        for row, length in enumerate(columns.sum(1).tolist()):
            if row in self.kv.lengths:
                self.kv.truncate(row, length)
        self.columns = columns

    def select(self, rows: list[int]) -> None:
        """Make row i a copy of row rows[i]."""
        self.forget_run()
        self.check_rows()
        if self.num_columns:
            self.kv.select(rows)
            self.columns = self.columns[rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Conversation":
        """Copy the cache, for example to continue one prompt more than once; each rank copies its part."""
        self.forget_run()
        memo[id(self)] = twin = Conversation(self.kv.copy(), self.owner)
        twin.columns, twin.num_encoded = self.columns, self.num_encoded
        twin.whole = copy.deepcopy(self.whole, memo)
        return twin

    def forget_encoded(self) -> None:
        """Empty the encoder's half."""
        self.num_encoded = 0
        if self.whole is not None:
            self.whole.cross_attention_cache = DynamicCache()
            self.whole.is_updated.clear()

    def clear(self) -> None:
        self.forget_run()
        self.forget_encoded()
        for row in [*self.kv.lengths]:
            self.kv.drop(row)
        self.columns = np.zeros((0, 0), np.bool_)


class ShardedLayer(CacheLayerMixin):
    """One layer of a sharded cache; the first layer does the work that concerns all layers."""

    is_sliding = False
    is_croppable = True

    def __init__(self, conversation: Conversation, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conversation = conversation
        self.index = index
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values unchanged; attention stores them."""
        if self.conversation.run is None:
            raise UnsupportedError(
                "update of a sharded cache outside of its model's forward", remedy="call the model itself"
            )
        self.conversation.run.pending = self.index
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing; the KVCache allocates storage."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of all keys."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the length over all ranks."""
        return self.conversation.num_columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.index == 0:
            self.conversation.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns; the number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}): the tokens to remove are a negative number; to keep {tokens_to_remove}, "
                f"crop({tokens_to_remove} - cache.get_seq_length())"
            )
        if self.index == 0 and tokens_to_remove:
            self.conversation.crop(max(0, self.get_seq_length() + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.index == 0:
            rows = torch.arange(len(self.conversation.columns))[indices.cpu()]
            self.conversation.select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0:
            self.conversation.select([row for row in range(len(self.conversation.columns)) for _ in range(repeats)])

    def offload(self) -> None:
        """Refuse offloading: each rank keeps its part on the device of its model."""
        raise UnsupportedError("a sharded cache cannot be offloaded", remedy="leave out offloading")

    prefetch = offload


def open_cache(cache: Cache, make_kv: Any, owner: object, num_layers: int) -> Conversation:
    """Return the conversation of a cache; make an empty DynamicCache sharded."""
    layers = getattr(cache, "layers", [])
    if layers and all(isinstance(layer, ShardedLayer) for layer in layers):
        conversation: Conversation = layers[0].conversation
        if conversation.owner is not owner:
            raise CacheError("past_key_values: the cache belongs to another parallelized model, or to a restored one")
        conversation.check_rows()
        return conversation
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedError(
            f"past_key_values is a {type(cache).__name__}: only a DynamicCache that is not offloaded can be sharded",
            remedy="leave out cache_implementation",
        )
    if cache.get_seq_length():
        raise CacheError(
            f"past_key_values has {cache.get_seq_length()} tokens, whole on this rank; begin with an empty cache"
        )
    conversation = Conversation(make_kv(), owner)
    cache.layers = [ShardedLayer(conversation, index) for index in range(num_layers)]
    return conversation


def open_encoder_decoder_cache(cache: Cache, make_kv: Any, owner: object, num_layers: int) -> Conversation:
    """Return the conversation of an EncoderDecoderCache; make both halves sharded."""
    if not isinstance(cache, EncoderDecoderCache):
        raise UnsupportedError(
            f"past_key_values is a {type(cache).__name__}: a model with an encoder and a decoder needs an "
            "EncoderDecoderCache"
        )
    is_new = not isinstance(next(iter(cache.self_attention_cache.layers), None), ShardedLayer)
    other = cache.cross_attention_cache
    if is_new and other.get_seq_length():
        raise CacheError("past_key_values has an encoder's tokens, whole on this rank; begin with an empty cache")
    if is_new and (type(other) is not DynamicCache or other.offloading):
        raise UnsupportedError(
            f"past_key_values has a {type(other).__name__} for the encoder: only a DynamicCache that "
            "is not offloaded can be sharded",
            remedy="leave out cache_implementation",
        )
    conversation = open_cache(cache.self_attention_cache, make_kv, owner, num_layers)
    if is_new:
        conversation.whole = cache
        conversation.forget_encoded()
    elif conversation.whole is not cache:
        raise CacheError("past_key_values: its two halves belong to different caches")
    return conversation


class ShardedCache(DynamicCache):
    """One rank's part of a model's cache; made by `handle.cache`. All ranks make the same calls."""

    def __init__(self, conversation: Conversation, num_layers: int) -> None:
        super().__init__()
        self.layers = [ShardedLayer(conversation, index) for index in range(num_layers)]
        self.conversation = conversation

    @property
    def lengths(self) -> dict[int, int]:
        """The tokens of each sequence, over all ranks."""
        return self.conversation.kv.lengths

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part, spare room included."""
        return self.conversation.kv.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token on the rank that holds it, over all layers."""
        return self.conversation.kv.bytes_per_token

    def truncate(self, sequence: int, length: int) -> None:
        """Remove the tokens of a sequence behind the first `length`; no message is sent."""
        self.conversation.as_sequences()
        self.conversation.kv.truncate(sequence, length)

    def drop(self, sequence: int) -> None:
        """Remove a sequence and free its memory; no message is sent."""
        self.conversation.as_sequences()
        self.conversation.kv.drop(sequence)

    def save(self, folder: str | Path, *, sequences: Sequence[int] | None = None) -> None:
        """Write sequences, all by default, into a folder that all ranks can reach; a collective call."""
        columns = self.conversation.columns
        self.conversation.as_sequences()
        self.conversation.kv.save(folder, sequences=sequences)
        self.conversation.columns = columns

    def load(self, folder: str | Path, *, numbers: Mapping[int, int] | None = None) -> None:
        """Add sequences from a folder, saved from any number of ranks; a collective call.

        Sequences 0, 1, … of one length can be continued as the rows of a batch as well.

        Args:
            folder: Where `save` wrote them, of the same model: shapes are compared, weights are not.
            numbers: The number here of each saved sequence to load; by default all, under their own numbers.
        """
        self.conversation.as_sequences()
        self.conversation.kv.load(folder, numbers=numbers)
        lengths = self.lengths
        if sorted(lengths) == [*range(len(lengths))] and len({*lengths.values()}) == 1:
            self.conversation.columns = np.ones((len(lengths), lengths[0]), np.bool_)

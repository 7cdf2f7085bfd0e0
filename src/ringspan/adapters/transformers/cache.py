"""How does a cache of transformers hold its keys and values on ranks?

The layers of an empty DynamicCache are replaced by ours, so whoever made it, generate() or the caller, goes on using
it. Ours store nothing themselves: `update` only tells the run which layer is next, and attention stores and attends
through one KVCache for all layers. Rows are sequences of that cache, and padding is left out of them: `columns` says
which columns of a row are tokens.

What a decoder keeps of its encoder does not grow. Each rank has those of the tokens it encoded, in a plain cache.
"""

import copy
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from ringspan.adapters.transformers.masks import Tokens
from ringspan.cache import KVCache
from ringspan.errors import CacheError, UnsupportedError


class Updated(Protocol):
    """A run that is told which layer of a cache comes next."""

    pending: int | None

    def end(self, is_done: bool) -> None:
        """Count its tokens in, or forget them."""


class Conversation:
    """What the layers of one cache share."""

    def __init__(self, kv: Any, owner: object) -> None:
        self.kv: KVCache = kv
        self.owner = owner  # whose model it is for
        self.columns: Tokens = np.zeros((0, 0), np.bool_)  # (batch, columns so far): which are tokens
        self.run: Updated | None = None
        self.whole: EncoderDecoderCache | None = None  # the cache this is one half of
        self.num_encoded = 0  # columns of the encoder that the other half was made from

    @property
    def num_columns(self) -> int:
        """The length of each row, padding included: what transformers calls the length of a cache."""
        return int(self.columns.shape[1])

    def forget_run(self) -> None:
        """End a run that was interrupted."""
        if self.run is not None:
            self.run.end(is_done=False)

    def extend(self, new: Tokens) -> None:
        """Columns that were added."""
        self.columns = np.concatenate([self.columns, new], 1) if self.num_columns else new

    def crop(self, num_columns: int) -> None:
        """Forget the columns from here on."""
        self.forget_run()
        columns = self.columns[:, :num_columns]
        for row, length in enumerate(columns.sum(1).tolist()):
            if row in self.kv.lengths:
                self.kv.truncate(row, length)
        self.columns = columns

    def select(self, rows: list[int]) -> None:
        """Row i becomes what row rows[i] is."""
        self.forget_run()
        if self.num_columns:
            self.kv.select(rows)
            self.columns = self.columns[rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Conversation":
        """A prefix that is kept, to go on from it more than once: each rank copies its part, without a message."""
        self.forget_run()
        memo[id(self)] = twin = Conversation(self.kv.copy(), self.owner)
        twin.columns, twin.num_encoded = self.columns, self.num_encoded
        twin.whole = copy.deepcopy(self.whole, memo)
        return twin

    def forget_encoded(self) -> None:
        """Empty the other half."""
        self.num_encoded = 0
        if self.whole is not None:
            self.whole.cross_attention_cache = DynamicCache()
            self.whole.is_updated.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.forget_run()
        self.forget_encoded()
        for row in [*self.kv.lengths]:
            self.kv.drop(row)
        self.columns = np.zeros((0, 0), np.bool_)


class ShardedLayer(CacheLayerMixin):
    """One layer of a cache; what concerns all layers is done by the first."""

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
        """The new keys and values as they are: attention stores them."""
        if self.conversation.run is None:
            raise UnsupportedError("update of a sharded cache outside of its model's forward; call the model itself")
        self.conversation.run.pending = self.index
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of all keys."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Of all ranks together."""
        return self.conversation.num_columns

    def get_max_length(self) -> int:
        """There is no limit."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        if self.index == 0:
            self.conversation.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last columns; the number is negative, as transformers has it."""
        if tokens_to_remove > 0:
            raise CacheError(
                f"crop({tokens_to_remove}): the tokens to remove are a negative number; to keep {tokens_to_remove}, "
                f"crop({tokens_to_remove} - cache.get_seq_length())"
            )
        if self.index == 0 and tokens_to_remove:
            self.conversation.crop(max(0, self.get_seq_length() + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows move on, or are copied."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        if self.index == 0:
            rows = torch.arange(len(self.conversation.columns))[indices.cpu()]
            self.conversation.select(rows.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row as often."""
        if self.index == 0:
            self.conversation.select([row for row in range(len(self.conversation.columns)) for _ in range(repeats)])

    def offload(self) -> None:
        """Refused: each rank has its own part where its model is."""
        raise UnsupportedError("a sharded cache cannot be offloaded; leave out offloading")

    prefetch = offload


def open_cache(cache: Cache, make_kv: Any, owner: object, num_layers: int) -> Conversation:
    """The conversation of a cache; an empty DynamicCache becomes a sharded one."""
    layers = getattr(cache, "layers", [])
    if layers and all(isinstance(layer, ShardedLayer) for layer in layers):
        conversation: Conversation = layers[0].conversation
        if conversation.owner is not owner:
            raise CacheError("past_key_values: the cache belongs to another parallelized model, or to a restored one")
        return conversation
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedError(
            f"past_key_values is a {type(cache).__name__}: only a DynamicCache that is not offloaded can be sharded; "
            "leave out cache_implementation"
        )
    if cache.get_seq_length():
        raise CacheError(
            f"past_key_values has {cache.get_seq_length()} tokens, whole on this rank; begin with an empty cache"
        )
    conversation = Conversation(make_kv(), owner)
    cache.layers = [ShardedLayer(conversation, index) for index in range(num_layers)]
    return conversation


def open_encoder_decoder_cache(cache: Cache, make_kv: Any, owner: object, num_layers: int) -> Conversation:
    """The same for the two caches of a decoder with an encoder."""
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
            f"past_key_values has a {type(other).__name__} for the encoder: only a DynamicCache that is not offloaded "
            "can be sharded; leave out cache_implementation"
        )
    conversation = open_cache(cache.self_attention_cache, make_kv, owner, num_layers)
    if is_new:
        conversation.whole = cache
        conversation.forget_encoded()
    elif conversation.whole is not cache:
        raise CacheError("past_key_values: its halves come from different caches")
    return conversation

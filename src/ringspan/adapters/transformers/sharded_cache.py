"""Which cache can a caller make, look into, save, and fill sequence by sequence?

`ShardedCache` is a DynamicCache whose keys and values lie on all ranks. A model's forward and generate() take it as
`past_key_values`, as rows of one batch. `handle.step` takes it as sequences that grow independently of each other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from transformers import DynamicCache

from ringspan.adapters.transformers.cache import Conversation, ShardedLayer


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

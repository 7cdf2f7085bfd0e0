"""How do models of transformers attend over shards that a script has cut itself?

Other libraries register an attention by name for the whole process, tell it once per batch how the batch was cut, and
let the script cut tokens and positions. So does this. It refuses what it can see to be wrong: a batch that was not
announced, positions that are not those of the shard, masks, dropout, caches. `parallelize` checks the model too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask, causal, documents, full, sliding_window
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of

__all__ = ["ShardAttention", "Shards"]

_REFUSED = ("bias", "attn_bias", "position_bias", "head_mask")


class Shards(NamedTuple):
    """The layout of a batch's shards.

    `lengths` are those of packed documents, or None for one sequence per row. Only causal attention is exact where a
    batch may be padded behind its tokens.
    """

    group: Any
    layout: Layout
    lengths: tuple[int, ...] | None
    algorithm: str = "auto"
    may_be_padded: bool = False

    def expected(self) -> torch.Tensor:
        """The positions of this rank's tokens, restarting with each document."""
        positions = self.layout.positions(session_of(self.group).transport.rank)
        if self.lengths is not None:
            ends = np.cumsum(self.lengths)
            starts = np.concatenate([[0], ends[:-1]])
            positions = positions - starts[np.searchsorted(ends, positions, side="right")]
        return torch.from_numpy(positions)


class ShardAttention:
    """An attention that transformers finds by its registered names."""

    def __init__(self, names: Sequence[str], how: str) -> None:
        self._shards: Callable[[int], Shards] | None = None
        self._how = how  # to announce a batch
        self._seen: torch.Tensor | None = None
        for name in names:
            AttentionInterface.register(name, self.attend)
            AttentionMaskInterface.register(name, _no_mask)

    def announce(self, shards: Callable[[int], Shards] | None) -> None:
        """Announce the layout of the next batches, given the length of a shard."""
        self._shards, self._seen = shards, None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers calls it: shards (batch, heads, seq, dim) in, (batch, seq, heads, dim) out."""
        shards = self._announced(query, key)
        for name, value_given in (
            ("attention_mask", attention_mask),
            *((name, options.get(name)) for name in _REFUSED),
        ):
            if value_given is not None:
                raise UnsupportedError("it has the keys of this rank only", argument=name, remedy="leave it out")
        if dropout:
            raise UnsupportedError("ranks would drop other weights than one process", argument="dropout", value=dropout)
        if (chunk_size := _chunk_size(module)) is not None:
            raise UnsupportedError(
                "attention by this name does not compute it", argument="attention_chunk_size", value=chunk_size
            )
        self._check_positions(position_ids, shards)
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if shards.may_be_padded and not is_causal:
            raise UnsupportedError("tokens would attend to padding", argument="is_causal", value=False)
        out = attention(
            query,
            key,
            value,
            mask=_mask(is_causal, sliding_window, shards.lengths),
            layout=shards.layout,
            group=shards.group,
            algorithm=shards.algorithm,
            scale=scaling,
            sinks=s_aux,
            softcap=softcap,
        )
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2).contiguous(), None

    def _announced(self, query: torch.Tensor, key: torch.Tensor) -> Shards:
        if self._shards is None:
            raise UnsupportedError(
                "no batch was announced", argument="attn_implementation", remedy=f"call {self._how} first"
            )
        shards = self._shards(query.shape[2])
        expected = shards.layout.shard_len(session_of(shards.group).transport.rank)
        if query.shape[2] != expected or key.shape[2] != expected:
            raise ShapeError(
                f"the announced batch has {expected} tokens on this rank, and there are {query.shape[2]} queries and "
                f"{key.shape[2]} keys",
                argument="input_ids",
                remedy=f"call {self._how} for each batch, and pass use_cache=False",
            )
        if shards.lengths is not None and query.shape[0] != 1:
            raise ShapeError("packed documents are one row", argument="input_ids", value=query.shape[0])
        return shards

    def _check_positions(self, position_ids: torch.Tensor | None, shards: Shards) -> None:
        if position_ids is None:
            raise UnsupportedError(
                "without them a model counts from 0 on every rank", argument="position_ids", remedy="pass this rank's"
            )
        if position_ids is self._seen:
            return
        found, expected = position_ids.cpu(), shards.expected()
        whole = torch.from_numpy(shards.layout.positions(session_of(shards.group).transport.rank))
        if not any(torch.equal(found, right.expand_as(found)) for right in (expected, whole)):
            raise UnsupportedError(
                "they are not the positions of this rank's tokens", argument="position_ids", value=found[0].tolist()[:8]
            )
        self._seen = position_ids


def _chunk_size(module: nn.Module) -> int | None:
    return getattr(getattr(module, "config", None), "attention_chunk_size", None)


def _mask(is_causal: bool, window: int | None, lengths: tuple[int, ...] | None) -> Mask:
    mask = full()
    if window is not None:
        mask = sliding_window(window - 1, 0 if is_causal else window - 1)
    elif is_causal:
        mask = causal()
    if lengths is None:
        return mask
    return documents(lengths) if mask == full() else documents(lengths) & mask


def _no_mask(**options: Any) -> None:
    del options

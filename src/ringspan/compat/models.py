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
from ringspan.mask import Mask, causal, documents, full, per_row, sliding_window
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of

__all__ = ["ShardAttention", "Shards"]

_REFUSED = ("bias", "attn_bias", "position_bias", "head_mask")
_MIXERS = ("mamba", "ssm_", "conv_", "linear_", "lru_", "state_size")  # of tokens, besides attention
_ATTENDING = {"attention", "full_attention", "sliding_attention"}


class Shards(NamedTuple):
    """The layout of a batch's shards.

    `lengths` are those of the packed documents of each row, or None for one sequence per row. Only causal attention is
    exact where a batch may be padded behind its tokens; the padding may be the last document.
    """

    group: Any
    layout: Layout
    lengths: tuple[tuple[int, ...], ...] | None
    algorithm: str = "auto"
    may_be_padded: bool = False

    def are_positions(self, found: torch.Tensor) -> bool:
        """Whether position_ids (batch, seq) are those of this rank's tokens: of the row, or restarting by document."""
        positions = self.layout.positions(session_of(self.group).transport.rank)
        if self.lengths is None:
            return _is_any(found, [positions])
        if len(found) not in (1, len(self.lengths)):
            return False
        return all(
            _is_any(row, [positions, *(_restarting(positions, lengths) for lengths in self._readings(lengths_of_row))])
            for row, lengths_of_row in zip(found.expand(len(self.lengths), -1), self.lengths, strict=True)
        )

    def _readings(self, lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Padding counts on from the last document, or is a document of its own."""
        if not self.may_be_padded or len(lengths) < 2:
            return [lengths]
        return [lengths, (*lengths[:-2], lengths[-2] + lengths[-1])]


def _restarting(positions: np.ndarray[Any, Any], lengths: tuple[int, ...]) -> np.ndarray[Any, Any]:
    ends = np.cumsum(lengths)
    starts = ends - lengths
    restarted: np.ndarray[Any, Any] = positions - starts[np.searchsorted(ends, positions, side="right")]
    return restarted


def _is_any(found: torch.Tensor, candidates: list[np.ndarray[Any, Any]]) -> bool:
    return any(torch.equal(found, torch.from_numpy(right).expand_as(found)) for right in candidates)


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
        module: nn.Module | None,
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
        _check_config(getattr(module, "config", None))
        self._check_positions(module, position_ids, shards)
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
        if shards.lengths is not None and query.shape[0] != len(shards.lengths):
            raise ShapeError(
                f"documents were announced for {len(shards.lengths)} rows", argument="input_ids", value=query.shape[0]
            )
        return shards

    def _check_positions(self, module: Any, position_ids: torch.Tensor | None, shards: Shards) -> None:
        if position_ids is None:
            if not isinstance(module, nn.Module):  # called by itself: there is no model that counts positions
                return
            raise UnsupportedError(
                "without them a model counts from 0 on every rank", argument="position_ids", remedy="pass this rank's"
            )
        if position_ids is self._seen:
            return
        if not shards.are_positions(position_ids.cpu()):
            raise UnsupportedError(
                "they are not the positions of this rank's tokens",
                argument="position_ids",
                value=position_ids[0].tolist()[:8],
            )
        self._seen = position_ids


def _check_config(config: Any) -> None:
    """Refuse a model in which more than attention depends on the tokens of other ranks."""
    said = config.to_dict() if hasattr(config, "to_dict") else {}
    for name, value in said.items():
        is_mixer = name.startswith(_MIXERS) or (name in ("layer_types", "block_types") and not {*value} <= _ATTENDING)
        if value and (is_mixer or name in ("attention_chunk_size", "attn_temperature_tuning")):
            raise UnsupportedError(
                "attention by this name does not compute it",
                argument=f"config.{name}",
                value=value,
                remedy="call rs.adapters.transformers.parallelize(model)",
            )
    if kinds := _rope_types(said.get("rope_parameters")) & {"dynamic", "longrope"}:
        raise UnsupportedError(
            "it depends on the length of the sequence, and a rank sees a part of it",
            argument="config.rope_parameters",
            value=min(kinds),
        )


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    return {parameters.get("rope_type", "default")}.union(*map(_rope_types, parameters.values()))


def _mask(is_causal: bool, window: int | None, lengths: tuple[tuple[int, ...], ...] | None) -> Mask:
    mask = full()
    if window is not None:
        mask = sliding_window(window - 1, 0 if is_causal else window - 1)
    elif is_causal:
        mask = causal()
    if lengths is None:
        return mask
    rows = [documents(row) if mask == full() else documents(row) & mask for row in lengths]
    return rows[0] if len(rows) == 1 else per_row(rows)


def _no_mask(config: Any = None, **options: Any) -> None:
    """Called in each forward, even by a model whose layers are no attention."""
    del options
    _check_config(config)

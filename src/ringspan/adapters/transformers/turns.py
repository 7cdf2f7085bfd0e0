"""How does a model run on whole prompts and single tokens, over a cache that is spread over all ranks?

The tokens of all rows are concatenated without padding, and every rank computes some of them. If there are too few to
share, as in decode, every rank computes all of them. So does a decoder with an encoder, because concatenated tokens
could not attend to their own row of the encoder. Only rows whose logits are requested go through the model's head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ringspan.adapters.transformers.cache import Conversation
from ringspan.adapters.transformers.encoder_decoder import attend_to_parts
from ringspan.adapters.transformers.layers import AttentionLayer, AttentionOptions, Side
from ringspan.adapters.transformers.masks import Tokens
from ringspan.adapters.transformers.shards import (
    BY_TOKEN,
    ShardOptions,
    ShardPart,
    ShardRun,
    check_batch,
    layer_of,
    tokens_of,
)
from ringspan.adapters.transformers.wiring import Asked
from ringspan.algorithms.choose import RINGS
from ringspan.cache import KVCache, Turn
from ringspan.errors import CacheError, UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import causal
from ringspan.runtime.engine import Attention
from ringspan.span import Span
from ringspan.training import gather

_TURNS = ("auto", *RINGS)


@dataclass(slots=True)
class TurnRun:
    """A forward over the new tokens of a cache."""

    options: ShardOptions
    layers: Mapping[nn.Module, AttentionLayer]
    conversation: Conversation
    turn: Turn
    columns: Tokens  # (batch, new columns): which are tokens
    is_decode: bool  # one token per row, (batch, 1)
    dtype: torch.dtype
    places: torch.Tensor  # positions of this rank's tokens
    row_columns: torch.Tensor  # columns of this rank's tokens, or the column of all rows if is_decode
    source: ShardRun | None  # the encoder's part
    pending: int | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, asked: Asked) -> torch.Tensor:
        """Store keys and values, and attend to everything cached."""
        layer = layer_of(self.layers, asked)
        if layer.side == "encoder":
            assert self.source is not None
            return self.source.attend(asked)
        try:
            options = layer.check(asked)
            if layer.side == "cross":
                return self._cross(asked, options)
            if self.pending is None:
                raise UnsupportedError(f"{layer.name}: it attends without the cache; use_cache=False")
        except UnsupportedError as error:
            self.fail(error)
            raise
        index, self.pending = self.pending, None
        run = self.turn.decode if self.is_decode else self.turn.prefill
        q = asked.q if layer.scaling is None else layer.scaling.apply(asked.q, self.row_columns)
        q, k, v = (x.to(self.dtype) for x in (q, asked.k, asked.v))
        result = run(q, k, v, layer=index, scale=options.scale, softcap=options.softcap, return_lse=True)
        assert isinstance(result, Attention)
        if options.sinks is None:
            return result.out
        # A sink joins the softmax after all parts are merged.
        share = torch.sigmoid(result.lse - options.sinks.to(result.lse.dtype)[:, None])
        return (result.out * share.unsqueeze(-1)).to(self.dtype)

    def _cross(self, asked: Asked, layer: AttentionOptions) -> torch.Tensor:
        """Attend to the cached keys and values of the encoder."""
        assert self.source is not None
        tokens = torch.from_numpy(self.columns).to(asked.q.device)
        q = asked.q if self.is_decode else _rows_apart(asked.q, tokens)
        seen = self.source.seen_from(_all_have(self.options.world_size, q.shape[2]))
        options = self.options
        out = attend_to_parts(
            q,
            asked.k,
            asked.v,
            seen,
            rank=options.rank,
            group=options.group,
            kernel=options.kernel,
            scale=layer.scale,
            softcap=layer.softcap,
        )
        return out if self.is_decode else out.transpose(1, 2)[tokens].transpose(0, 1)[None]

    def positions(self, side: Side) -> torch.Tensor:
        if side == "encoder":
            assert self.source is not None
            return self.source.positions(side)
        return self.places

    def make_mask(self, options: Mapping[str, Any]) -> None:
        """Return None, because `attend` makes the mask."""
        del options

    def fail(self, error: Exception) -> None:
        """Tell the other ranks: when they agree on the turn, or, in the middle of the turn, by ending the group."""
        if not self.turn.is_open:
            return  # the rank that ended it has told them
        self.options.session.call(is_agreed=self.turn.is_agreed).tell(error)
        self.turn.abort()

    def end(self, is_done: bool) -> None:
        """Commit the new tokens, or drop them; tokens that skipped a layer are dropped and refused."""
        self.conversation.run = None
        if not is_done:
            self._forget()
            return
        try:
            self.turn.commit()
        except BaseException:
            self._forget()
            raise
        self.conversation.extend(self.columns)
        if self.source is not None:
            self.conversation.num_encoded = self.source.layout.num_positions

    def _forget(self) -> None:
        if not self.conversation.num_encoded:
            self.conversation.forget_encoded()
        if self.turn.is_open:
            self.turn.abort()


def _rows_apart(q: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Reshape concatenated tokens (1, heads, tokens, dim) to rows (batch, heads, columns, dim)."""
    apart = q.new_zeros(*tokens.shape, q.shape[1], q.shape[3])
    apart[tokens] = q[0].transpose(0, 1)
    return apart.transpose(1, 2)


def _all_have(world_size: int, num_tokens: int) -> Layout:
    return Layout(((),) * world_size, (Span(0, num_tokens),))


def cached_layers(
    layers: Mapping[nn.Module, AttentionLayer], indices: Mapping[nn.Module, int]
) -> tuple[AttentionLayer, ...]:
    """Return the layers in the order of a cache; refuse layers that one KVCache cannot hold."""
    layers = {module: layer for module, layer in layers.items() if layer.side == "own"}
    if indices.keys() != layers.keys() or sorted(indices.values()) != [*range(len(indices))]:
        raise UnsupportedError("every attention layer needs its own layer of the cache")
    ordered = tuple(sorted(layers.values(), key=lambda layer: {layers[m]: i for m, i in indices.items()}[layer]))
    if len({(layer.heads, layer.head_dim, layer.v_head_dim, layer.dtype) for layer in ordered}) > 1:
        raise UnsupportedError("the attention layers differ in heads or dims, but a cache has one shape")
    for layer in ordered:
        if layer.mask.allowed([8], [9]).any():
            raise UnsupportedError(f"{layer.name}: it sees later tokens, so it cannot use a cache")
    return ordered


def make_kv(
    ordered: tuple[AttentionLayer, ...],
    options: ShardOptions,
    dtype: torch.dtype,
    device: torch.device,
    *,
    storage: str | None = None,
    max_tokens: int | None = None,
) -> KVCache:
    first = ordered[0]
    return KVCache(
        num_layers=len(ordered),
        num_heads=first.heads.num_heads,
        num_kv_heads=first.heads.num_kv_heads,
        head_dim=first.head_dim,
        v_head_dim=first.v_head_dim,
        dtype=dtype,
        storage=storage,
        max_tokens=max_tokens,
        mask=[layer.mask for layer in ordered],
        kernel=options.kernel,
        device=device,
        group=options.group,
    )


def check_columns(
    attention_mask: torch.Tensor | None, conversation: Conversation, size: int, seq_len: int, has_window: bool
) -> Tokens:
    """Return which of the new columns are tokens, (batch, seq)."""
    past = conversation.columns
    if len(past) not in (0, size):
        raise CacheError(f"a batch of {size} rows: the cache has {len(past)}", remedy="give a cache to each batch")
    whole = tokens_of(attention_mask, size, past.shape[1] + seq_len)
    if whole is None:
        if past.size and not past.all():
            raise CacheError(
                "no attention_mask, and the cache has rows with padding: give it for all columns, cached ones included"
            )
        return np.ones((size, seq_len), np.bool_)
    if past.size and not np.array_equal(whole[:, : past.shape[1]], past):
        raise CacheError("attention_mask changes the padding of cached columns; keep it as it was when they were new")
    if has_window:
        for row, tokens in enumerate(whole):
            found = np.flatnonzero(tokens)
            if len(found) and len(found) != found[-1] - found[0] + 1:
                raise UnsupportedError(
                    f"attention_mask[{row}] has padding between tokens, which a sliding window counts",
                    remedy="put it first",
                )
    return whole[:, past.shape[1] :]


class NewTokens(NamedTuple):
    """The checked new tokens of whole rows."""

    conversation: Conversation
    batch: dict[str, torch.Tensor]  # (batch, new columns, …) each
    columns: Tokens  # which of them are tokens
    num_kept: int  # number of last columns whose outputs are requested; 0 is all
    source: ShardPart | None  # the encoder's part, if there is an encoder


def check_new_tokens(
    batch: Mapping[str, torch.Tensor],
    conversation: Conversation,
    layers: Mapping[nn.Module, AttentionLayer],
    num_kept: int,
    source: ShardPart | None,
) -> NewTokens:
    size, seq_len = check_batch(batch)
    has_window = any(layer.mask != causal() for layer in layers.values() if layer.side == "own")
    if source is not None and conversation.num_encoded not in (0, source.run.layout.num_positions):
        raise CacheError(
            f"an encoder's sequence of {source.run.layout.num_positions} tokens: the cache was made "
            f"with one of {conversation.num_encoded}",
            remedy="give a cache to each batch",
        )
    columns = check_columns(batch.get("attention_mask"), conversation, size, seq_len, has_window)
    if not columns.any():
        raise CacheError("attention_mask has no token in any new column")
    _check_kept(columns, conversation, num_kept)
    whole = {name: batch[name] for name in BY_TOKEN if name in batch}
    if "position_ids" not in whole:
        device = next(iter(whole.values())).device
        whole["position_ids"] = torch.arange(seq_len, device=device)[None] + conversation.num_columns
    whole["position_ids"] = whole["position_ids"].expand(size, -1)
    return NewTokens(conversation, whole, columns, num_kept, source)


def _check_kept(columns: Tokens, conversation: Conversation, num_kept: int) -> None:
    """Refuse padding after a row's tokens if the outputs of the last columns are requested."""
    if not num_kept:
        return
    has_begun = conversation.columns.any(1, keepdims=True) if conversation.num_columns else False
    is_behind = (np.logical_or.accumulate(columns, 1) | has_begun) & ~columns
    found = np.argwhere(is_behind[:, -num_kept:])
    if len(found):
        raise UnsupportedError(
            f"attention_mask[{found[0, 0]}] has padding after its tokens, and the next token would be "
            "chosen there: logits of padding are not computed",
            remedy='put padding before the tokens (padding_side="left"), or leave out logits_to_keep',
        )


class Begun(NamedTuple):
    """This rank's new tokens, the run, and how to gather its outputs."""

    inputs: dict[str, torch.Tensor]
    run: TurnRun
    keep: "Keep"


def begin_turn(new: NewTokens, options: ShardOptions, layers: Mapping[nn.Module, AttentionLayer]) -> Begun:
    """Deal the new tokens to the ranks and begin a turn."""
    conversation, batch, columns, num_kept, source = new
    conversation.forget_run()
    lengths = {row: int(count) for row, count in enumerate(columns.sum(1)) if count}
    size, seq_len = columns.shape
    past = conversation.columns.sum(1) if conversation.num_columns else np.zeros(size, np.int64)
    starts = {row: int(past[row]) for row in lengths}  # the cache refuses a turn that begins elsewhere
    turn = share_out(conversation.kv, lengths, starts, options, is_shared=seq_len > 1 and source is None)
    is_decode = seq_len == 1 and len(lengths) == size
    device = batch["position_ids"].device
    tokens = torch.from_numpy(columns).to(device)
    mine = torch.from_numpy(turn.layout.positions(options.rank)).to(device)
    every_column = _columns_of(columns, conversation.num_columns)
    inputs = batch if is_decode else {name: x[tokens][mine][None] for name, x in batch.items()}
    run = TurnRun(
        options,
        layers,
        conversation,
        turn,
        columns,
        is_decode,
        conversation.kv.dtype,
        inputs["position_ids"][0],
        every_column[:1] if is_decode else every_column[mine.cpu()],
        None if source is None else source.run,
    )
    conversation.run = run
    asked = columns.copy()
    if num_kept:
        asked[:, :-num_kept] = False
    keep = Keep.of(asked[columns], asked[:, -num_kept:], turn.layout)
    return Begun(inputs, run, keep)


def _columns_of(new: Tokens, num_past: int) -> torch.Tensor:
    """Return the column of each new token, row by row."""
    return torch.from_numpy(np.nonzero(new)[1] + num_past)


def share_out(
    kv: KVCache, lengths: dict[int, int], starts: dict[int, int], options: ShardOptions, *, is_shared: bool
) -> Turn:
    if is_shared:
        algorithm = options.algorithm if options.algorithm in _TURNS else "auto"
        turn = kv.begin(lengths, starts=starts, algorithm=algorithm)
        if all(turn.layout.shard_len(rank) for rank in range(options.world_size)):
            return turn
        turn.abort()  # a model cannot run on zero tokens
    return kv.begin(lengths, starts=starts, query="replicated")


@dataclass(frozen=True, slots=True)
class Keep:
    """The tokens whose outputs are requested, and their places."""

    by_rank: tuple[npt.NDArray[np.int64], ...]  # local rows that are kept
    layout: Layout  # of the kept tokens, numbered consecutively
    places: Tokens  # (batch, kept columns): which of them are tokens
    is_all: bool  # every token is kept

    @classmethod
    def of(cls, is_kept: npt.NDArray[np.bool_], places: Tokens, layout: Layout) -> "Keep":
        """Make it from one flag per token, numbered through the rows."""
        ranks, is_all = range(layout.world_size), bool(is_kept.all())
        by_rank = tuple(np.flatnonzero(is_kept[layout.positions(rank)]) for rank in ranks)
        if layout.replicated:
            return cls(by_rank, Layout(((),) * layout.world_size, (Span(0, int(is_kept.sum())),)), places, is_all)
        if is_all:
            return cls(by_rank, layout, places, is_all)
        numbers = np.cumsum(is_kept) - 1
        kept = [numbers[layout.positions(rank)[by_rank[rank]]] for rank in ranks]
        return cls(by_rank, layout_of_positions(kept), places, is_all)

    def whole(self, part: torch.Tensor, group: Any) -> torch.Tensor:
        """Gather (1, kept rows of this rank, dim) to (batch, kept columns, dim) on every rank, 0 for padding."""
        rows = part if self.layout.replicated else gather(part, self.layout, group, dim=1)
        places = torch.from_numpy(self.places).to(part.device)
        whole = part.new_zeros(*places.shape, part.shape[-1])
        whole[places] = rows[0]
        return whole


def layout_of_positions(by_rank: Sequence[npt.NDArray[np.int64]]) -> Layout:
    """Make the layout in which each rank holds the given positions."""
    return Layout(tuple(tuple(Span(n, n + 1) for n in mine.tolist()) for mine in by_rank))

"""How does one layer of a turn run on this rank?

The new keys and values are stored behind the committed ones, then the new queries attend to all rows of their
sequences, on whichever rank these lie.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ringspan.cache._plan import TurnProblem
from ringspan.cache._source import CachedRows, CacheSource, TurnWire
from ringspan.cache._storage import Rows
from ringspan.errors import CacheError, ShapeError, UnsupportedError
from ringspan.kernels.softmax import Partial
from ringspan.program.execute import Value, execute
from ringspan.program.prepare import Prepared
from ringspan.program.problem import Scores
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.codec import codec_arithmetic
from ringspan.runtime.wire import TransportWire
from ringspan.schedule import ALL, Block

if TYPE_CHECKING:
    from ringspan.cache._turn import Turn


def check_layer(turn: "Turn", layer: int) -> None:
    """Refuse a layer that the cache does not have, or that this turn has run."""
    check_layer_number(layer, turn.state.model.num_layers)
    if layer in turn.layers_done:
        raise CacheError(
            "this layer has been run in this turn, and a position is stored once",
            argument="layer",
            value=layer,
            remedy="begin another turn",
        )


def check_layer_number(layer: int, num_layers: int) -> None:
    """Refuse a layer that the cache does not have."""
    if not isinstance(layer, int) or not 0 <= layer < num_layers:
        raise CacheError(
            f"the cache has {num_layers} layers", argument="layer", value=layer, remedy=f"use 0 to {num_layers - 1}"
        )


def check_tensors(turn: "Turn", **tensors: torch.Tensor) -> None:
    """Refuse tensors that are not this rank's new rows for the cache's model."""
    model, device = turn.state.model, turn.state.spec.device
    rows = turn.num_rows
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ShapeError(f"expected a tensor, got {type(x).__name__}", argument=name)
        num_heads = model.heads.num_heads if name == "q" else model.heads.num_kv_heads
        shape = (1, num_heads, rows, model.v_head_dim if name == "v" else model.head_dim)
        if x.shape != shape:
            raise ShapeError(
                f"the turn gives rank {turn.state.rank} {rows} new tokens, and the cache is for a model with {model}",
                argument=f"{name}.shape",
                value=tuple(x.shape),
                remedy=f"give {shape}, or for decode (sequences, heads, 1, dim)",
            )
        if x.dtype != model.dtype or x.device != device:
            raise ShapeError(
                f"it is {x.dtype} on {x.device}, and the cache is for {model.dtype} on {device}",
                argument=name,
                remedy=f"use {name}.to({model.dtype}), or make the cache with dtype={x.dtype}",
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                "it requires a gradient, and a cache has none", argument=name, remedy="call under torch.no_grad()"
            )


def run_layer(
    turn: "Turn",
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scores: Scores,
    agree: Callable[[], None],
) -> Partial:
    """Store k and v and attend q: out in q's dtype and lse of this rank's rows. `agree` precedes the first message."""
    state = turn.state
    with torch.no_grad(), without_autocast(q.device.type):
        rows = state.codec.encode(k, v)
        _write(turn, layer, rows)
        out, lse = _attend(turn, turn.prepared[state.model.masks[layer]], q, rows, layer, scores, agree)
    return Partial(out.to(q.dtype), lse)


def store_layer(turn: "Turn", k: torch.Tensor, v: torch.Tensor, layer: int) -> None:
    """Store k and v without attending."""
    with torch.no_grad():
        _write(turn, layer, turn.state.codec.encode(k, v))


def _attend(
    turn: "Turn",
    prepared: Prepared[TurnProblem],
    q: torch.Tensor,
    new: Rows,
    layer: int,
    scores: Scores,
    agree: Callable[[], None],
) -> Partial:
    state = turn.state
    session, rank = state.session, state.rank
    problem = prepared.problem
    views = own_views(turn, layer, problem.firsts) or [tuple(x[:, :, :0] for x in new)]
    starts = [*(part.start for part in turn.parts), *(first[rank] for first in problem.firsts)]
    is_all_new = turn.query == "sharded" and not any(starts)
    owner = ALL if turn.query == "replicated" else rank
    rows = CachedRows(views, new if is_all_new else None)
    kv: Value = (rows,)
    codec = state.codec
    if turn.wire_codec is not None:
        codec = turn.wire_codec
        kv = codec.encode(*rows.packed())
        turn.largest_scales[layer] = largest_scales([kv], state.model.heads.num_kv_heads)
    inputs: dict[Block, Value] = {Block("q", owner): (q,), Block("kv", rank): kv}
    transport = session.transport
    wire = TurnWire(TransportWire(transport, session.buffers, q, None, problem.sizes.kv_dtypes), agree)
    with session.scratch.lend() as scratch:
        arithmetic = codec_arithmetic(codec, state.kernel(scores.softcap), scores.scale, q, scratch, CacheSource())
        rank_state = prepared.state(rank, inputs, arithmetic)
        wire.expect(prepared.program)
        for _ in execute(prepared.program, rank_state, wire):
            pass
    agree()  # a rank that sends nothing agrees too
    session.buffers.trim()
    out, lse = rank_state.sum(Block("out", owner))
    return Partial(out, lse.squeeze(-1))


def own_views(turn: "Turn", layer: int, firsts: Sequence[Sequence[int]] | None = None) -> list[Rows]:
    """Views of this rank's rows of a layer, new ones included; from row `firsts[i][rank]` of sequence i on."""
    state = turn.state
    views: list[Rows] = []
    for i, part in enumerate(turn.parts):
        first = 0 if firsts is None else firsts[i][state.rank]
        views += state.stored[part.sequence].rows(layer, first, part.after.counts[state.rank])
    return views


def largest_scales(rows: Sequence[Value], num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scale of each KV head in quantised rows, for k and for v."""
    nothing = torch.zeros(1, num_kv_heads, 1, 1, dtype=torch.float64, device="cpu")
    k, v = (torch.cat([nothing, *(row[i].cpu() for row in rows)], 2).amax((0, 2, 3)) for i in (1, 3))
    return k, v


def _write(turn: "Turn", layer: int, rows: Rows) -> None:
    for sequence, at, slices in turn.own_rows:
        stored = turn.state.stored[sequence]
        for own in slices:
            part = rows if turn.num_rows == 1 else tuple(x[:, :, own] for x in rows)
            stored.write(layer, at, part)
            at += part[0].shape[2]

"""Attention of a turn: new tokens against all that is cached of their sequences, on whatever rank it lies.

`prefill` takes any number of new tokens of each sequence (arXiv 2411.01783, algorithms 2 and 3), `decode` one of each
(algorithm 4). Both store the new keys and values and attend them together with the old ones.
"""

from collections.abc import Sequence

import torch

from ringspan.cache.cached import CachedRows, TurnArithmetic, TurnWire
from ringspan.cache.storage import Rows
from ringspan.cache.turn import CacheState, Plan, Turn
from ringspan.errors import CacheError, ShapeError, TransportError, UnsupportedError
from ringspan.kernels.softmax import Partial
from ringspan.program.bind import softmax_scale
from ringspan.program.execute import RankState, Value, execute
from ringspan.runtime import quantize
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.engine import Attention
from ringspan.schedule import ALL, Block

__all__ = ["Turn", "decode", "error_bound", "prefill", "store"]


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    turn: Turn,
    *,
    layer: int,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Attention:
    """Store this rank's new keys and values of a layer and attend its new queries to all that they see.

    Args:
        q: (1, heads, rows, head_dim), this rank's new tokens in the order of `turn.layout.positions(rank)`, which are
            at `turn.positions` of their sequences. All new tokens if the turn's query is "replicated".
        k: (1, KV heads, rows, head_dim), of the same tokens.
        v: (1, KV heads, rows, v_head_dim).
        turn: What `KVCache.begin` returned.
        layer: Each layer is run once in a turn, in the same order on all ranks.
        scale: Of the scores; 1/sqrt(head_dim) by default.
        return_lse: Also return the log-sum-exp.

    Returns:
        out (1, heads, rows, v_head_dim) in q's type, or (out, lse).
    """
    out, lse = _run_layer(q, k, v, turn, layer, scale)
    return Attention(out, lse) if return_lse else out


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    turn: Turn,
    *,
    layer: int,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | Attention:
    """`prefill` for one new token per sequence, with the sequences as the batch.

    Args:
        q: (sequences, heads, 1, head_dim): the sequences whose new token this rank computes, in the order of the turn;
            all of them if the turn's query is "replicated".
        k: (sequences, KV heads, 1, head_dim).
        v: (sequences, KV heads, 1, v_head_dim).
        turn: What `KVCache.begin` returned for one new token of each sequence.
        layer: Each layer is run once in a turn, in the same order on all ranks.
        scale: Of the scores; 1/sqrt(head_dim) by default.
        return_lse: Also return the log-sum-exp.

    Returns:
        out (sequences, heads, 1, v_head_dim) in q's type, or (out, lse).
    """
    with _guarded(turn):
        if any(part.num_new != 1 for part in turn.parts):
            raise CacheError(f"decode with {turn}: it takes one new token per sequence; use prefill")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.ndim != 4 or x.shape[2] != 1:
                raise ShapeError(f"{name}.shape={tuple(x.shape)}: decode takes (sequences, heads, 1, dim)")
    if turn.num_rows == 1:  # sequences and tokens are one of each
        return prefill(q, k, v, turn, layer=layer, scale=scale, return_lse=return_lse)
    q, k, v = (x.permute(2, 1, 0, 3) for x in (q, k, v))
    out, lse = _run_layer(q, k, v, turn, layer, scale)
    out, lse = out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
    return Attention(out, lse) if return_lse else out


def store(k: torch.Tensor, v: torch.Tensor, turn: Turn, *, layer: int) -> None:
    """Store keys and values that were computed elsewhere, of this rank's new tokens, and attend nothing.

    It takes the place of `prefill` for a layer of a turn; shapes are the same. No message is sent.
    """
    with _guarded(turn):
        _check_layer(turn, layer)
        _check_tensors(turn, {"k": k, "v": v})
        with torch.no_grad():
            _write(turn, layer, _encoded(turn.state, k, v))
        turn.layers_done[layer] = None


def error_bound(q: torch.Tensor, turn: Turn, *, layer: int, scale: float | None = None) -> torch.Tensor:
    """(heads,): how far any element of a layer's output on this rank can be from what exact K and V would give.

    Ask before the turn is committed; all ranks must. It is zero where nothing is encoded: what a floating type narrower
    than that of the cache rounds away as `storage` is not counted.

    Args:
        q: What `prefill` or `decode` was given.
        turn: The turn, after the layer was run.
        layer: The layer.
        scale: As it was given.
    """
    state = turn.state
    form = turn.form or state.form
    if turn.layers_done.get(layer) is None:
        raise CacheError(f"layer={layer}: it was not attended in this turn; call prefill or decode first")
    if form is None:
        return torch.zeros(state.model.heads.num_heads, dtype=torch.float64, device="cpu")
    own = turn.largest_scales.get(layer)
    if own is None:
        rows = [
            view
            for part in turn.parts
            for view in state.stored[part.sequence].rows(layer, 0, part.after.counts[state.rank])
        ]
        own = _largest_scales(rows, state.model.heads.num_kv_heads)
    transport = state.session.transport
    everyone = transport.all_gather_bytes(torch.stack(own).numpy().tobytes(), transport.timeout_s)
    scales = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.float64) for one in everyone]).amax(0)
    k_scales, v_scales = scales.reshape(2, -1)
    return quantize.output_bound(q, k_scales, v_scales, form, softmax_scale(scale, state.model.head_dim))


def _largest_scales(rows: Sequence[Value], num_kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest scales of k and of v, (KV heads,) each."""
    nothing = torch.zeros(1, num_kv_heads, 1, 1, dtype=torch.float64, device="cpu")
    k, v = (torch.cat([nothing, *(row[i].cpu() for row in rows)], 2).amax((0, 2, 3)) for i in (1, 3))
    return k, v


class _guarded:  # noqa: N801
    """A failure of this rank ends the turn, here and, before the others wait for it, on all ranks."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self.state = turn.state

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            return
        session = self.state.session
        self.turn.abort()
        if isinstance(error, TransportError) or session.transport.world_size == 1:
            return  # the others know
        reason = f"{type(error).__name__}: {error}"
        if self.turn.is_agreed or not isinstance(error, Exception):  # who presses Ctrl-C waits for nobody
            session.transport.abort(f"rank {session.transport.rank} failed: {reason}")
        else:
            session.contract.refuse(reason, session.transport.timeout_s)


def _run_layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, turn: Turn, layer: int, scale: float | None
) -> Partial:
    with _guarded(turn):
        state = turn.state
        _check_layer(turn, layer)
        _check_tensors(turn, {"q": q, "k": k, "v": v})
        scale = softmax_scale(scale, state.model.head_dim)
        with torch.no_grad(), without_autocast(q.device.type):
            rows = _encoded(state, k, v)
            _write(turn, layer, rows)
            part = _attend(turn, turn.plans[state.model.masks[layer]], q, rows, layer, scale)
        turn.layers_done[layer] = scale
        return Partial(part.out.to(q.dtype), part.lse)


def _attend(turn: Turn, plan: Plan, q: torch.Tensor, new: Rows, layer: int, scale: float) -> Partial:
    state = turn.state
    rank, transport = state.rank, state.session.transport
    problem = plan.problem
    views: list[Rows] = []
    for part, first in zip(turn.parts, problem.firsts, strict=True):
        views += state.stored[part.sequence].rows(layer, first[rank], part.after.counts[rank])
    views = views or [tuple(x[:, :, :0] for x in new)]
    starts = [*(part.start for part in turn.parts), *(first[rank] for first in problem.firsts)]
    is_all_new = turn.query == "sharded" and not any(starts)
    owner = ALL if turn.query == "replicated" else rank
    rows = CachedRows(views, new if is_all_new else None)
    kv: Value = (rows,)
    if turn.form is not None and state.form is None:
        k, v = rows.packed()
        kv = quantize.encode_kv(k, v, turn.form)
        turn.largest_scales[layer] = _largest_scales([kv], state.model.heads.num_kv_heads)
    inputs: dict[Block, Value] = {Block("q", owner): (q,), Block("kv", rank): kv}

    def agree() -> None:
        if not turn.is_agreed:
            state.session.contract.agree(turn.signature(layer, scale), transport.timeout_s, is_new=False)
            turn.is_agreed = True

    wire = TurnWire(transport, state.session.buffers, q, problem.sizes.kv_dtypes, agree)
    with state.session.scratch.lend() as scratch:
        rank_state = RankState(rank, problem, inputs, TurnArithmetic(state.kernel, scale, q, scratch))
        wire.expect(plan.program)
        for _ in execute(plan.program, rank_state, wire):
            pass
    agree()  # even if this rank had nothing to send
    state.session.buffers.trim()
    out, lse = rank_state.sum(Block("out", owner))
    return Partial(out, lse.squeeze(-1))


def _encoded(state: CacheState, k: torch.Tensor, v: torch.Tensor) -> Rows:
    """New keys and values as the cache keeps them."""
    if state.form is None:
        kept = state.spec.dtypes[0]
        return (k, v) if k.dtype == kept else (k.to(kept), v.to(kept))
    return quantize.encode_kv(k, v, state.form)


def _write(turn: Turn, layer: int, rows: Rows) -> None:
    for sequence, at, slices in turn.own_rows:
        stored = turn.state.stored[sequence]
        for own in slices:
            part = rows if turn.num_rows == 1 else tuple(x[:, :, own] for x in rows)
            stored.write(layer, at, part)
            at += part[0].shape[2]


def _check_layer(turn: Turn, layer: int) -> None:
    num_layers = turn.state.model.num_layers
    if not 0 <= layer < num_layers:
        raise CacheError(f"layer={layer}: the cache has {num_layers} layers, from 0 on")
    if layer in turn.layers_done:
        raise CacheError(f"layer={layer}: it has been run in this turn already, and a position is stored once")


def _check_tensors(turn: Turn, tensors: dict[str, torch.Tensor]) -> None:
    model, device = turn.state.model, turn.state.spec.device
    rows = turn.num_rows
    for name, x in tensors.items():
        num_heads = model.heads.num_heads if name == "q" else model.heads.num_kv_heads
        shape = (1, num_heads, rows, model.v_head_dim if name == "v" else model.head_dim)
        if x.shape != shape:
            raise ShapeError(
                f"{name}.shape={tuple(x.shape)} on rank {turn.state.rank}: the turn gives this rank {rows} new tokens, "
                f"and the cache is for a model with {model}; expected {shape}, or for decode (sequences, heads, 1, dim)"
            )
        if x.dtype != model.dtype or x.device != device:
            raise ShapeError(f"{name} is {x.dtype} on {x.device}: the cache is for {model.dtype} on {device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(f"{name} requires a gradient, and a cache keeps none; call under torch.no_grad()")

"""What is a turn? New tokens for some sequences, planned once for all layers, committed when all layers have run.

Until `commit` no committed token changes: new keys and values are written behind the old ones and are counted only at
the end, so a turn that fails leaves the cache as it was.

The ranks agree once per turn, before the first message of its first layer, that they run the same turn of the same
cache; a rank that refuses sends the reason there. After that, layers exchange nothing but blocks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

import torch

from ringspan.algorithms import Query
from ringspan.algorithms.choose import KV_RING
from ringspan.arguments import FLAG, WHOLE, check_arguments
from ringspan.cache._layer import check_layer, check_tensors, largest_scales, own_views, run_layer, store_layer
from ringspan.cache._placement import positions_of
from ringspan.cache._plan import RowSizes, SequencePart, TurnProblem, plan_problem
from ringspan.cache._state import CacheState
from ringspan.cache._storage import Stored
from ringspan.errors import CacheError, ShapeError
from ringspan.kernels.softmax import Partial, accumulator_dtype
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.prepare import Prepared, prepare_turn
from ringspan.program.problem import Scores, check_scores, softmax_scale
from ringspan.runtime import quantize
from ringspan.runtime.codec import Codec, Quantized
from ringspan.runtime.contract import Signature
from ringspan.runtime.engine import Attention
from ringspan.runtime.quantize import FORMATS
from ringspan.runtime.session import RankCall, was_told
from ringspan.span import Span


class Chosen(NamedTuple):
    """The algorithm of a turn, and why."""

    algorithm: str
    reason: str


class Turn:
    """New tokens of some sequences; made by `KVCache.begin`.

    As a context manager it commits at the end, or aborts on an error.

    Attributes:
        query: "sharded" or "replicated", as given to `begin`.
        algorithm: The algorithm that runs.
        reason: Why this algorithm was chosen.
    """

    def __init__(
        self, state: CacheState, parts: tuple[SequencePart, ...], query: Query, chosen: Chosen, wire: str | None = None
    ) -> None:
        self._state = state
        self._num_told = state.session.contract.num_told
        self.parts = parts
        self.query = query
        self.algorithm, self.reason = chosen
        self.wire_codec = wire_codec(state, wire if self.algorithm == KV_RING else None)
        self.largest_scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By layer: the largest scales of k and of v that were sent, (KV heads,) each."""
        self.layers_done: dict[int, Scores | None] = {}
        """The scale and softcap of each layer that has run, in the order they ran; None for a stored layer."""
        self.said: Mapping[str, str] = {}
        """Further fields of the caller that the ranks must agree on."""
        self.is_agreed = False
        for part in parts:
            if part.sequence not in state.stored:
                state.stored[part.sequence] = Stored(state.spec)
            state.stored[part.sequence].reserve(part.after.counts[state.rank])
        self.prepared = {mask: self._prepare(mask) for mask in dict.fromkeys(state.model.masks)}
        state.turn = self

    @property
    def state(self) -> CacheState:
        """The cache's state; refused once the turn is over."""
        if not self.is_open:
            raise CacheError("the turn is over", remedy="begin another")
        return self._state

    @property
    def is_open(self) -> bool:
        """True until the turn is committed or aborted."""
        return self._state.turn is self

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences with new tokens, in the order of their rows."""
        return tuple(part.sequence for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """New tokens on all ranks."""
        return sum(part.num_new for part in self.parts)

    @cached_property
    def num_rows(self) -> int:
        """New tokens that this rank computes."""
        if self.query == "replicated":
            return self.num_tokens
        return sum(len(span) for part in self.parts for span in part.new[self._state.rank])

    @cached_property
    def layout(self) -> Layout:
        """The layout of the turn's new tokens, counted through all sequences; for `rs.shard` and `rs.gather`."""
        if self.query == "replicated":
            return Layout(((),) * self._state.world_size, (Span(0, self.num_tokens),))
        return Layout(tuple(tuple(self._rows(rank)) for rank in range(self._state.world_size)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of each of this rank's rows in its sequence."""
        rank = self._state.rank
        whole = self.query == "replicated"
        spans = [
            span
            for part in self.parts
            for span in ([Span(part.start, part.start + part.num_new)] if whole else part.new[rank])
        ]
        return torch.from_numpy(positions_of(tuple(spans)))

    @cached_property
    def own_rows(self) -> list[tuple[int, int, list[slice]]]:
        """The rows that this rank stores: (sequence, index in its storage, rows of this rank's k and v)."""
        rank, taken, own = self._state.rank, 0, []
        offset = 0
        for part in self.parts:
            count = sum(map(len, part.new[rank]))
            if self.query == "replicated":
                by = offset - part.start
                rows = [slice(span.start + by, span.stop + by, span.step) for span in part.new[rank]]
            else:
                rows = [slice(taken, taken + count)]
            if count:
                own.append((part.sequence, part.after.counts[rank] - count, rows))
            taken += count
            offset += part.num_new
        return own

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | Attention:
        """Store the new keys and values of a layer, and attend the new queries to all tokens they see.

        Args:
            q: (1, heads, rows, head_dim), this rank's new tokens in the order of `layout.positions(rank)`, which are at
                `positions` of their sequences. All new tokens if the query is "replicated".
            k: (1, KV heads, rows, head_dim), of the same tokens.
            v: (1, KV heads, rows, v_head_dim).
            layer: Each layer runs once in a turn, in the same order on all ranks.
            scale: The softmax scale; 1/sqrt(head_dim) by default.
            softcap: Caps the scores: s becomes softcap · tanh(s / softcap).
            return_lse: Also return the log-sum-exp.

        Returns:
            out (1, heads, rows, v_head_dim) in q's dtype, or (out, lse).
        """
        out, lse = self._run(q, k, v, layer, scale, softcap, return_lse)
        return Attention(out, lse) if return_lse else out

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        layer: int,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | Attention:
        """`prefill` for one new token per sequence, with the sequences as the batch.

        Args:
            q: (sequences, heads, 1, head_dim): the sequences whose new token this rank computes, in the order of the
                turn; all of them if the query is "replicated".
            k: (sequences, KV heads, 1, head_dim).
            v: (sequences, KV heads, 1, v_head_dim).
            layer: Each layer runs once in a turn, in the same order on all ranks.
            scale: The softmax scale; 1/sqrt(head_dim) by default.
            softcap: Caps the scores: s becomes softcap · tanh(s / softcap).
            return_lse: Also return the log-sum-exp.

        Returns:
            out (sequences, heads, 1, v_head_dim) in q's dtype, or (out, lse).
        """
        with self.step():
            self._check_decode(q=q, k=k, v=v)
        if self.num_rows == 1:  # (1, heads, 1, dim) is both forms
            return self.prefill(q, k, v, layer=layer, scale=scale, softcap=softcap, return_lse=return_lse)
        q, k, v = (x.permute(2, 1, 0, 3) for x in (q, k, v))
        out, lse = self._run(q, k, v, layer, scale, softcap, return_lse)
        out, lse = out.permute(2, 1, 0, 3), lse.permute(2, 1, 0)
        return Attention(out, lse) if return_lse else out

    def store(self, k: torch.Tensor, v: torch.Tensor, *, layer: int) -> None:
        """Store keys and values that were computed elsewhere, without attending; replaces `prefill` for a layer.

        The shapes are those of `prefill`. No message is sent.
        """
        with self.step():
            check_layer(self, layer)
            check_tensors(self, k=k, v=v)
            store_layer(self, k, v, layer)
        self.layers_done[layer] = None

    def error_bound(self, q: torch.Tensor, *, layer: int, scale: float | None = None) -> torch.Tensor:
        """(heads,): bound of the error of any element of a layer's output on this rank, due to quantised K and V.

        All ranks must ask, before the turn is committed. Zero if nothing is quantised; rounding K and V to a narrower
        floating dtype as `storage` is not counted. A softcap brings scores closer together, so the bound holds with it.

        Args:
            q: The q that `prefill` or `decode` was given.
            layer: A layer that has run in this turn.
            scale: The scale it was given.
        """
        state = self.state
        codec = self.wire_codec or state.codec
        with state.session.call() as call:
            check_arguments(layer=(WHOLE, layer))
            if self.layers_done.get(layer) is None:
                raise CacheError(
                    "it was not attended in this turn",
                    argument="layer",
                    value=layer,
                    remedy="call prefill or decode first",
                )
            if not isinstance(codec, Quantized):
                return torch.zeros(state.model.heads.num_heads, dtype=torch.float64, device="cpu")
            own = self.largest_scales.get(layer)
            if own is None:
                own = largest_scales(own_views(self, layer), state.model.heads.num_kv_heads)
            fields = {"call": "error_bound", "cache": state.description, "history": state.history, "layer": layer}
            call.agree(Signature.of(fields), once=True)
            transport = state.session.transport
            everyone = transport.all_gather_bytes(torch.stack(own).numpy().tobytes(), call.deadline_s)
        scales = torch.stack([torch.frombuffer(bytearray(one), dtype=torch.float64) for one in everyone]).amax(0)
        k_scales, v_scales = scales.reshape(2, -1)
        return quantize.output_bound(q, k_scales, v_scales, codec.form, softmax_scale(scale, state.model.head_dim))

    def commit(self) -> None:
        """Add the new tokens to the cache. Every layer must have run."""
        state = self.state
        missing = [layer for layer in range(state.model.num_layers) if layer not in self.layers_done]
        if missing:
            raise CacheError(f"commit without layers {missing}", remedy="run each layer once, or abort the turn")
        for part in self.parts:
            state.placements[part.sequence] = part.after
        state.note("turn", [(part.sequence, part.num_new) for part in self.parts], self.layers_done)
        state.turn = None

    def abort(self) -> None:
        """Drop the turn; the cache is as it was before."""
        state = self.state
        state.turn = None
        state.tidy()

    def __enter__(self) -> "Turn":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_open:
            return
        if error is None:
            self.commit()
            return
        self.abort()
        if not was_told(error, self._num_told):
            # The other ranks are in this turn's next layer, or about to be.
            self._state.session.call(is_agreed=self.is_agreed).tell(error)

    def __repr__(self) -> str:
        new = ", ".join(f"{part.sequence}: {part.num_new} after {part.start}" for part in self.parts)
        return f"<Turn {self.algorithm}, sequences {{{new}}}>"

    @contextmanager
    def step(self) -> Iterator[RankCall]:
        """A step of the turn: an error ends the turn on this rank, and the other ranks are told."""
        with self.state.session.call(is_agreed=self.is_agreed) as call:
            try:
                yield call
            except BaseException:
                self.abort()
                raise

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        scale: float | None,
        softcap: float | None,
        return_lse: bool,
    ) -> Partial:
        with self.step() as call:
            check_arguments(return_lse=(FLAG, return_lse))
            check_layer(self, layer)
            check_tensors(self, q=q, k=k, v=v)
            scores = check_scores(scale, softcap, self.state.model.head_dim)

            def agree() -> None:
                if not self.is_agreed:
                    call.agree(self._signature(layer, scores), once=True)
                    self.is_agreed = True

            part = run_layer(self, q, k, v, layer, scores, agree)
        self.layers_done[layer] = scores
        return part

    def _check_decode(self, **tensors: torch.Tensor) -> None:
        if any(part.num_new != 1 for part in self.parts):
            raise CacheError(f"decode takes one new token per sequence, and this is {self}", remedy="use prefill")
        for name, x in tensors.items():
            if not isinstance(x, torch.Tensor) or x.ndim != 4 or x.shape[2] != 1:
                raise ShapeError(
                    "decode takes (sequences, heads, 1, dim)",
                    argument=f"{name}.shape",
                    value=tuple(getattr(x, "shape", ())),
                    remedy="use prefill for more tokens",
                )

    def _signature(self, layer: int, scores: Scores) -> Signature:
        """What the ranks agree on: the turn and its first layer. The next turn checks the other layers."""
        state = self._state
        return Signature.of(
            {
                "call": "a turn of a cache",
                "cache": state.description,
                "history": state.history,
                "cached tokens by rank": {
                    part.sequence: state.placements[part.sequence].counts
                    for part in self.parts
                    if part.sequence in state.placements
                },
                "new tokens": {part.sequence: part.num_new for part in self.parts},
                "algorithm": self.algorithm,
                "wire": self.wire_codec,
                "query": self.query,
                "layer": layer,
                "scale": scores.scale,
                "softcap": scores.softcap,
                **self.said,
            }
        )

    def _rows(self, rank: int) -> Iterator[Span]:
        offset = 0
        for part in self.parts:
            by = offset - part.start
            yield from (Span(span.start + by, span.stop + by, span.step) for span in part.new[rank])
            offset += part.num_new

    def _prepare(self, mask: Mask) -> Prepared[TurnProblem]:
        state = self._state
        block_starts = tuple(tuple(state.stored[part.sequence].starts) for part in self.parts)
        sizes = row_sizes(state, self.wire_codec)
        problem = plan_problem(mask, self.parts, sizes, state.rank, block_starts, self.query == "replicated")
        return prepare_turn(problem, state.rank, self.algorithm, self.query)


def wire_codec(state: CacheState, wire: str | None) -> Codec | None:
    """How K and V are encoded to travel; None if they travel as they are stored."""
    return None if wire is None or isinstance(state.codec, Quantized) else Quantized(FORMATS[wire])


def row_sizes(state: CacheState, wire: Codec | None) -> RowSizes:
    """The sizes of a turn's rows."""
    model = state.model
    codec = wire or state.codec
    return RowSizes(
        model.heads,
        model.head_dim,
        model.v_head_dim,
        model.dtype.itemsize,
        accumulator_dtype(model.dtype).itemsize,
        codec.dims(model.head_dim, model.v_head_dim),
        codec.dtypes,
    )

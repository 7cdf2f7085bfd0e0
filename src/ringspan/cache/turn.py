"""A turn: new tokens for some sequences, planned once for all layers, committed when all of them are through.

Between `begin` and `commit` nothing that is committed changes: new keys and values are written behind the old ones,
and the cache counts them in only at the end. So a turn that fails at any point leaves the cache as it was.

The ranks check once per turn, before the first message of its first layer, that all of them mean the same turn of the
same cache; a rank that refuses says so there. From then on layers exchange nothing but blocks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ringspan.algorithms import Query
from ringspan.algorithms.choose import KV_RING
from ringspan.cache.placement import Placement, deal, place, positions_of
from ringspan.cache.plan import Part, RowSizes, TurnProblem, plan_problem, proven_schedule
from ringspan.cache.storage import RowSpec, Stored
from ringspan.errors import CacheError
from ringspan.kernels.base import Kernel
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.bind import BoundProgram, bind_once
from ringspan.runtime.contract import Signature
from ringspan.runtime.quantize import FORMATS, Format, encoded_dtypes
from ringspan.runtime.session import Session
from ringspan.schedule import Heads, compile_rank
from ringspan.span import Span


@dataclass(frozen=True, slots=True)
class Model:
    """What a cache must know of the model."""

    num_layers: int
    heads: Heads
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    masks: tuple[Mask, ...]  # by layer

    def __str__(self) -> str:
        heads = f"{self.heads.num_heads} heads over {self.heads.num_kv_heads}"
        dims = f"head_dim {self.head_dim}, {self.v_head_dim} for v"
        masks = ", ".join(map(str, dict.fromkeys(self.masks)))
        digest = hashlib.blake2b(str(self.masks).encode(), digest_size=4).hexdigest()
        return f"{self.num_layers} layers, {heads}, {dims}, {self.dtype}, masks {masks} #{digest}"


@dataclass(slots=True)
class CacheState:
    """What a cache holds on this rank, and what it knows of all ranks."""

    model: Model
    group: Any  # kept, since a session goes with its group
    session: Session
    spec: RowSpec
    form: Format | None  # of encoded storage
    kernel: Kernel
    max_tokens: int | None
    contents: str  # what the model and storage make of them
    description: str  # of all that ranks must have in common
    placements: dict[int, Placement] = field(default_factory=dict)
    stored: dict[int, Stored] = field(default_factory=dict)
    history: str = ""  # a digest of all that was done, the same on all ranks
    turn: "Turn | None" = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self.session.transport.rank

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return self.session.transport.world_size

    def note(self, *what: object) -> None:
        """Add something that was done to the history."""
        text = f"{self.history} {what}"
        self.history = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def tidy(self) -> None:
        """Free all memory that no committed token lies in."""
        for sequence in [*self.stored]:
            if sequence in self.placements:
                self.stored[sequence].trim(self.placements[sequence].counts[self.rank])
            else:
                del self.stored[sequence]

    def refuse_during_turn(self, what: str) -> None:
        """Raise if a turn is under way."""
        if self.turn is not None:
            raise CacheError(f"{what} while a turn is under way: commit or abort it first")


class Plan(NamedTuple):
    """What the layers of one mask run in a turn."""

    problem: TurnProblem
    program: BoundProgram


class Chosen(NamedTuple):
    """How a turn is computed, and why."""

    algorithm: str
    reason: str


class Turn:
    """New tokens of some sequences. Made by `KVCache.begin`; as a context manager it commits, or aborts on an error."""

    def __init__(
        self, state: CacheState, parts: tuple[Part, ...], query: Query, chosen: Chosen, wire: str | None = None
    ) -> None:
        self._state = state
        self.parts = parts
        self.query = query
        self.algorithm, self.reason = chosen
        # Encoded K and V are asked for on their way; where they do not travel there is nothing to encode.
        self.form = None if wire is None or self.algorithm != KV_RING else FORMATS[wire]
        self.largest_scales: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, of k and v, (KV heads,)
        self.layers_done: dict[int, float | None] = {}  # with the scale of each, in their order
        self.said: Mapping[str, str] = {}  # what else the ranks must agree on, by the caller
        self.is_agreed = False
        for part in parts:
            if part.sequence not in state.stored:
                state.stored[part.sequence] = Stored(state.spec)
            state.stored[part.sequence].reserve(part.after.counts[state.rank])
        self.plans = {mask: self._plan(mask) for mask in dict.fromkeys(state.model.masks)}
        state.turn = self

    @property
    def state(self) -> CacheState:
        """The cache's; refused once the turn is over."""
        if not self.is_open:
            raise CacheError("the turn is over; begin another")
        return self._state

    @property
    def is_open(self) -> bool:
        """Neither committed nor aborted yet."""
        return self._state.turn is self

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that get new tokens, in the order in which their tokens stand."""
        return tuple(part.sequence for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """New tokens on all ranks."""
        return sum(part.num_new for part in self.parts)

    @cached_property
    def num_rows(self) -> int:
        """New tokens this rank computes."""
        if self.query == "replicated":
            return self.num_tokens
        return sum(len(span) for part in self.parts for span in part.new[self._state.rank])

    @cached_property
    def layout(self) -> Layout:
        """Who computes which new token, counted through all sequences: what `rs.shard` and `rs.gather` take."""
        if self.query == "replicated":
            return Layout(((),) * self._state.world_size, (Span(0, self.num_tokens),))
        return Layout(tuple(tuple(self._rows(rank)) for rank in range(self._state.world_size)))

    @cached_property
    def positions(self) -> torch.Tensor:
        """The position of each of this rank's rows in its own sequence."""
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
        """What this rank stores: for each sequence where in its storage, and which rows of the k it is given."""
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

    def commit(self) -> None:
        """Count the new tokens in. Every layer must have been run."""
        state = self.state
        missing = [layer for layer in range(state.model.num_layers) if layer not in self.layers_done]
        if missing:
            raise CacheError(f"commit without layers {missing}: run each layer once, or abort the turn")
        for part in self.parts:
            state.placements[part.sequence] = part.after
        state.note("turn", [(part.sequence, part.num_new) for part in self.parts], self.layers_done)
        state.turn = None

    def abort(self) -> None:
        """Forget the turn: the cache is as it was before."""
        state = self.state
        state.turn = None
        state.tidy()

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self.is_open:
            return
        if kind is None:
            self.commit()
        else:
            self.abort()

    def __repr__(self) -> str:
        new = ", ".join(f"{part.sequence}: {part.num_new} after {part.start}" for part in self.parts)
        return f"<Turn {self.algorithm}, sequences {{{new}}}>"

    def signature(self, layer: int, scale: float) -> Signature:
        """All that must agree between ranks, of the turn and of its first layer; the next turn looks at the others."""
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
                "wire": self.form,
                "query": self.query,
                "layer": layer,
                "scale": scale,
                **self.said,
            }
        )

    def _rows(self, rank: int) -> Iterator[Span]:
        offset = 0
        for part in self.parts:
            by = offset - part.start
            yield from (Span(span.start + by, span.stop + by, span.step) for span in part.new[rank])
            offset += part.num_new

    def _plan(self, mask: Mask) -> Plan:
        state = self._state
        sizes = row_sizes(state, self.form)
        block_starts = tuple(tuple(state.stored[part.sequence].starts) for part in self.parts)
        problem = plan_problem(mask, self.parts, sizes, state.rank, block_starts, self.query == "replicated")
        schedule = proven_schedule(self.algorithm, problem.visible(), self.query)
        return Plan(problem, bind_once(compile_rank(schedule, state.rank), problem))


def row_sizes(state: CacheState, wire: Format | None) -> RowSizes:
    """The sizes of a turn's rows; K and V travel as they are stored, or encoded."""
    model, spec = state.model, state.spec
    dims, dtypes = spec.dims, spec.dtypes
    if wire is not None and state.form is None:
        dims, dtypes = (model.head_dim, 1, model.v_head_dim, 1), encoded_dtypes(wire)
    return RowSizes(
        model.heads,
        model.head_dim,
        model.v_head_dim,
        model.dtype.itemsize,
        accumulator_dtype(model.dtype).itemsize,
        dims,
        dtypes,
    )


def make_parts(state: CacheState, new_lengths: Mapping[int, int]) -> tuple[Part, ...]:
    """Deal the new tokens of each sequence to the ranks."""
    world_size = state.world_size
    taken = [0] * world_size  # by all sequences of this turn so far
    parts = []
    for slot, (sequence, num_new) in enumerate(new_lengths.items()):
        before = state.placements.get(sequence) or Placement.empty(world_size)
        start = before.length
        shift = slot + start  # moves on by one with every token, as the paper's round-robin does
        rotated = [(rank + shift) % world_size for rank in range(world_size)]
        dealt = deal(before.counts, num_new, sorted(rotated, key=taken.__getitem__))
        new = place(start, dealt)
        taken = [a + b for a, b in zip(taken, dealt, strict=True)]
        parts.append(Part(sequence, start, num_new, new, before.extended(new)))
    return tuple(parts)


def check_room(state: CacheState, after: Mapping[int, Placement], asked: str) -> None:
    """Refuse what is asked for if some rank would then hold too many tokens."""
    if state.max_tokens is None:
        return
    held = [sum(placement.counts[rank] for placement in after.values()) for rank in range(state.world_size)]
    fullest = max(range(state.world_size), key=held.__getitem__)
    if held[fullest] > state.max_tokens:
        raise CacheError(
            f"{asked}: rank {fullest} would hold {held[fullest]} tokens and max_tokens is {state.max_tokens}; drop or "
            "truncate sequences, or make a larger cache"
        )

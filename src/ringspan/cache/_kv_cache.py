"""The KV cache of long conversations, sharded over the ranks of a group.

Each rank stores its own tokens, for all layers; every rank knows the placement of all tokens (`_placement.py`). A turn
adds tokens to some sequences and is committed, or leaves no trace. Only `save`, `load` and a first `begin` that
measures the machine send messages. All ranks must make the same calls; the next turn detects a rank that did not.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ringspan.algorithms import Query, check_algorithm
from ringspan.algorithms.choose import DEFAULT_ALGORITHM, Q_RING, RINGS, RingWork, choose_by_time
from ringspan.arguments import LIST, TEXT, Kind, check_arguments, instance_of, optional
from ringspan.cache._arguments import (
    DTYPES,
    by_sequence,
    layer_masks,
    refuse_looking_ahead,
    storage_codec,
    whole_number,
)
from ringspan.cache._layer import check_layer_number
from ringspan.cache._plan import SequencePart, make_parts, plan_problem, ring_work
from ringspan.cache._saving import load, save
from ringspan.cache._state import CacheModel, CacheState
from ringspan.cache._storage import RowSpec, Stored
from ringspan.cache._turn import Chosen, Turn, row_sizes, wire_codec
from ringspan.errors import CacheError, MaskError, ShapeError, UnsupportedError
from ringspan.mask import Mask
from ringspan.runtime.calibrate import measure_machine
from ringspan.runtime.checks import DEVICE
from ringspan.runtime.codec import Quantized
from ringspan.runtime.quantize import find_format
from ringspan.runtime.session import session_of
from ringspan.schedule import Heads

_ALGORITHMS = ("auto", *RINGS)
_DTYPE = instance_of(torch.dtype, "torch.float32")
_MASKS = Kind("a mask", "give one, or a list of one for each layer", lambda v: isinstance(v, Mask | list | tuple))


class KVCache:
    """One rank's part of a KV cache.

    Args:
        num_layers: Layers of the model.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Head dim of q and k.
        v_head_dim: Head dim of v; `head_dim` by default.
        dtype: The dtype of q, k and v.
        storage: How K and V are stored: None for `dtype`, "float32", "bfloat16", "float16", or quantised with a bounded
            error (`Turn.error_bound`): "int8" or "float8_e4m3".
        mask: Who sees whom within a sequence: one mask, or one per layer; causal by default.
        max_tokens: Upper bound of the tokens on a rank, over all sequences; None is unbounded.
        kernel: "auto" or the name of a kernel.
        device: The device of the cache.
        group: A group, as in `rs.attention`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        storage: str | None = None,
        mask: Mask | Sequence[Mask] | None = None,
        max_tokens: int | None = None,
        kernel: str = "auto",
        device: torch.device | str = "cpu",
        group: Any = None,
    ) -> None:
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        counts = {"num_layers": num_layers, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        check_arguments(dtype=(_DTYPE, dtype), storage=(optional(TEXT), storage), kernel=(TEXT, kernel))
        check_arguments(mask=(optional(_MASKS), mask), device=(DEVICE, device))
        for name, value in (counts | {"head_dim": head_dim, "v_head_dim": v_head_dim}).items():
            whole_number(name, value, 1)
        if max_tokens is not None:
            whole_number("max_tokens", max_tokens, 1)
        if num_heads % num_kv_heads:
            raise ShapeError(
                f"the query heads are a multiple of the KV heads, and num_kv_heads is {num_kv_heads}",
                argument="num_heads",
                value=num_heads,
                remedy=f"use a multiple of {num_kv_heads}",
            )
        if dtype not in DTYPES.values():
            raise ShapeError(
                "no such dtype of q, k and v", argument="dtype", value=dtype, remedy=f"use {', '.join(DTYPES)}"
            )
        masks = layer_masks(mask, num_layers)
        heads = Heads(num_heads, num_kv_heads)
        model = CacheModel(num_layers, heads, head_dim, v_head_dim, dtype, masks)
        device = torch.empty(0, device=device).device
        codec = storage_codec(model, storage)
        contents = f"{model}, storage {storage or 'as it is'}"
        self._state = CacheState(
            model=model,
            group=group,
            session=session_of(group),
            spec=RowSpec(num_layers, num_kv_heads, codec.dims(head_dim, v_head_dim), codec.dtypes, device),
            codec=codec,
            kernel_name=kernel,
            max_tokens=max_tokens,
            contents=contents,
            description=f"{contents}, kernel {kernel}, max_tokens {max_tokens}",
        )
        self._state.kernel(softcap=None)  # refuses an unknown name

    def __repr__(self) -> str:
        state = self._state
        held = sum(placement.counts[state.rank] for placement in state.placements.values())
        return (
            f"<KVCache of {len(state.placements)} sequences on {state.world_size} ranks: {held} tokens here, "
            f"{self.nbytes:,} bytes; {state.contents}>"
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of q, k and v."""
        return self._state.model.dtype

    @property
    def lengths(self) -> dict[int, int]:
        """The committed tokens of each sequence, over all ranks."""
        return {sequence: placement.length for sequence, placement in self._state.placements.items()}

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part, spare room included."""
        return sum(stored.nbytes for stored in self._state.stored.values())

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token on the rank that stores it, over all layers."""
        return self._state.spec.bytes_per_token

    def balance(self) -> dict[int, tuple[int, ...]]:
        """By sequence: its tokens on each rank."""
        return {sequence: placement.counts for sequence, placement in self._state.placements.items()}

    def positions(self, sequence: int) -> torch.Tensor:
        """The positions of a sequence that this rank stores."""
        return torch.from_numpy(self._placement(sequence).positions(self._state.rank))

    def rows(self, sequence: int, *, layer: int) -> list[tuple[torch.Tensor, ...]]:
        """This rank's stored rows of a layer, as views (1, KV heads, tokens, dim), one tuple per storage block.

        A tuple is (k, v) in the storage's dtype, or (k, k scales, v, v scales) if the storage is quantised.
        """
        state = self._state
        check_layer_number(layer, state.model.num_layers)
        count = self._placement(sequence).counts[state.rank]
        return list(state.stored[sequence].rows(layer, 0, count))

    def begin(
        self,
        new_lengths: Mapping[int, int] | Sequence[int],
        *,
        starts: Mapping[int, int] | Sequence[int] | None = None,
        algorithm: str = "auto",
        query: Query = "sharded",
        wire: str | None = None,
    ) -> Turn:
        """Plan new tokens for some sequences.

        Args:
            new_lengths: New tokens by sequence number; a list counts for sequences 0, 1, 2, …. An unknown number begins
                a new sequence.
            starts: The position of each first new token, for callers that count positions themselves; refused unless it
                is the number of cached tokens.
            algorithm: "pass_kv", "pass_q", or "auto" for the one that should be faster on this machine.
            query: "sharded": each rank computes some of the new tokens (`turn.layout`). "replicated": every rank
                computes all of them against the keys it stores, and one merge leaves the result on all ranks.
            wire: "int8" or "float8_e4m3": how K and V travel in pass_kv, with the error that `Turn.error_bound`
                bounds. None sends them as they are stored.
        """
        state = self._state
        try:
            with state.session.call():
                state.refuse_during_turn("begin")
                check_arguments(query=(TEXT, query), wire=(optional(TEXT), wire), algorithm=(TEXT, algorithm))
                lengths = by_sequence("new_lengths", new_lengths, least=1)
                if not lengths:
                    raise CacheError(
                        "a turn has at least one sequence",
                        argument="new_lengths",
                        value=new_lengths,
                        remedy="name a sequence and its new tokens, such as {0: 100}",
                    )
                self._check_starts(lengths, starts)
                self._check_options(algorithm, query, wire)
                self._check_masks(lengths)
                parts = make_parts(state.placements, lengths, state.world_size)
                after = state.placements | {part.sequence: part.after for part in parts}
                state.check_room(after, "new_lengths", lengths)
                return Turn(state, parts, query, self._choose(parts, algorithm, query, wire), wire)
        except Exception:
            if state.turn is None:
                state.tidy()
            raise

    def truncate(self, sequence: int, position: int) -> None:
        """Remove the tokens of a sequence from `position` on."""
        state = self._state
        state.refuse_during_turn("truncate")
        placement = self._placement(sequence)
        position = whole_number("position", position, 0)
        if position > placement.length:
            raise CacheError(
                f"sequence {sequence} has {placement.length} tokens",
                argument="position",
                value=position,
                remedy=f"use 0 to {placement.length}",
            )
        state.placements[sequence] = placement.truncated(position)
        state.stored[sequence].trim(state.placements[sequence].counts[state.rank])
        state.note("truncate", sequence, position)

    def drop(self, sequence: int) -> None:
        """Remove a sequence and free its memory."""
        self._state.refuse_during_turn("drop")
        self._placement(sequence)
        del self._state.placements[sequence], self._state.stored[sequence]
        self._state.note("drop", sequence)

    def select(self, sources: Sequence[int]) -> None:
        """Replace sequence i by sequence `sources[i]` for every i, and remove all others, as beam search does.

        A sequence that is named more than once is copied, by each rank its own part; no message is sent.
        """
        state = self._state
        state.refuse_during_turn("select")
        check_arguments(sources=(LIST, sources))
        placements = dict(enumerate(map(self._placement, sources)))
        state.check_room(placements, "sources", [*sources])
        kept: list[Stored] = []
        for i, source in enumerate(sources):
            stored = state.stored[source]
            kept.append(stored.copy() if source in sources[:i] else stored)
        state.placements, state.stored = placements, dict(enumerate(kept))
        state.note("select", [*sources])

    def copy(self) -> "KVCache":
        """An independent copy of the cache; no message is sent."""
        state = self._state
        state.refuse_during_turn("copy")
        twin = copy.copy(self)
        twin._state = replace(
            state,
            placements=dict(state.placements),
            stored={sequence: stored.copy() for sequence, stored in state.stored.items()},
        )
        return twin

    def save(self, folder: str | Path, *, sequences: Sequence[int] | None = None) -> None:
        """Write committed tokens into a folder that all ranks can reach; a collective call.

        Args:
            folder: Where to; a cache that is there already is replaced once this one is complete.
            sequences: The sequences to write; all of them by default.
        """
        save(self._state, folder, sequences)

    def load(self, folder: str | Path, *, numbers: Mapping[int, int] | None = None) -> None:
        """Add sequences from a folder, saved from any number of ranks; a collective call.

        Args:
            folder: Where `save` wrote them.
            numbers: The number here of each saved sequence to load; by default all are loaded under their own numbers.
        """
        load(self._state, self.begin, folder, numbers)

    def _placement(self, sequence: int) -> Any:
        try:
            return self._state.placements[sequence]
        except (KeyError, TypeError):
            known = ", ".join(map(str, self._state.placements)) or "none"
            raise CacheError(
                f"the cache holds sequences {known}", argument="sequence", value=sequence, remedy="use one of them"
            ) from None

    def _check_starts(self, lengths: dict[int, int], starts: Mapping[int, int] | Sequence[int] | None) -> None:
        if starts is None:
            return
        given = by_sequence("starts", starts, least=0)
        if given.keys() != lengths.keys():
            raise CacheError(
                f"it names sequences {[*given]}, and new_lengths names {[*lengths]}",
                argument="starts",
                remedy="give both for the same sequences",
            )
        cached = self.lengths
        for sequence, start in given.items():
            length = cached.get(sequence, 0)
            if start < length:
                raise CacheError(
                    f"positions {start} to {length - 1} are cached already",
                    argument=f"starts[{sequence}]",
                    value=start,
                    remedy=f"truncate sequence {sequence} to {start} first, or start at {length}",
                )
            if start > length:
                raise CacheError(
                    f"positions {length} to {start - 1} would be missing",
                    argument=f"starts[{sequence}]",
                    value=start,
                    remedy=f"start at {length}",
                )

    def _check_masks(self, lengths: dict[int, int]) -> None:
        known = min(mask.num_positions for mask in self._state.model.masks)
        cached = self.lengths
        for sequence, num_new in lengths.items():
            if cached.get(sequence, 0) + num_new > known:
                raise MaskError(
                    f"sequence {sequence} would grow past the {known} positions of its mask",
                    argument="new_lengths",
                    value=lengths,
                    remedy="add fewer tokens, or make the cache with a longer mask",
                )
        starts = {sequence: cached[sequence] for sequence in lengths if cached.get(sequence)}
        for mask in dict.fromkeys(self._state.model.masks):
            refuse_looking_ahead(mask, starts)

    def _check_options(self, algorithm: str, query: Query, wire: str | None) -> None:
        if query not in ("sharded", "replicated"):
            raise UnsupportedError(
                "new tokens are sharded over the ranks or replicated on all",
                argument="query",
                value=query,
                remedy='use "sharded" or "replicated"',
            )
        check_algorithm(algorithm, _ALGORITHMS)
        if query == "replicated" and algorithm != "auto":
            raise UnsupportedError(
                'with query="replicated" only partial results travel',
                argument="algorithm",
                value=algorithm,
                remedy="leave it out",
            )
        if wire is None:
            return
        form = find_format("wire", wire)
        if query == "replicated" or algorithm == Q_RING:
            raise UnsupportedError(
                "K and V do not travel in this turn", argument="wire", value=wire, remedy="leave it out"
            )
        if isinstance(self._state.codec, Quantized) and self._state.codec.form != form:
            raise UnsupportedError(
                "the cache stores K and V in another encoding, and they travel as they are stored",
                argument="wire",
                value=wire,
                remedy="leave it out",
            )

    def _choose(self, parts: tuple[SequencePart, ...], algorithm: str, query: Query, wire: str | None) -> Chosen:
        state = self._state
        if query == "replicated":
            return Chosen("one_shot", "one_shot: every rank has the queries, so one merge of partial results is all.")
        if algorithm != "auto":
            return Chosen(algorithm, f"{algorithm}: asked for.")
        if state.world_size == 1:
            return Chosen(DEFAULT_ALGORITHM, f"{DEFAULT_ALGORITHM}: a single rank sends nothing.")
        if all(part.num_new == 1 for part in parts):
            return Chosen(Q_RING, f"{Q_RING}: one query per sequence is the smallest message there is.")
        sizes = row_sizes(state, wire_codec(state, wire))
        starts = ((),) * len(parts)
        works = {
            mask: ring_work(plan_problem(mask, parts, sizes, state.rank, starts, is_replicated=False))
            for mask in dict.fromkeys(state.model.masks)
        }
        # Layers may have different masks; the mean over all layers decides.
        summed = [sum(figures) for figures in zip(*(works[mask] for mask in state.model.masks), strict=True)]
        flops, *nbytes = (figure / state.model.num_layers for figure in summed)
        work = RingWork(flops, *map(int, nbytes))
        choice = choose_by_time(work, None, state.world_size)
        if choice is None:
            figures = measure_machine(
                state.session, dtype=state.model.dtype, head_dim=state.model.head_dim, device=state.spec.device
            )
            choice = choose_by_time(work, figures, state.world_size)
            assert choice is not None
        return Chosen(*choice)

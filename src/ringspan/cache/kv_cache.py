"""The keys and values of long conversations, spread over the ranks of a group.

Each rank stores only its own tokens, with all layers of them; which rank has which is known to all (see
`inference/placement.py`). A turn adds tokens to some sequences at once and is committed or leaves no trace. The
methods here send no message, but for `save`, `load`, and `begin` when it measures the machine for the first time; but
every rank must call them alike, and the next turn finds out if one did not.
"""

import copy
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch

from ringspan.algorithms import Query, check_algorithm
from ringspan.algorithms.choose import RingWork, choose_by_time
from ringspan.cache.plan import Part, plan_problem, ring_work
from ringspan.cache.saving import agree, fill, read_saved, save
from ringspan.cache.storage import RowSpec, Stored
from ringspan.cache.turn import CacheState, Chosen, Model, Turn, check_room, make_parts, row_sizes
from ringspan.errors import CacheError, MaskError, ShapeError, UnsupportedError
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Request
from ringspan.mask import Mask, causal
from ringspan.runtime.calibrate import measure_machine
from ringspan.runtime.quantize import FORMATS, encoded_dtypes, find_format
from ringspan.runtime.session import session_of
from ringspan.schedule import Heads

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALGORITHMS = ("auto", "pass_kv", "pass_q")


class KVCache:
    """One rank's part of a cache.

    Args:
        num_layers: Layers of the model.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Of q and k.
        v_head_dim: Of v; as head_dim by default.
        dtype: Of q, k and v.
        storage: How K and V are kept: None for `dtype`, "float32", "bfloat16", "float16", or, with an error that
            `quantize.py` bounds, "int8" or "float8_e4m3".
        mask: Who sees whom within a sequence; one mask, or one for each layer.
        max_tokens: The most tokens a rank may hold, over all sequences; None is no limit.
        kernel: "auto" or the name of a kernel.
        device: Where the cache is.
        group: What `rs.attention` takes.
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
        for name, value in (counts | {"head_dim": head_dim, "v_head_dim": v_head_dim}).items():
            _whole(name, value, 1)
        if max_tokens is not None:
            _whole("max_tokens", max_tokens, 1)
        if num_heads % num_kv_heads:
            raise ShapeError(
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: the query heads are a multiple of the KV heads"
            )
        if dtype not in _DTYPES.values():
            raise ShapeError(f"dtype={dtype}: q, k and v are one of {', '.join(_DTYPES)}")
        masks = _masks(mask, num_layers)
        heads = Heads(num_heads, num_kv_heads)
        model = Model(num_layers, heads, head_dim, v_head_dim, dtype, masks)
        device = torch.empty(0, device=device).device
        form = FORMATS.get(storage or "")
        contents = f"{model}, storage {storage or 'as it is'}"
        self._state = CacheState(
            model=model,
            group=group,
            session=session_of(group),
            spec=_row_spec(model, storage, device),
            form=form,
            kernel=choose_kernel(kernel, Request(device, dtype, head_dim, v_head_dim)),
            max_tokens=max_tokens,
            contents=contents,
            description=f"{contents}, kernel {kernel}, max_tokens {max_tokens}",
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of q, k and v."""
        return self._state.model.dtype

    @property
    def lengths(self) -> dict[int, int]:
        """The committed tokens of each sequence, on all ranks together."""
        return {sequence: placement.length for sequence, placement in self._state.placements.items()}

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part, room for more included."""
        return sum(stored.nbytes for stored in self._state.stored.values())

    def balance(self) -> dict[int, tuple[int, ...]]:
        """The tokens of each sequence on each rank."""
        return {sequence: placement.counts for sequence, placement in self._state.placements.items()}

    def positions(self, sequence: int) -> torch.Tensor:
        """The positions of a sequence whose keys and values this rank holds."""
        return torch.from_numpy(self._placement(sequence).positions(self._state.rank))

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
            new_lengths: How many new tokens each sequence gets, by its number; a list is for sequences 0, 1, 2, …
                A number that the cache does not know begins a new sequence.
            starts: The position of each first new token, for callers that keep count themselves: refused unless it is
                where the cache goes on.
            algorithm: "pass_kv", "pass_q", or "auto" for what is faster on this machine.
            query: "sharded": each rank computes some of the new tokens (`turn.layout`). "replicated": every rank
                computes all of them, attends to what it holds, and one merge leaves the result on all.
            wire: "int8" or "float8_e4m3": how K and V travel in pass_kv, with an error that `rs.error_bound` bounds.
                None is as they are stored.
        """
        state = self._state
        try:
            with state.session.contract.telling_refusals():
                state.refuse_during_turn("begin")
                lengths = _by_sequence("new_lengths", new_lengths, least=1)
                if not lengths:
                    raise CacheError(f"new_lengths={new_lengths!r}: a turn has at least one sequence")
                self._check_starts(lengths, starts)
                self._check_options(algorithm, query, wire)
                self._check_masks(lengths)
                parts = make_parts(state, lengths)
                after = state.placements | {part.sequence: part.after for part in parts}
                check_room(state, after, f"new_lengths={lengths}")
                return Turn(state, parts, query, self._choose(parts, algorithm, query, wire), wire)
        except Exception:
            if state.turn is None:
                state.tidy()
            raise

    def truncate(self, sequence: int, position: int) -> None:
        """Forget the tokens of a sequence from `position` on."""
        state = self._state
        state.refuse_during_turn("truncate")
        placement = self._placement(sequence)
        position = _whole("position", position, 0)
        if position > placement.length:
            raise CacheError(f"position={position}: sequence {sequence} has only {placement.length} tokens")
        state.placements[sequence] = placement.truncated(position)
        state.stored[sequence].trim(state.placements[sequence].counts[state.rank])
        state.note("truncate", sequence, position)

    def drop(self, sequence: int) -> None:
        """Forget a sequence and free its memory."""
        self._state.refuse_during_turn("drop")
        self._placement(sequence)
        del self._state.placements[sequence], self._state.stored[sequence]
        self._state.note("drop", sequence)

    def select(self, sources: Sequence[int]) -> None:
        """Make sequence i what sequence `sources[i]` is now, for every i, and forget all others: beams that move on.

        A sequence that is named more than once is copied, each rank its own part; no message is sent.
        """
        state = self._state
        state.refuse_during_turn("select")
        placements = dict(enumerate(map(self._placement, sources)))
        check_room(state, placements, f"sources={[*sources]}")
        kept: list[Stored] = []
        for i, source in enumerate(sources):
            stored = state.stored[source]
            kept.append(stored.copy() if source in sources[:i] else stored)
        state.placements, state.stored = placements, dict(enumerate(kept))
        state.note("select", [*sources])

    def copy(self) -> "KVCache":
        """Another cache with the same tokens, to go on from here more than once; no message is sent."""
        state = self._state
        state.refuse_during_turn("copy")
        twin = copy.copy(self)
        twin._state = replace(
            state,
            placements=dict(state.placements),
            stored={sequence: stored.copy() for sequence, stored in state.stored.items()},
        )
        return twin

    def save(self, folder: str | Path) -> None:
        """Write all committed tokens into a folder that all ranks can reach; all ranks must."""
        self._state.refuse_during_turn("save")
        save(self._state, Path(folder))

    def load(self, folder: str | Path) -> None:
        """Fill an empty cache from a folder, whatever number of ranks it was saved from; all ranks must."""
        state, contract = self._state, self._state.session.contract
        with contract.telling_refusals():
            state.refuse_during_turn("load")
            if state.placements:
                raise CacheError(f"load into a cache of sequences {[*state.placements]}: drop them first")
            index, kept = read_saved(state, Path(folder))
        agree(state, "load", Path(folder))
        if not kept:
            return
        lengths = {sequence: placement.length for sequence, placement in kept.items()}
        with self.begin(lengths, algorithm="pass_kv") as turn:
            with contract.telling_refusals():
                fill(turn, Path(folder), index)
            agree(state, "loaded", Path(folder))

    def _placement(self, sequence: int) -> Any:
        try:
            return self._state.placements[sequence]
        except (KeyError, TypeError):
            known = ", ".join(map(str, self._state.placements)) or "none"
            raise CacheError(f"sequence={sequence!r}: the cache does not hold it; there are {known}") from None

    def _check_starts(self, lengths: dict[int, int], starts: Mapping[int, int] | Sequence[int] | None) -> None:
        if starts is None:
            return
        given = _by_sequence("starts", starts, least=0)
        if given.keys() != lengths.keys():
            raise CacheError(
                f"starts for sequences {[*given]} and new_lengths for {[*lengths]}: give both for the same"
            )
        cached = self.lengths
        for sequence, start in given.items():
            length = cached.get(sequence, 0)
            if start < length:
                raise CacheError(
                    f"starts[{sequence}]={start}: positions {start} to {length - 1} are cached already; truncate "
                    f"sequence {sequence} to {start} first, or start at {length}"
                )
            if start > length:
                raise CacheError(
                    f"starts[{sequence}]={start}: positions {length} to {start - 1} would be missing; start at {length}"
                )

    def _check_masks(self, lengths: dict[int, int]) -> None:
        known = min(mask.num_positions for mask in self._state.model.masks)
        cached = self.lengths
        for sequence, num_new in lengths.items():
            if cached.get(sequence, 0) + num_new > known:
                raise MaskError(f"sequence {sequence} would grow past the {known} positions its mask knows")
        starts = {sequence: cached[sequence] for sequence in lengths if cached.get(sequence)}
        for mask in dict.fromkeys(self._state.model.masks):
            _refuse_looking_ahead(mask, starts)

    def _check_options(self, algorithm: str, query: Query, wire: str | None) -> None:
        if query not in ("sharded", "replicated"):
            raise UnsupportedError(f'query={query!r}: new tokens are "sharded" over the ranks or "replicated" on all')
        check_algorithm(algorithm, _ALGORITHMS)
        if query == "replicated" and algorithm != "auto":
            raise UnsupportedError(
                f'algorithm={algorithm!r}, query="replicated": nothing travels but partial results; leave it out'
            )
        if wire is None:
            return
        form = find_format("wire", wire)
        if query == "replicated" or algorithm == "pass_q":
            raise UnsupportedError(f"wire={wire!r}: K and V do not travel in this turn; leave it out")
        if self._state.form not in (None, form):
            raise UnsupportedError(f"wire={wire!r}: the cache is encoded in another way already; leave it out")

    def _choose(self, parts: tuple[Part, ...], algorithm: str, query: Query, wire: str | None) -> Chosen:
        state = self._state
        if query == "replicated":
            return Chosen("one_shot", "one_shot: every rank has the queries, so one merge of partial results is all.")
        if algorithm != "auto":
            return Chosen(algorithm, f"{algorithm}: asked for.")
        if state.world_size == 1:
            return Chosen("pass_kv", "pass_kv: a single rank sends nothing.")
        if all(part.num_new == 1 for part in parts):
            return Chosen("pass_q", "pass_q: one query per sequence is the smallest message there is.")
        sizes = row_sizes(state, None if wire is None else FORMATS[wire])
        starts = ((),) * len(parts)
        works = {
            mask: ring_work(plan_problem(mask, parts, sizes, state.rank, starts, is_replicated=False))
            for mask in dict.fromkeys(state.model.masks)
        }
        # The layers may see differently; what they take together decides.
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


def _row_spec(model: Model, storage: str | None, device: torch.device) -> RowSpec:
    dims = (model.head_dim, model.v_head_dim)
    if storage in FORMATS:
        k, v = dims
        dtypes = encoded_dtypes(FORMATS[storage])
        return RowSpec(model.num_layers, model.heads.num_kv_heads, (k, 1, v, 1), dtypes, device)
    if storage is not None and storage not in _DTYPES:
        choices = ", ".join([*_DTYPES, *FORMATS])
        raise UnsupportedError(f"storage={storage!r}: K and V are kept as one of {choices}, or None for their own type")
    dtype = model.dtype if storage is None else _DTYPES[storage]
    return RowSpec(model.num_layers, model.heads.num_kv_heads, dims, (dtype, dtype), device)


def _masks(mask: Mask | Sequence[Mask] | None, num_layers: int) -> tuple[Mask, ...]:
    masks = (mask,) * num_layers if isinstance(mask, Mask) else tuple(mask or (causal(),) * num_layers)
    if len(masks) != num_layers or not all(isinstance(mask, Mask) and mask.rows is None for mask in masks):
        raise MaskError(
            f"mask={mask!r}: give one mask that is not per_row, or one for each of the {num_layers} layers; each is in "
            "the positions of a single sequence"
        )
    return masks


def _refuse_looking_ahead(mask: Mask, starts: Mapping[int, int]) -> None:
    """The output of a cached token lacks what is new, so it must not see that."""
    first_new = np.array([*starts.values()], np.int64)
    # No band of a mask ends earlier for a later token: where it reaches nothing new for the last one, it does for none.
    reaches = [hi > first_new for _, hi in mask.bands(first_new - 1)]
    for sequence, start in itertools.compress(starts.items(), map(any, zip(*reaches, strict=True))):
        if any(((hi > start) & (hi > lo)).any() for lo, hi in mask.bands(np.arange(start))):
            raise MaskError(
                f"sequence {sequence} goes on at position {start}: by {mask!r} earlier tokens see later ones, which "
                "their outputs lack; give all that a token sees in the same turn"
            )


def _by_sequence(name: str, values: Mapping[int, int] | Iterable[int], least: int) -> dict[int, int]:
    if not isinstance(values, Mapping):
        if not isinstance(values, Iterable):
            raise CacheError(f"{name}={values!r}: give a number for each sequence, as a list or a dict")
        values = dict(enumerate(values))
    return {
        _whole(f"a key of {name}", sequence, 0): _whole(f"{name}[{sequence}]", value, least)
        for sequence, value in values.items()
    }


def _whole(name: str, value: SupportsIndex, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ShapeError(f"{name}={value!r}: it is a whole number; use {least} or more")
    return number

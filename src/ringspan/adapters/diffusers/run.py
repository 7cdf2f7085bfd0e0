"""A forward on ranks: what is each block given, what does its attention see, and where is the whole put together again?

The first blocks are given this rank's rows of what follows the tokens. What blocks return goes on as it is; what is
used whole after them is gathered from all ranks. Every decision follows from the plan, never from this rank's sizes.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ringspan.adapters.diffusers.leaves import Leaf, flatten, is_count, map_leaves
from ringspan.adapters.diffusers.masks import NO_MASK, Read, read_outer, read_part, read_whole
from ringspan.adapters.diffusers.outer_masks import OuterMasks
from ringspan.adapters.diffusers.plan import Attends, AttentionPlan, ForwardPlan, Side
from ringspan.adapters.diffusers.wiring import SdpaCall
from ringspan.errors import LayoutError, ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous
from ringspan.mask import Mask, causal
from ringspan.runtime.api import attention
from ringspan.runtime.session import Session, session_of
from ringspan.span import Span
from ringspan.training import gather

_MOST_WHOLES = 4
_NOTHING_LEFT_OUT = "step caches and whatever else leaves blocks out must be off"


class RankOptions(NamedTuple):
    group: Any
    algorithm: str
    mesh: tuple[int, int] | None

    @property
    def session(self) -> Session:
        return session_of(self.group)

    @property
    def rank(self) -> int:
        return self.session.transport.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.session.transport.world_size

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks that this one does not make the call that they start."""
        self.session.call().tell(error)


class Noted(NamedTuple):
    """A recorded tensor of a forward: the rows of a side, or the whole."""

    label: str
    value: torch.Tensor
    dim: int
    side: Side | None


class Walk:
    """Follows the plan through a forward and records tensors for the comparison."""

    def __init__(self, plan: ForwardPlan, notes: list[Noted] | None = None) -> None:
        self.plan = plan
        self.notes = notes
        self._number = -1
        self._attended = 0
        self._inside: AttentionPlan | None = None

    @property
    def where(self) -> str:
        """The call of a block, and of attention in it, that was reached."""
        inside = "in" if self._inside is not None else "after"
        number = min(max(self._number, 0), len(self.plan.calls) - 1)
        attended = f", after {self._attended} calls of attention" if self._inside is not None else ""
        return f"{inside} {self.plan.calls[number].name}{attended}"

    def begin(self, name: str) -> AttentionPlan:
        """The plan of the next call of a block."""
        self._number += 1
        if self._number >= len(self.plan.calls) or self.plan.calls[self._number].name != name:
            raise UnsupportedError(
                f"{name} is called where {self._name_of(self._number)} was when the model was learned; "
                f"{_NOTHING_LEFT_OUT}"
            )
        self._attended = 0
        call = self.plan.calls[self._number]
        self._inside = call if call.takes_part else None
        return call

    def end(self) -> AttentionPlan:
        """The plan of the call that is over."""
        call, self._inside = self.plan.calls[self._number], None
        if call.takes_part and self._attended != len(call.attends):
            raise UnsupportedError(
                f"{call.name} called scaled_dot_product_attention {self._attended} times, "
                f"and {len(call.attends)} times when it was learned: use diffusers' native backend"
            )
        return call

    def next_attends(self) -> tuple[str, Attends] | None:
        """The name and the plan of the next call of attention; None outside of blocks that are given tokens."""
        if self._inside is None:
            return None
        number, self._attended = self._attended, self._attended + 1
        if number >= len(self._inside.attends):
            raise UnsupportedError(
                f"{self._inside.name} called scaled_dot_product_attention more often than when it was learned"
            )
        return f"call {number} of attention in {self._inside.name}", self._inside.attends[number]

    def check_complete(self) -> None:
        """Check that all blocks were called."""
        if self._number != len(self.plan.calls) - 1:
            raise UnsupportedError(
                f"the forward ended where {self._name_of(self._number + 1)} was called when the model was learned; "
                f"{_NOTHING_LEFT_OUT}"
            )

    def note_attention(self, label: str, attends: Attends, asked: SdpaCall, out: torch.Tensor) -> None:
        """Record q, k, v and the output."""
        if self.notes is not None:
            values = (
                (asked.query, attends.q),
                (asked.key, attends.keys),
                (asked.value, attends.keys),
                (out, attends.q),
            )
            for name, (x, side) in zip(("q", "k", "v", "the output"), values, strict=True):
                self.notes.append(Noted(f"{name} of {label}", x, x.ndim - 2, side))

    def note_outputs(self, call: AttentionPlan, output: Any) -> None:
        """Record the outputs of a block."""
        if self.notes is not None:
            for path, x in flatten({"output": output}):
                if isinstance(x, torch.Tensor):
                    found = call.outputs.get(path)
                    side = None if found is None else found.side
                    self.notes.append(Noted(f"{path} of {call.name}", x, 0 if found is None else found.dim, side))

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call other functions of torch unchanged."""
        return function(*args, **kwargs)

    def _name_of(self, number: int) -> str:
        calls = self.plan.calls
        return calls[number].name if number < len(calls) else "the end of the forward"


class TokenShardRun(Walk):
    """A forward over this rank's rows."""

    def __init__(self, plan: ForwardPlan, options: RankOptions, notes: list[Noted] | None = None) -> None:
        super().__init__(plan, notes)
        self.options = options
        self.num_tokens: int | None = None
        self._wholes: dict[int, tuple[torch.Tensor, Read]] = {}  # masks of all pairs, by id
        self._outer_masks = OuterMasks()
        self._masks: list[torch.Tensor] = []  # of this block, whole, if they are of keys
        self._rank = options.rank
        self._world_size = options.world_size

    def enter(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Cut this rank's rows out of every argument that follows the tokens."""
        call = self.begin(name)
        if not call.takes_part:
            return arguments
        tensors = [path for path, x in flatten(arguments) if isinstance(x, torch.Tensor)]
        if sorted(tensors) != sorted(call.tensors):
            names = ", ".join(sorted({*tensors} ^ {*call.tensors}))
            raise UnsupportedError(f"{name} was learned with other tensors among its arguments: {names}")
        if self.num_tokens is None:
            self.num_tokens = self._count_tokens(call, arguments)
        self._masks = []
        self._outer_masks.clear()
        return {key: map_leaves(lambda leaf: self._cut(call, leaf), x, key) for key, x in arguments.items()}

    def leave(self, name: str, output: Any) -> Any:  # noqa: ARG002
        """Gather the rows of all ranks of what is used after the blocks."""
        call = self.end()
        if not call.takes_part:
            return output
        self.note_outputs(call, output)
        return map_leaves(lambda leaf: self._gather(call, leaf), {"output": output})["output"]

    def attend(self, asked: SdpaCall) -> torch.Tensor:
        """Attend to the tokens of all ranks, or to rows that every rank holds."""
        found = self.next_attends()
        if found is None:
            return asked.alone()
        label, attends = found
        if asked.dropout_p:
            raise UnsupportedError(
                f"{label} has dropout_p={asked.dropout_p}: ranks would drop other scores", remedy="set it to 0"
            )
        out = asked.alone() if attends.is_local else self._attend(label, asked, attends)
        self.note_attention(label, attends, asked, out)
        return out

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch; inside of blocks, masks of all pairs are not built."""
        if self._inside is None:
            return function(*args, **kwargs)
        return self._outer_masks.call(function, args, kwargs)

    # Arguments and outputs

    def _count_tokens(self, call: AttentionPlan, arguments: dict[str, Any]) -> int:
        for path, x in flatten(arguments):
            tokens = call.tokens.get(path)
            if tokens is not None and not tokens.side.has_others and isinstance(x, torch.Tensor):
                num_tokens = int(x.shape[tokens.dim])
                if num_tokens < self._world_size:
                    raise LayoutError(
                        f"{num_tokens} tokens on {self._world_size} ranks: every rank needs at least one",
                        remedy="use fewer ranks, or larger frames",
                    )
                return num_tokens
        raise UnsupportedError(f"{call.name}: no argument tells how many tokens there are")

    def _cut(self, call: AttentionPlan, leaf: Leaf) -> Any:
        path, value = leaf
        if path in call.counts and is_count(value):
            return self._cut_count(value) if path in self.plan.cut_counts else value
        tokens = call.tokens.get(path)
        if tokens is None or not isinstance(value, torch.Tensor):
            return value
        what = f"argument {path} of {call.name}"
        if tokens.is_shard:
            self._layout(tokens.side, value.shape[tokens.dim], what)
            return value
        assert self.num_tokens is not None
        others = value.shape[tokens.dim] - self.num_tokens
        if others < 0 or (others and not tokens.side.has_others):
            raise ShapeError(
                f"{what} has shape {tuple(value.shape)}, and its dim {tokens.dim} should have a row for each of "
                f"{self.num_tokens} tokens"
            )
        if tokens.dim == value.ndim - 1:  # its rows are keys
            self._masks.append(value)
        layout = _beside(self.num_tokens, self._world_size, others, tokens.side.others_first)
        return layout.shard(value, self._rank, tokens.dim)

    def _cut_count(self, count: int) -> int:
        """The number of this rank's tokens among the first `count`."""
        assert self.num_tokens is not None
        layout = contiguous(self.num_tokens, self._world_size)
        return int((layout.positions(self._rank) < count).sum())

    def _gather(self, call: AttentionPlan, leaf: Leaf) -> Any:
        tokens = call.outputs.get(leaf.path)
        if tokens is None or tokens.is_shard:
            return leaf.value
        layout = self._layout(tokens.side, leaf.value.shape[tokens.dim], f"{leaf.path} of {call.name}")
        return self.gather_rows(leaf.value, layout, tokens.dim)

    def gather_rows(self, rows: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        return gather(rows, layout, self.options.group, dim=dim)

    def _layout(self, side: Side | None, num_rows: int, what: str) -> Layout:
        """The layout of the sequence of which this rank holds so many rows."""
        assert self.num_tokens is not None
        if side is None:
            return Layout(((),) * self._world_size, (Span(0, num_rows),))
        others = num_rows - contiguous(self.num_tokens, self._world_size).shard_len(self._rank)
        if others < 0 or (others and not side.has_others):
            raise ShapeError(
                f"{what} has {num_rows} rows on rank {self._rank}, and should have "
                f"{contiguous(self.num_tokens, self._world_size).shard_len(self._rank)} of {self.num_tokens} tokens"
            )
        return _beside(self.num_tokens, self._world_size, others, side.others_first)

    # Attention

    def _attend(self, label: str, asked: SdpaCall, attends: Attends) -> torch.Tensor:
        assert attends.keys is not None
        layout = self._layout(attends.q, asked.query.shape[-2], f"q of {label}")
        kv_layout = self._layout(attends.keys, asked.key.shape[-2], f"k of {label}")
        try:
            read = self._read(asked, attends, layout, kv_layout)
        except UnsupportedError as error:
            raise UnsupportedError(f"{label}: {error}") from None
        out = self.attend_rows(asked, layout, kv_layout, read.mask)
        return out if read.blind is None else out.masked_fill(read.blind, 0)

    def attend_rows(self, asked: SdpaCall, layout: Layout, kv_layout: Layout, mask: Mask) -> torch.Tensor:
        """Attention of this rank's queries to the keys of all ranks."""
        out = attention(
            asked.query,
            asked.key,
            asked.value,
            mask=mask,
            layout=layout,
            kv_layout=kv_layout,
            group=self.options.group,
            algorithm=self.options.algorithm,
            mesh=self.options.mesh,
            scale=asked.scale,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _read(self, asked: SdpaCall, attends: Attends, layout: Layout, kv_layout: Layout) -> Read:
        mask = asked.attn_mask
        assert self.num_tokens is not None
        if asked.is_causal:
            if attends.q != attends.keys or mask is not None:
                raise UnsupportedError("is_causal=True with queries that are not the keys' own, or with a mask")
            return Read(causal(), None)
        if mask is None:
            return NO_MASK
        outer = self._outer_masks.find(mask)
        if outer is not None:
            return read_outer(outer, kv_layout, self._rank, self._masks)
        if mask.shape[-2:] == (layout.num_positions, kv_layout.num_positions) and self._world_size > 1:
            return self._read_whole(mask)
        return read_part(mask, kv_layout, self._rank, self._masks)

    def _read_whole(self, mask: torch.Tensor) -> Read:
        """Read a mask once for all layers that receive the same tensor."""
        if id(mask) not in self._wholes:
            if len(self._wholes) == _MOST_WHOLES:  # layers that make their own must not fill the memory
                self._wholes.clear()
            self._wholes[id(mask)] = (mask, read_whole(mask))
        return self._wholes[id(mask)][1]


@lru_cache(maxsize=256)
def _beside(num_tokens: int, world_size: int, num_others: int, others_first: bool) -> Layout:
    """A layout with one run of tokens per rank, and rows that all ranks hold."""
    start = num_others if others_first else 0
    others = (Span(0, num_others) if others_first else Span(num_tokens, num_tokens + num_others),)
    return Layout(contiguous(num_tokens, world_size, start=start).spans_by_rank, others if num_others else ())


def rows_of(side: Side | None, whole: torch.Tensor, dim: int, num_tokens: int, options: RankOptions) -> torch.Tensor:
    """This rank's rows of a tensor of a forward in one process."""
    if side is None:
        return whole
    layout = _beside(num_tokens, options.world_size, whole.shape[dim] - num_tokens, side.others_first)
    return layout.shard(whole, options.rank, dim)

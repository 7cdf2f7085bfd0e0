"""Which mask does a model mean by the tensor it gives to attention?

Masks are read, not built. Most say which keys are padding: attention is given the part of such a mask that belongs to
this rank's keys, and which whole it is a part of is found among the arguments of the block. Those of all pairs are made
by models themselves, before their blocks, and are read as intervals of keys.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ringspan.adapters.diffusers.outer_masks import OuterMask
from ringspan.adapters.keys import Intervals, Keys, by_row
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout
from ringspan.mask import Mask, full

_HIDDEN = -1e4  # models add this, or less, to the scores of keys that are hidden
_MOST_CHAINS = 64  # of intervals of keys in a mask of all pairs

Bools = npt.NDArray[np.bool_]


class Read(NamedTuple):
    """A mask, and the queries that see no key, (batch or 1, 1, q, 1), if there are any."""

    mask: Mask
    blind: torch.Tensor | None


NO_MASK = Read(full(), None)


def read_part(mask: torch.Tensor, layout: Layout, rank: int, wholes: Sequence[torch.Tensor]) -> Read:
    """A mask over this rank's own keys and those that all ranks hold, (…, q or 1, keys)."""
    visible = _without_heads(_visible(mask))
    rows, keys = visible.any(-1), visible.any(-2)
    if visible.shape[-2] > 1 and not torch.equal(visible, rows.unsqueeze(-1) & keys.unsqueeze(-2)):
        raise UnsupportedError(
            "attn_mask hides different keys from different queries, and a rank has a part of the keys only; a mask of "
            "all pairs must be an argument of the blocks"
        )
    return _read_keys(rows, keys, layout, rank, wholes)


def read_outer(outer: OuterMask, layout: Layout, rank: int, wholes: Sequence[torch.Tensor]) -> Read:
    """A mask of all pairs that shows some keys to some queries, and nothing to the others."""
    keys = outer.keys[:, 0, 0]
    return _read_keys(outer.queries[:, 0, :, 0] & keys.any(-1, keepdim=True), keys, layout, rank, wholes)


def _read_keys(
    rows: torch.Tensor, keys: torch.Tensor, layout: Layout, rank: int, wholes: Sequence[torch.Tensor]
) -> Read:
    found = by_row([_keys_mask(row.tobytes()) for row in _whole_keys(keys, layout, rank, wholes).cpu().numpy()])
    return Read(found or full(), None if rows.all() else ~rows[:, None, :, None])


def _whole_keys(keys: torch.Tensor, layout: Layout, rank: int, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
    """(batch or 1, all keys): this rank's part is in one of the masks that the block was given, or hides no tokens."""
    for whole in wholes:
        sizes = [size for size in whole.shape if size != 1]
        if not sizes or sizes[-1] != layout.num_positions or len(sizes) > 2:
            continue
        rows = whole.reshape(-1, layout.num_positions)
        for visible in (rows != 0, rows == 0) if rows.is_floating_point() else (rows != 0,):
            mine = layout.shard(visible, rank, 1)
            if mine.shape[0] in (1, keys.shape[0]) and torch.equal(mine.expand_as(keys), keys):
                return visible
    others = np.searchsorted(layout.positions(rank), layout.replicated_positions())
    whole = keys.new_ones(keys.shape[0], layout.num_positions)
    whole[:, layout.replicated_positions()] = keys[:, others]
    if not torch.equal(layout.shard(whole, rank, 1), keys):
        raise UnsupportedError(
            "attn_mask hides tokens, and no argument of the block tells which ones on other ranks",
            remedy="leave padding out of the latents",
        )
    return whole


def read_whole(mask: torch.Tensor) -> Read:
    """A mask of all pairs of the whole sequence, (…, queries, keys)."""
    visible = _without_heads(_visible(mask))
    return Read(by_row([_pairs_mask(row.cpu().numpy()) for row in visible]) or full(), None)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    visible, hidden = mask == 0, mask <= _HIDDEN
    if not (visible | hidden).all():
        raise UnsupportedError("attn_mask adds a bias to the scores; only masks that show or hide keys can be split")
    if not (visible.any(-1) | (mask == -torch.inf).all(-1)).all():
        raise UnsupportedError("attn_mask hides every key from a query by a large number, which softmax takes away")
    return visible


def _without_heads(visible: torch.Tensor) -> torch.Tensor:
    """(batch or 1, q or 1, keys)."""
    visible = visible[(None,) * (4 - visible.ndim)]
    if visible.shape[1] > 1 and not (visible == visible[:, :1]).all():
        raise UnsupportedError(
            "attn_mask differs between heads; only masks that are the same for all heads can be split"
        )
    return visible[:, 0]


@lru_cache(maxsize=256)
def _keys_mask(bits: bytes) -> Mask:
    """Every query sees the same keys: those of the runs of True."""
    visible = np.frombuffer(bits, np.bool_)
    if visible.all():
        return full()
    ends = np.flatnonzero(np.diff(visible, prepend=False, append=False)).tolist()
    found: Mask = Keys(*ends[:2]) if ends else Keys(0, 0)
    for first, stop in zip(ends[2::2], ends[3::2], strict=True):
        found = found | Keys(first, stop)
    return found


def _pairs_mask(visible: Bools) -> Mask:
    """Each query sees some intervals of keys, which are joined with those of the queries before it."""
    if visible.all():
        return full()
    rows, ends = np.nonzero(np.diff(visible, axis=1, prepend=False, append=False))
    chains: list[_Chain] = []
    for row, first, stop in zip(rows[::2].tolist(), ends[::2].tolist(), ends[1::2].tolist(), strict=True):
        fitting = [x for x in chains if x.can_continue(row, first, stop)]
        chain = next((x for x in fitting if x.first == first), fitting[0] if fitting else None)
        if chain is None:
            chain = _Chain(len(visible), first)
            chains.append(chain)
            if len(chains) > _MOST_CHAINS:
                raise UnsupportedError(
                    f"attn_mask of all pairs needs more than {_MOST_CHAINS} intervals of keys; it has no structure"
                )
        chain.add(row, first, stop)
    found: Mask = Keys(0, 0)
    for chain in chains:
        found = chain.mask() if found == Keys(0, 0) else found | chain.mask()
    return found


class _Chain:
    """One interval of keys for each query; neither end of it ever decreases."""

    def __init__(self, num_queries: int, first: int) -> None:
        self.first = first
        self._stop = first
        self._next_row = 0
        self._ends = np.full((2, num_queries), first)

    def can_continue(self, row: int, first: int, stop: int) -> bool:
        """Could this be the interval of a query behind all those so far?"""
        before = self.first if row == self._next_row else self._stop
        return self._next_row <= row and before <= first and self._stop <= stop

    def add(self, row: int, first: int, stop: int) -> None:
        """The interval of a query; it is empty for the queries between that one and the last."""
        self._ends[:, self._next_row : row] = first if not self._next_row else self._stop
        self._ends[:, row] = first, stop
        self.first, self._stop, self._next_row = first, stop, row + 1

    def mask(self) -> Intervals:
        """What these intervals show."""
        self._ends[:, self._next_row :] = self._stop
        first, stop = self._ends
        return Intervals(first.tobytes(), stop.tobytes())

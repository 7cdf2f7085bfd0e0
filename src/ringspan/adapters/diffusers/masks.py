"""Which mask does a model mean by the tensor it gives to attention?

Masks are read, not built. Most say which keys are padding; those of all pairs may say that frames are causal. What is
neither is refused. The tokens of the video are never padding: of another rank's that could not be seen here.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ringspan.adapters.diffusers.plan import Side
from ringspan.adapters.keys import Keys, by_row
from ringspan.errors import UnsupportedError
from ringspan.mask import Mask, frame_causal, full

_HIDDEN = -1e4  # models add this, or less, to the scores of keys that are hidden
_ROWS = 1024  # of a mask of all pairs that are compared at a time


class Read(NamedTuple):
    """A mask, and the queries that see no key, (batch or 1, 1, q, 1), if there are any."""

    mask: Mask
    blind: torch.Tensor | None


NO_MASK = Read(full(), None)


def read_part(mask: torch.Tensor, side: Side, num_tokens: int, num_local: int) -> Read:
    """A mask over this rank's own keys and those that all ranks hold, (…, q or 1, keys)."""
    visible = _without_heads(_visible(mask))
    rows, keys = visible.any(-1), visible.any(-2)
    if visible.shape[-2] > 1 and not torch.equal(visible, rows.unsqueeze(-1) & keys.unsqueeze(-2)):
        raise UnsupportedError(
            "attn_mask hides different keys from different queries, and a rank has a part of the keys only; a mask of "
            "all pairs must be an argument of the blocks"
        )
    num_others = keys.shape[-1] - num_local
    start = num_others if side.others_first else 0
    if not keys[:, start : start + num_local].all():
        raise UnsupportedError("attn_mask hides tokens of the video; leave padding out of the latents")
    others = torch.cat([keys[:, :start], keys[:, start + num_local :]], 1).cpu().numpy()
    found = by_row([_keys_mask(row.tobytes(), num_tokens, side.others_first) for row in others])
    return Read(found or full(), None if rows.all() else ~rows[:, None, :, None])


def read_whole(mask: torch.Tensor) -> Read:
    """A mask of all pairs of the whole sequence, (…, tokens, tokens)."""
    visible = _without_heads(_visible(mask))
    return Read(by_row([_pairs_mask(row) for row in visible]) or full(), None)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    visible, hidden = mask == 0, mask <= _HIDDEN
    if not (visible | hidden).all():
        raise UnsupportedError("attn_mask adds a bias to the scores; only masks that show or hide keys can be split")
    if not visible.any(-1).all():
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
def _keys_mask(others: bytes, num_tokens: int, others_first: bool) -> Mask:
    """All tokens, and those of the others that are not padding."""
    beside, tokens = np.frombuffer(others, np.bool_), np.ones(num_tokens, np.bool_)
    visible = np.concatenate([beside, tokens] if others_first else [tokens, beside])
    if visible.all():
        return full()
    ends = np.flatnonzero(np.diff(visible, prepend=False, append=False)).tolist()
    found: Mask = Keys(ends[0], ends[1])
    for first, stop in zip(ends[2::2], ends[3::2], strict=True):
        found = found | Keys(first, stop)
    return found


def _pairs_mask(visible: torch.Tensor) -> Mask:
    if visible.all():
        return full()
    num_tokens = visible.shape[-1]
    per_frame = int(visible[0].sum())
    end = torch.arange(num_tokens, device=visible.device)
    for rows in torch.split(end, _ROWS):
        expected = end < (rows // max(per_frame, 1) + 1).unsqueeze(-1) * per_frame
        if not torch.equal(visible[rows], expected):
            raise UnsupportedError(
                "a mask of all pairs is neither full nor causal by frames; no other one is recognised"
            )
    return frame_causal(per_frame)

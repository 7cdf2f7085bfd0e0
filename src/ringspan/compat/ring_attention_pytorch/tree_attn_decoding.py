"""How does `tree_attn_decode` of ring-attention-pytorch compute on our core?"""

from typing import Any

import torch

from ringspan.compat.lengths import gather_lengths, layout_of_lengths
from ringspan.compat.sequence_first import HEADS_FIRST, check_tensors
from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.mask import full
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.span import Span

__all__ = ["tree_attn_decode"]


def tree_attn_decode(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    eps: float = 1e-8,
    shard_kv_seq: bool = True,
    use_triton: bool | None = None,
    *,
    group: Any = None,
) -> torch.Tensor:
    """One query (batch, heads, 1, dim), the same on all ranks, against keys over all ranks.

    Args:
        q: The query.
        k: All keys on every rank, or with `shard_kv_seq=False` this rank's; None where it has none.
        v: The values, like `k`.
        eps: Not needed here: an empty sum is exact.
        shard_kv_seq: Whether `k` and `v` are to be cut here.
        use_triton: Not needed here.
        group: As in `rs.attention`.
    """
    del eps, use_triton
    check_tensors(HEADS_FIRST, q=q, **{name: x for name, x in (("k", k), ("v", v)) if x is not None})
    transport = session_of(group).transport
    rank, world_size = transport.rank, transport.world_size
    if (k is None) != (v is None):
        raise ShapeError("keys and values are both None or both present", argument="v")
    if k is None or v is None:
        if shard_kv_seq:
            raise ShapeError("keys and values that are to be cut must be given", argument="k", value=None)
        k = v = q.new_empty((*q.shape[:2], 0, q.shape[-1]))
    if shard_kv_seq:
        lengths = [part.shape[2] for part in k.chunk(world_size, 2)]
        lengths += [0] * (world_size - len(lengths))
        start = sum(lengths[:rank])
        k, v = (x[:, :, start : start + lengths[rank]] for x in (k, v))
    else:
        lengths = gather_lengths(k, 2, group, "tree_attn_decode")
    q_layout = Layout(((),) * world_size, replicated=(Span(0, q.shape[2]),))
    out = attention(q, k, v, mask=full(), layout=q_layout, kv_layout=layout_of_lengths(lengths), group=group)
    assert isinstance(out, torch.Tensor)
    return out

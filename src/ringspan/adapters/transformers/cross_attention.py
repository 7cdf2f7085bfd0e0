"""How do a decoder's tokens attend to an encoder's tokens, when each sequence is sharded on its own?

Every token of a decoder sees every token of the encoder, so the mask only hides padding keys.

Over a cache every rank has all queries. Each rank attends to the keys that it holds, and the parts are merged on all
ranks.
"""

from typing import Any, NamedTuple

import torch

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout, contiguous
from ringspan.mask import Mask
from ringspan.runtime.api import attention
from ringspan.runtime.engine import Attention
from ringspan.span import Span
from ringspan.training import gather
from ringspan.transports.single import ALONE


class Crossing(NamedTuple):
    """The mask and layouts of cross-attention, in positions of both sequences."""

    mask: Mask
    layout: Layout  # of the decoder
    kv_layout: Layout  # of the encoder

    def on_rank(self, rank: int) -> "Crossing":
        layouts = (Layout((_spans(layout, rank),)) for layout in (self.layout, self.kv_layout))
        return Crossing(self.mask, *layouts)


def _spans(layout: Layout, rank: int) -> tuple[Span, ...]:
    assert not (layout.replicated and any(layout.spans_by_rank))
    return layout.replicated or layout.spans_by_rank[rank]


def attend_to_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crossing: Crossing,
    *,
    rank: int,
    group: Any,
    kernel: str,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend replicated queries (batch, heads, seq, dim) to keys and values that are spread over the ranks."""
    mask, layout, kv_layout = crossing.on_rank(rank)
    part = attention(
        q,
        k,
        v,
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        group=ALONE,
        algorithm=DEFAULT_ALGORITHM,
        kernel=kernel,
        scale=scale,
        softcap=softcap,
        return_lse=True,
        contract=False,
    )
    assert isinstance(part, Attention)
    if crossing.kv_layout.replicated:
        return part.out
    dtype = accumulator_dtype(part.out.dtype)
    packed = torch.cat([part.out.to(dtype), part.lse.to(dtype).unsqueeze(-1)], -1)
    world_size = crossing.kv_layout.world_size
    parts = gather(packed.unsqueeze(0), contiguous(world_size, world_size), group, dim=0)
    # The weight of a part is its exp(lse) over the sum of all; a row that sees no key on any rank has weights of 0.
    shares = torch.softmax(parts[..., -1:], 0).nan_to_num()
    return (parts[..., :-1] * shares).sum(0).to(part.out.dtype)

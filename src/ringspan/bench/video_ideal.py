"""What would a denoising step cost on ranks without messages?

Every rank cuts its rows, runs its blocks on them and computes the pieces of attention that its programs give it.
Nothing is agreed, sent or merged, so the numbers mean nothing. What works on the whole video before and after the
blocks is part of it, on every rank, as in the real step.
"""

from typing import Any

import torch

from ringspan.adapters.diffusers.plan import ForwardPlan
from ringspan.adapters.diffusers.run import RankOptions, TokenShardRun
from ringspan.adapters.diffusers.wiring import SdpaCall
from ringspan.bench.baselines import Inputs, Operands, attend_pieces, own_pieces
from ringspan.bench.settings import DTYPES
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, KernelRequest
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.prepare import prepare
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads

Pieces = dict[Any, tuple[Kernel, list[Operands]]]
"""What a rank computes for each kind of call; kept between steps."""


class MessagelessRun(TokenShardRun):
    """A forward of this rank's rows without messages."""

    def __init__(self, plan: ForwardPlan, options: RankOptions, pieces: Pieces) -> None:
        super().__init__(plan, options)
        self._pieces = pieces

    def attend_rows(self, asked: SdpaCall, layout: Layout, kv_layout: Layout, mask: Mask) -> torch.Tensor:
        """Compute this rank's pieces."""
        key = (layout, kv_layout, mask, asked.query.shape, asked.key.shape)
        if key not in self._pieces:
            self._pieces[key] = self._prepare(asked, layout, kv_layout, mask)
        kernel, pieces = self._pieces[key]
        attend_pieces(kernel, asked.scale or asked.query.shape[-1] ** -0.5, pieces)
        return asked.query

    def gather_rows(self, rows: torch.Tensor, layout: Layout, dim: int) -> torch.Tensor:
        """Return placeholder rows for all ranks."""
        shape = list(rows.shape)
        shape[dim] = layout.num_positions
        return rows.new_zeros(shape)

    def _prepare(self, asked: SdpaCall, layout: Layout, kv_layout: Layout, mask: Mask) -> tuple[Kernel, list[Operands]]:
        q, k, v = asked.query, asked.key, asked.value
        dtype = str(q.dtype).removeprefix("torch.")
        heads = Heads(q.shape[1], k.shape[1])
        shapes = Shapes((q.shape[0],), heads, q.shape[-1], v.shape[-1], *DTYPES[dtype])
        problem = Problem(mask, layout, kv_layout, shapes)
        drawn = Inputs(*(torch.randn(x.shape).to(x.device, x.dtype) for x in (q, k, v)))
        prepared = prepare(problem, self.options.rank, self.options.algorithm)
        kernel = choose_kernel("auto", KernelRequest(q.device, q.dtype, q.shape[-1], v.shape[-1]))
        return kernel, list(own_pieces(prepared, drawn))

"""Calls whose bits must not depend on who computes them, and what all ranks make of them."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

import ringspan as rs
from cases import make_mask
from oracle import MaskSpec
from ringspan.transports.in_process import InProcessRank

SEQ_LEN = 6 * rs.TILE + 77  # the last tile is short
CAUSAL: MaskSpec = ("causal",)
MASKS: dict[str, MaskSpec] = {
    "causal": CAUSAL,
    "full": ("full",),
    "window": ("sliding_window", 700, 0),
    "documents": ("documents", (900, 1500, SEQ_LEN - 2400)),
    "prefix": ("and", ("prefix", 600), ("sliding_window", 1500, 300)),
    "rows": ("per_row", (CAUSAL, ("sliding_window", -400, 2000))),  # rows that see nothing
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("out", "lse", "dq", "dk", "dv")


class Call(NamedTuple):
    """What is computed, whoever does it."""

    mask: str
    dtype: torch.dtype = torch.float32
    heads: rs.Heads = rs.Heads(2, 1)
    head_dim: int = 4

    @property
    def batch(self) -> int:
        return 2 if self.mask == "rows" else 1

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(0)
        num = self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads, self.heads.num_heads
        shapes = [(self.batch, heads, SEQ_LEN, self.head_dim) for heads in num]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]


def on_rank(
    call: Call, layout: rs.Layout, group: Any, rank: int, tensors: list[torch.Tensor] | None = None, **options: Any
) -> list[torch.Tensor]:
    """This rank's out, lse and gradients."""
    *inputs, dout = (layout.shard(x, rank, 2) for x in tensors or call.tensors())
    leaves = [x.clone().requires_grad_() for x in inputs]
    options = {"reproducible": True} | options
    got = rs.attention(
        *leaves, mask=make_mask(MASKS[call.mask]), layout=layout, group=group, return_lse=True, **options
    )
    assert isinstance(got, rs.Attention)
    return [x.detach() for x in got] + list(torch.autograd.grad(got.out, leaves, dout))


def run(call: Call, layout: rs.Layout, tensors: list[torch.Tensor] | None = None, **options: Any) -> list[torch.Tensor]:
    """What all ranks make of it, put together; they are threads of this process."""

    def attend(group: InProcessRank) -> list[torch.Tensor]:
        return on_rank(call, layout, group, group.rank, tensors, **options)

    return together(layout, rs.run_in_process(attend, layout.world_size))


def together(layout: rs.Layout, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [layout.unshard([part[i] for part in parts], 2) for i in range(len(NAMES))]


@cache
def alone(call: Call) -> list[torch.Tensor]:
    """What one device makes of it."""
    return run(call, rs.contiguous(SEQ_LEN, 1))


def different(these: list[torch.Tensor], those: list[torch.Tensor]) -> list[str]:
    """The names of what is not the same bits."""
    return [name for name, a, b in zip(NAMES, these, those, strict=True) if not torch.equal(a, b)]


LAYOUTS = {
    "zigzag": lambda world_size: rs.zigzag(SEQ_LEN, world_size, align=rs.TILE),
    "contiguous": lambda world_size: rs.contiguous(SEQ_LEN, world_size, align=rs.TILE),
    "striped": lambda world_size: rs.striped(SEQ_LEN, world_size, block=rs.TILE),
    "balanced": lambda world_size: rs.balanced(rs.causal(), SEQ_LEN, world_size, align=rs.TILE),
}

WAYS: dict[str, dict[str, Any]] = {
    "pass_kv": {"algorithm": "pass_kv"},
    "pass_kv reverse": {"algorithm": "pass_kv", "direction": "reverse"},
    "pass_q": {"algorithm": "pass_q"},
    "all_gather": {"algorithm": "all_gather"},
    "ulysses": {"algorithm": "ulysses"},
    "hybrid": {"algorithm": "hybrid"},
    "double_ring": {"algorithm": "double_ring"},
}


def options_of(way: str, world_size: int) -> dict[str, Any]:
    """With the squarest mesh where there is one."""
    options = dict(WAYS[way])
    if options["algorithm"] in ("hybrid", "double_ring"):
        inner = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * n <= world_size)
        options["mesh"] = (world_size // inner, inner)
    return options


def cases(way: str, world_size: int) -> Iterator[tuple[Call, str]]:
    """Some calls and layouts out of all, others for each way and number of ranks."""
    if way == "ulysses":
        heads = [rs.Heads(8, 8), rs.Heads(8, 2)] if world_size < 3 else [rs.Heads(world_size, world_size)]
    else:
        heads = [rs.Heads(8, 8), rs.Heads(8, 2)]
    every = [Call(mask, dtype, each) for mask in MASKS for dtype in DTYPES for each in heads]
    first = 5 * list(WAYS).index(way) + 7 * world_size
    for i in range(2):
        yield every[(first + 17 * i) % len(every)], list(LAYOUTS)[(first + i) % len(LAYOUTS)]

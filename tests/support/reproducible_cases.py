"""Calls whose bits must not depend on the ranks, and their results on all ranks."""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch

import ringspan as rs
from ringspan.transports.in_process import InProcessRank
from support.cases import make_mask
from support.oracle import MaskSpec

SEQ_LEN = 6 * rs.TILE + 77  # the last tile is short
SHORT = 3 * rs.TILE + 77
WORLD_SIZES = (1, 2, 3, 4, 5, 8)
CAUSAL: MaskSpec = ("causal",)
MASKS: dict[str, MaskSpec] = {
    "causal": CAUSAL,
    "full": ("full",),
    "window": ("sliding_window", 700, 0),
    "documents": ("documents", (900, 600, SEQ_LEN - 1500)),
    "prefix": ("and", ("prefix", 600), ("sliding_window", 1500, 300)),
    "rows": ("per_row", (CAUSAL, ("sliding_window", -400, 2000))),  # rows that see no key
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


class Call(NamedTuple):
    """The inputs and options of a call."""

    mask: str
    dtype: torch.dtype = torch.float32
    heads: rs.Heads = rs.Heads(2, 1)
    head_dim: int = 4
    has_sinks: bool = False
    seq_len: int = SEQ_LEN

    @property
    def batch(self) -> int:
        return 2 if self.mask == "rows" else 1

    def tensors(self) -> list[torch.Tensor]:
        """Make q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(0)
        num = self.heads.num_heads, self.heads.num_kv_heads, self.heads.num_kv_heads, self.heads.num_heads
        shapes = [(self.batch, heads, self.seq_len, self.head_dim) for heads in num]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def sinks(self) -> list[torch.Tensor]:
        """Make some sinks, if any; one of them is -inf."""
        values = torch.linspace(-2.0, 1.5, self.heads.num_heads)
        values[-1] = -torch.inf if self.heads.num_heads > 1 else 0.0
        return [values] if self.has_sinks else []


def on_rank(
    call: Call, layout: rs.Layout, group: Any, rank: int, tensors: list[torch.Tensor] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Return this rank's out, lse and gradients; the last is that of the sinks, if there are any."""
    *inputs, dout = (layout.shard(x, rank, 2) for x in tensors or call.tensors())
    leaves = [x.clone().requires_grad_() for x in (*inputs, *call.sinks())]
    options = {"reproducible": True, "sinks": leaves[3] if call.has_sinks else None} | options
    got = rs.attention(
        *leaves[:3], mask=make_mask(MASKS[call.mask]), layout=layout, group=group, return_lse=True, **options
    )
    assert isinstance(got, rs.Attention)
    return [x.detach() for x in got] + list(torch.autograd.grad(got.out, leaves, dout))


def run(call: Call, layout: rs.Layout, tensors: list[torch.Tensor] | None = None, **options: Any) -> list[torch.Tensor]:
    """Compute the results of all ranks, as threads, put together."""

    def attend(group: InProcessRank) -> list[torch.Tensor]:
        return on_rank(call, layout, group, group.rank, tensors, **options)

    return together(layout, rs.run_in_process(attend, layout.world_size))


def together(layout: rs.Layout, parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Put the parts together; gradients of sinks stay separate, (ranks, heads)."""
    of_sinks = [torch.stack(of_ranks) for of_ranks in zip(*(part[5:] for part in parts), strict=True)]
    return [layout.unshard([part[i] for part in parts], 2) for i in range(5)] + of_sinks


@cache
def alone(call: Call) -> list[torch.Tensor]:
    """Compute the results of one device."""
    return run(call, rs.contiguous(call.seq_len, 1))


def different(these: list[torch.Tensor], of_one: list[torch.Tensor]) -> list[str]:
    """Return the names of results whose bits differ from those of one device."""
    assert len(these) == len(of_one)
    return [name for name, a, b in zip(NAMES, these, of_one, strict=False) if not torch.equal(a, b.expand_as(a))]


LAYOUTS: dict[str, Callable[..., rs.Layout]] = {
    "zigzag": lambda world_size, seq_len=SEQ_LEN: rs.zigzag(seq_len, world_size, align=rs.TILE),
    "contiguous": lambda world_size, seq_len=SEQ_LEN: rs.contiguous(seq_len, world_size, align=rs.TILE),
    "striped": lambda world_size, seq_len=SEQ_LEN: rs.striped(seq_len, world_size, block=rs.TILE),
    "balanced": lambda world_size, seq_len=SEQ_LEN: rs.balanced(rs.causal(), seq_len, world_size, align=rs.TILE),
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
    """Return the algorithm with the squarest mesh if it takes one."""
    options = dict(WAYS[way])
    if options["algorithm"] in ("hybrid", "double_ring"):
        inner = max(n for n in range(1, world_size + 1) if world_size % n == 0 and n * n <= world_size)
        options["mesh"] = (world_size // inner, inner)
    return options


def product(way: str, world_size: int) -> Iterator[tuple[Call, str]]:
    """All masks and dtypes on short sequences; layouts and sinks alternate."""
    heads = {"ulysses": rs.Heads(world_size, world_size), "hybrid": rs.Heads(2, 2)}.get(way, rs.Heads(2, 1))
    first = list(WAYS).index(way) + WORLD_SIZES.index(world_size)
    for i, (mask, dtype) in enumerate(itertools.product(MASKS, DTYPES)):
        call = Call(mask, dtype, heads, has_sinks=i % 2 == 0, seq_len=SHORT)
        yield call, list(LAYOUTS)[(first + i) % len(LAYOUTS)]


def longer(way: str, world_size: int) -> tuple[Call, str]:
    """A selection of calls on seven tiles and more heads, another for each algorithm and number of ranks."""
    heads = rs.Heads(world_size, world_size) if way == "ulysses" else rs.Heads(4, 2)
    every = [Call(mask, dtype, heads) for mask in MASKS for dtype in DTYPES]
    first = 5 * list(WAYS).index(way) + 7 * world_size
    return every[first % len(every)], list(LAYOUTS)[first % len(LAYOUTS)]

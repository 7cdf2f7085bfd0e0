"""What does a contender get, and what must it do? Torch only: this also runs in the environment of the peers."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from comparison.points import HEADS, Point

TOLERANCE = {"float32": 1e-4, "bfloat16": 2**-4}
"""Largest |difference| / max(1, |value|): a coarse check that a contender computes attention."""

Results = tuple[torch.Tensor, ...]


class Tensors(NamedTuple):
    """Make q, k, v and dout, (1, heads, seq, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def rows(self, rows: torch.Tensor) -> "Tensors":
        """A run of tokens."""
        return Tensors(*(x[:, :, rows].contiguous() for x in self))


@dataclass(frozen=True, slots=True)
class Case:
    """A point on one rank. Every rank makes the same tensors of all tokens and takes its own part."""

    point: Point
    rank: int
    whole: Tensors

    @classmethod
    def of(cls, point: Point, rank: int) -> "Case":
        generator = torch.Generator().manual_seed(0)
        shape = (1, HEADS, point.seq_len, point.head_dim)
        dtype = getattr(torch, point.dtype)
        return cls(point, rank, Tensors(*(torch.randn(shape, generator=generator).to(dtype) for _ in range(4))))

    def own_rows(self, rank: int | None = None) -> torch.Tensor:
        """Return the tokens of a rank: zigzag if the mask is causal, else contiguous."""
        rank = self.rank if rank is None else rank
        if not self.point.is_causal:
            return self.contiguous_rows(rank)
        chunks = torch.arange(self.point.seq_len).chunk(2 * self.point.world_size)
        return torch.cat([chunks[rank], chunks[-1 - rank]])

    def contiguous_rows(self, rank: int | None = None) -> torch.Tensor:
        """Concatenate the tokens of a rank."""
        return torch.arange(self.point.seq_len).chunk(self.point.world_size)[self.rank if rank is None else rank]


class Contender(NamedTuple):
    """`run` returns out, and dq, dk, dv if the point has them, for `rows` of the sequence; neither if it is idle.

    Work outside of attention, such as making a mask, is done before; all work of a real call is timed.
    """

    run: Callable[[], Results | None]
    rows: torch.Tensor | None


def with_gradients(case: Case, attend: Callable[..., torch.Tensor], own: Tensors) -> Results:
    """Run `attend(q, k, v)`, and its gradients if the point asks for them."""
    if not case.point.has_backward:
        with torch.no_grad():
            return (attend(*own[:3]),)
    inputs = [x.detach().requires_grad_() for x in own[:3]]
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, own.dout))


def sdpa(case: Case, own: Tensors, is_causal: bool) -> Results:
    """PyTorch's own attention."""
    return with_gradients(case, lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=is_causal), own)


def check(case: Case, contender: Contender) -> str | None:
    """Return what is wrong with a contender's results, or None. All ranks must call it."""
    results = contender.run()
    if results is None or contender.rows is None:
        return None
    expected = sdpa(case, case.whole, case.point.is_causal)
    for name, result, whole in zip(("out", "dq", "dk", "dv"), results, expected, strict=False):
        right = whole[:, :, contender.rows].double()
        if result.shape != right.shape:
            return f"{name} has the shape {tuple(result.shape)} instead of {tuple(right.shape)}"
        error = ((result.double() - right).abs() / right.abs().clamp(min=1)).max().item()
        if math.isnan(error) or error > TOLERANCE[case.point.dtype]:
            return f"{name} is wrong by {error:.2g}"
    return None if len(results) == len(expected) else "gradients are missing"

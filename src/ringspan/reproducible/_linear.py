"""How does a linear layer get the same bits on any number of ranks and threads?

The bits of a row of a matrix product can change with the product's number of rows, so every product here has the tokens
of one tile and one batch row, on every rank. They can also change with the number of threads, so each product runs on
one thread, and the threads share the tiles. Half dtypes are multiplied and summed in float32 and rounded once.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ringspan.errors import ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.program.reproducible.grid import Strip
from ringspan.reproducible._ranks import Ranks, check_tokens, check_weights, differentiable_once, open_ranks
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.checks import check_tensor
from ringspan.runtime.reproducible_arithmetic import ALIGNMENT, Threads, single_threads

_Part = TypeVar("_Part")


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: Layout,
    group: Any = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Compute `x @ weight.T + bias` with the same bits on any number of ranks; gradients too.

    The forward pass sends no message. In the backward pass the gradients of weight and bias are summed over the tiles
    of all ranks: every rank gets the whole gradients, and all ranks must make the call.

    Args:
        x: (batch, seq, in_features), this rank's tokens in the order of the layout.
        weight: (out_features, in_features), the same on every rank.
        bias: (out_features,), or None.
        layout: Who holds which token, on the grid of `rs.TILE` tokens (`align=rs.TILE`).
        group: As in `attention`.
        timeout_s: The deadline of every wait for another rank; by default that of the group.
    """

    def check(shard_len: int) -> None:
        check_tokens("x", x, shard_len)
        check_tensor("weight", weight)
        if x.ndim != 3 or weight.ndim != 2 or x.shape[2] != weight.shape[1]:
            raise ShapeError(
                f"x.shape={tuple(x.shape)}, weight.shape={tuple(weight.shape)}: x is (batch, seq, in_features), weight "
                "is (out_features, in_features)"
            )
        check_weights(x, weight=weight, bias=bias)
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ShapeError(
                f"expected one number per output, ({weight.shape[0]},)", argument="bias.shape", value=tuple(bias.shape)
            )

    ranks = open_ranks(layout, group, timeout_s, check, [weight, bias])
    with without_autocast(x.device.type):
        out: torch.Tensor = _Linear.apply(x, weight, bias, ranks)  # type: ignore[no-untyped-call]
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: Ranks
    ) -> torch.Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(x, weight)
        dtype = accumulator_dtype(x.dtype)
        transposed = _aligned(weight, dtype).T
        added = None if bias is None else bias.to(dtype)
        return _product(ranks, x, transposed, added)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dtype = accumulator_dtype(weight.dtype)
        dx = _product(ctx.ranks, dout, _aligned(weight, dtype), None) if needs_dx else None
        if not (needs_dweight or needs_dbias):
            return dx, None, None, None
        num_weights = weight.numel() if needs_dweight else 0
        length = num_weights + (weight.shape[0] if needs_dbias else 0)
        like = weight.new_empty(length, dtype=dtype)
        with single_threads(x.device) as threads:
            parts = _weight_gradients(ctx.ranks, threads, x, dout, like, num_weights)
            whole = ctx.ranks.sum_over_tiles("gradient of reproducible.linear", parts, like).to(weight.dtype)
        dweight = whole[:num_weights].view_as(weight) if needs_dweight else None
        return dx, dweight, whole[num_weights:] if needs_dbias else None, None


def _product(ranks: Ranks, x: torch.Tensor, matrix: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    out = x.new_empty(*x.shape[:2], matrix.shape[1])

    def multiply(strip: Strip) -> None:
        for x_row, out_row in zip(x, out, strict=True):
            _multiply(_aligned(x_row[strip.rows], matrix.dtype), matrix, added, out_row[strip.rows])

    with single_threads(x.device) as threads:
        for _ in _each_tile(ranks, threads, multiply):
            pass
    return out


def _weight_gradients(
    ranks: Ranks, threads: Threads, x: torch.Tensor, dout: torch.Tensor, like: torch.Tensor, num_weights: int
) -> Iterator[torch.Tensor]:
    """Yield for each tile the requested gradients of weight and bias in one flat tensor."""

    def differentiate(strip: Strip) -> torch.Tensor:
        part = torch.empty_like(like)
        dweight = part[:num_weights].view(-1, x.shape[2])
        dbias = part[num_weights:].zero_()
        for i, (x_row, dout_row) in enumerate(zip(x, dout, strict=True)):
            dtile = _aligned(dout_row[strip.rows], like.dtype)
            if num_weights:
                dweight.addmm_(dtile.T, _aligned(x_row[strip.rows], like.dtype), beta=min(i, 1))
            if len(dbias):
                dbias += dtile.sum(dim=0)
        return part

    return _each_tile(ranks, threads, differentiate)


def _each_tile(ranks: Ranks, threads: Threads, compute: Callable[[Strip], _Part]) -> Iterator[_Part]:
    """Compute the tiles on all threads and yield their results in order; at most one result per thread is held."""
    for first in range(0, len(ranks.tiles), threads.number):
        yield from threads.map(compute, ranks.tiles[first : first + threads.number])


def _aligned(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert to the dtype and to a memory layout that is the same on every rank."""
    x = x.to(dtype).contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def _multiply(a: torch.Tensor, b: torch.Tensor, added: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute `a @ b + added` into `out`, directly if the memory layout of `out` is the same on every rank."""
    room = out if out.dtype == a.dtype and out.data_ptr() % ALIGNMENT == 0 else None
    product = torch.mm(a, b, out=room) if added is None else torch.addmm(added, a, b, out=room)
    if room is None:
        out.copy_(product)

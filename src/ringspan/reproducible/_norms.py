"""How do norms get the same bits? Each token alone; the gradients of weights in the tree over tiles."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ringspan.arguments import NUMBER, check_arguments
from ringspan.errors import ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.reproducible._ranks import Ranks, check_tokens, check_weights, differentiable_once, open_ranks
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.checks import check_tensor


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    layout: Layout,
    group: Any = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Compute `weight * x / sqrt(mean(x²) + eps)` over the last dim, with the same bits on any number of ranks.

    Args:
        x: (batch, seq, …, features), for example (batch, seq, heads, head_dim) for norms of q and k.
        weight: (features,), the same on every rank. After backward every rank has its whole gradient.
        eps: Added to the mean square.
        layout: As in `linear`.
        group: As in `linear`.
        timeout_s: As in `linear`.
    """
    return _norm(x, weight, None, _Kind(eps, is_centred=False), layout, group, timeout_s)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    layout: Layout,
    group: Any = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    """Compute `weight * (x - mean(x)) / sqrt(var(x) + eps) + bias` over the last dim; otherwise as `rms_norm`."""
    return _norm(x, weight, bias, _Kind(eps, is_centred=True), layout, group, timeout_s)


class _Kind(NamedTuple):
    eps: float
    is_centred: bool


def _norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: _Kind,
    layout: Layout,
    group: Any,
    timeout_s: float | None,
) -> torch.Tensor:
    def check(shard_len: int) -> None:
        check_arguments(eps=(NUMBER, kind.eps))
        check_tokens("x", x, shard_len)
        check_tensor("weight", weight)
        check_weights(x, weight=weight, bias=bias)
        for name, weights in (("weight", weight), ("bias", bias)):
            if weights is not None and (x.ndim < 3 or weights.shape != x.shape[-1:]):
                raise ShapeError(
                    f"x.shape={tuple(x.shape)}, {name}.shape={tuple(weights.shape)}: x is (batch, seq, …, features), "
                    f"{name} is (features,)"
                )

    ranks = open_ranks(layout, group, timeout_s, check, [weight, bias])
    with without_autocast(x.device.type):
        out: torch.Tensor = _Norm.apply(x, weight, bias, kind, ranks)  # type: ignore[no-untyped-call]
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, kind: _Kind, ranks: Ranks
    ) -> torch.Tensor:
        ctx.kind, ctx.ranks = kind, ranks
        ctx.save_for_backward(x, weight)
        dtype = accumulator_dtype(x.dtype)
        scales, shifts = weight.to(dtype), None if bias is None else bias.to(dtype)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for strip in ranks.tiles:
            for x_row, out_row in zip(x, out, strict=True):
                normal = _normalise(_rows(x_row[strip.rows], dtype), kind, scales, shifts).normal
                out_row[strip.rows] = normal.view_as(out_row[strip.rows])
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, _, _ = ctx.needs_input_grad
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_dx else None
        parts = _gradients(ctx.ranks, ctx.kind, x, dout, weight, dx)
        if not (needs_dweight or needs_dbias):
            for _ in parts:
                pass
            return dx, None, None, None, None
        like = weight.new_empty(2 * len(weight), dtype=accumulator_dtype(weight.dtype))
        name = "layer_norm" if ctx.kind.is_centred else "rms_norm"
        whole = ctx.ranks.sum_over_tiles(f"gradient of reproducible.{name}", parts, like).to(weight.dtype)
        dweight, dbias = whole.chunk(2)
        return dx, dweight if needs_dweight else None, dbias if needs_dbias else None, None, None


class _Normal(NamedTuple):
    """Rows after the norm, with the scale and shift if given, and the mean and inverse size of each row."""

    normal: torch.Tensor
    mean: torch.Tensor | None
    inverse: torch.Tensor


def _rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).reshape(-1, x.shape[-1])


def _normalise(
    x: torch.Tensor, kind: _Kind, scales: torch.Tensor | None = None, shifts: torch.Tensor | None = None
) -> _Normal:
    if kind.is_centred:
        return _Normal(*torch.native_layer_norm(x, x.shape[-1:], scales, shifts, kind.eps))
    inverse = (x * x).mean(dim=-1, keepdim=True).add_(kind.eps).rsqrt_()
    normal = x * inverse
    return _Normal(normal if scales is None else normal.mul_(scales), None, inverse)


def _gradients(
    ranks: Ranks, kind: _Kind, x: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor, dx: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """Yield for each tile the gradients of weight and bias in one flat tensor, and write the gradient of x to `dx`."""
    scales = weight.to(accumulator_dtype(weight.dtype))
    for strip in ranks.tiles:
        part = scales.new_zeros(2, len(weight))
        for i, dout_row in enumerate(dout):
            rows = _rows(x[i, strip.rows], scales.dtype)
            dtile = _rows(dout_row[strip.rows], scales.dtype)
            normal = _normalise(rows, kind)
            part[0] += (dtile * normal.normal).sum(dim=0)
            part[1] += dtile.sum(dim=0)
            if dx is not None:
                dx[i, strip.rows] = _row_gradients(rows, dtile, scales, normal).view(-1, *x.shape[2:])
        yield part.view(-1)


def _row_gradients(x: torch.Tensor, dout: torch.Tensor, scales: torch.Tensor, normal: _Normal) -> torch.Tensor:
    if normal.mean is not None:  # without the weight's gradient: the operator would sum it by threads
        dx: torch.Tensor = torch.ops.aten.native_layer_norm_backward(
            dout, x, x.shape[-1:], normal.mean, normal.inverse, scales, None, [True, False, False]
        )[0]
        return dx
    dnormal = dout * scales
    along = (dnormal * normal.normal).mean(dim=-1, keepdim=True)
    return dnormal.sub_(normal.normal * along).mul_(normal.inverse)

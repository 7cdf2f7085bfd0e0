"""Are the arguments of a call valid on this rank? Checked before any message is sent.

The checks depend on shapes, dtypes and devices only, not on contents, so a repeated call is not checked again.
"""

from typing import Any, NamedTuple

import torch

from ringspan.arguments import Kind, number_of
from ringspan.errors import LayoutError, ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.program.problem import Problem, Shapes, check_is_layout
from ringspan.schedule import Heads

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _is_device(value: Any) -> bool:
    try:
        return torch.empty(0, device=value).device is not None
    except (TypeError, RuntimeError, AssertionError, ValueError):
        return False


DEVICE = Kind("a device of this machine", 'give "cpu", or one that torch finds here', _is_device)
DTYPE = Kind(
    "a floating-point dtype",
    "give torch.float32, or another one of attention",
    lambda value: isinstance(value, torch.dtype) and value in _DTYPES,
)


class Look(NamedTuple):
    """Shape, dtype and device of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Looks(NamedTuple):
    """The looks of a call's tensors."""

    q: Look
    k: Look
    v: Look
    sinks: Look | None


def look_at(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Looks:
    """The looks of the tensors; anything else is refused."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ShapeError(
                f"expected a tensor, got {type(x).__name__}",
                argument=name,
                remedy="give a tensor, or use rs.simulate_attention for NumPy arrays",
            )
        if x.layout is not torch.strided or x.is_nested:
            raise ShapeError(
                f"expected a dense tensor, got a {'nested one' if x.is_nested else f'layout of {x.layout}'}",
                argument=name,
                remedy="pack sequences and use rs.documents" if x.is_nested else "give x.to_dense()",
            )
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise ShapeError(
            f"expected a tensor, got {type(sinks).__name__}",
            argument="sinks",
            remedy="give a tensor of one logit per query head",
        )
    return Looks(
        Look(q.shape, q.dtype, q.device),
        Look(k.shape, k.dtype, k.device),
        Look(v.shape, v.dtype, v.device),
        None if sinks is None else Look(sinks.shape, sinks.dtype, sinks.device),
    )


def check_looks(looks: Looks) -> Shapes:
    """The sizes that q, k and v have on all ranks; the layouts give their lengths."""
    q, k, v, sinks = looks
    if not len(q.shape) == len(k.shape) == len(v.shape) == 4:
        raise ShapeError(f"{_shapes(looks)}: q, k and v are (batch, heads, seq, dim)")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ShapeError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: q, k and v have one dtype out of {names}")
    if not q.device == k.device == v.device or q.device.type == "meta":
        raise ShapeError(
            f"devices {q.device}, {k.device}, {v.device}: q, k and v are on one device, with numbers in them"
        )
    batch, num_heads, _, head_dim = q.shape
    if k.shape[0] != batch or k.shape[:3] != v.shape[:3] or k.shape[3] != head_dim or not head_dim:
        raise ShapeError(
            f"{_shapes(looks)}: batch is the same for all, head_dim the same for q and k and at least 1, and k and v "
            f"differ in the last dim only{_swapped(looks)}"
        )
    heads = Heads(num_heads, k.shape[1])
    if not num_heads or not heads.num_kv_heads or num_heads % heads.num_kv_heads:
        raise ShapeError(f"{_shapes(looks)}: the query heads are a multiple of the KV heads{_swapped(looks)}")
    if sinks is not None:
        _check_sinks(sinks, heads, q.dtype, q.device)
    return Shapes((batch,), heads, head_dim, v.shape[3], q.dtype.itemsize, accumulator_dtype(q.dtype).itemsize)


def _shapes(looks: Looks) -> str:
    return ", ".join(
        f"{name}.shape={tuple(look.shape)}" for name, look in zip("qkv", (looks.q, looks.k, looks.v), strict=True)
    )


def _swapped(looks: Looks) -> str:
    q, k = looks.q.shape[1], looks.k.shape[1]
    return f"; q has {q} heads and k has {k}: if q and k are swapped, give q first" if 0 < q < k else ""


def _check_sinks(sinks: Look, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    if tuple(sinks.shape) != (heads.num_heads,):
        raise ShapeError(
            f"one logit per query head; expected ({heads.num_heads},)", argument="sinks.shape", value=tuple(sinks.shape)
        )
    if not sinks.dtype.is_floating_point:
        raise ShapeError(f"sinks are {sinks.dtype}: logits are floating-point numbers", remedy=f"use sinks.to({dtype})")
    if sinks.device != device:
        raise ShapeError(f"sinks are on {sinks.device} and q is on {device}", remedy="move them together")


def check_tensor(name: str, x: object) -> None:
    """Refuse a value that is not a tensor."""
    if not isinstance(x, torch.Tensor):
        raise ShapeError(f"expected a tensor, got {type(x).__name__}", argument=name, remedy="give a tensor")


def check_timeout(timeout_s: object) -> float:
    """`timeout_s` as a float; ShapeError if it is not a deadline."""
    if not number_of(timeout_s) > 0:
        raise ShapeError(
            "a deadline is a number of seconds above 0",
            argument="timeout_s",
            value=timeout_s,
            remedy="leave it out for the group's deadline",
        )
    return number_of(timeout_s)


def check_world_size(layout: Layout, world_size: int, name: str = "layout") -> None:
    """Refuse a layout for another number of ranks."""
    check_is_layout(name, layout)
    if layout.world_size != world_size:
        raise LayoutError(
            f"it is for {layout.world_size} ranks and the group has {world_size}",
            argument=name,
            remedy="make it for the group, or pass group= (by default the default process group, or one rank if there "
            "is none)",
        )


def check_rows(problem: Problem, rank: int, world_size: int, looks: Looks) -> None:
    """Refuse shards whose lengths are not those that the layouts give this rank."""
    check_world_size(problem.layout, world_size)
    check_world_size(problem.kv_layout, world_size, "kv_layout")
    of_kv = "layout" if problem.kv_layout == problem.layout else "kv_layout"
    for name, x, of, layout in (
        ("q", looks.q, "layout", problem.layout),
        ("k", looks.k, of_kv, problem.kv_layout),
    ):
        shard_len = layout.shard_len(rank)
        if x.shape[2] != shard_len:
            is_turned = x.shape[1] == shard_len
            raise ShapeError(
                f"{name}.shape={tuple(x.shape)} on rank {rank}: its layout gives this rank {shard_len} positions; "
                + (f"use {name}.transpose(1, 2)" if is_turned else f"pass {of}.shard(whole, {rank}, dim=2)")
            )

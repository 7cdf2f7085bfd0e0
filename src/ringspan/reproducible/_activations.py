"""How does an elementwise function give the same bits at every place of a tensor?

Torch computes sigmoid, SiLU and others in vectorised loops. The remainder of a loop, or of a thread's part of it, is
computed one element at a time, with other bits. Here no loop has a remainder: tensors are cut into chunks too small for
a second thread, and the last chunk is padded.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ringspan.arguments import CALLABLE, check_arguments
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.reproducible._ranks import differentiable_once
from ringspan.runtime.arithmetic import without_autocast
from ringspan.runtime.checks import check_tensor

_CHUNK = 1 << 14  # elements; torch splits a loop between threads from 2^15 elements on
_FULL = 64  # elements; a multiple of every vector width


def elementwise(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute `fn(*tensors)` with the same bits for any number of ranks and threads; gradients too.

    silu, sigmoid, softplus, elu, gelu and powers need it. Sums, products, exp, tanh, sin, cos, erf and relu do not. It
    sends no message, and the backward pass computes fn again.

    Args:
        fn: An elementwise function such as `torch.nn.functional.silu`, without weights: their gradients would be sums
            over tokens.
        tensors: Tensors with the shape and dtype of the result.
    """
    check_arguments(fn=(CALLABLE, fn))
    if not tensors:
        raise ShapeError("fn needs at least one tensor", argument="tensors", value=(), remedy="pass tensors after fn")
    for number, x in enumerate(tensors):
        check_tensor(f"tensors[{number}]", x)
    first = tensors[0]
    if any(x.shape != first.shape or x.dtype != first.dtype for x in tensors) or not first.is_floating_point():
        looks = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in tensors)
        raise ShapeError(
            f"tensors are {looks}: expected one shape and one floating-point dtype", remedy="expand or convert them"
        )
    with without_autocast(first.device.type):
        out: torch.Tensor = _Elementwise.apply(fn, torch.is_grad_enabled(), *tensors)  # type: ignore[no-untyped-call]
    return out


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., torch.Tensor], wants_grad: bool, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        out = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        flat = out.view(-1)
        for place, chunks in _chunks(tensors):
            with torch.set_grad_enabled(wants_grad):
                result = fn(*chunks)
            if result.requires_grad:
                raise UnsupportedError(
                    "fn uses a tensor that requires a gradient and is not an argument, such as a weight: its "
                    "gradient would be lost",
                    remedy="detach that tensor in fn, or call requires_grad_(False) on it",
                )
            if result.shape != chunks[0].shape or result.dtype != out.dtype:
                raise ShapeError(
                    f"fn makes {tuple(result.shape)} {result.dtype} of {tuple(chunks[0].shape)} {out.dtype}: it must "
                    "return the shape and dtype of its arguments"
                )
            flat[place] = result[: len(flat[place])]
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in ctx.saved_tensors]
        for place, (dchunk, *chunks) in _chunks((dout, *ctx.saved_tensors)):
            inputs = [x.requires_grad_(is_wanted) for x, is_wanted in zip(chunks, wanted, strict=True)]
            with torch.enable_grad():
                result = ctx.fn(*inputs)
            found = iter(torch.autograd.grad(result, [x for x in inputs if x.requires_grad], dchunk))
            for grad, is_wanted in zip(grads, wanted, strict=True):
                if is_wanted:
                    grad.view(-1)[place] = next(found)[: len(grad.view(-1)[place])]
        return None, None, *(grad if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True))


def _chunks(tensors: tuple[torch.Tensor, ...]) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Yield slices of the flat tensors with their elements, padded with ones to whole vectors."""
    flat = [x.detach().contiguous().view(-1) for x in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        place = slice(start, start + _CHUNK)
        missing = -len(flat[0][place]) % _FULL
        yield place, [torch.cat([x[place], x.new_ones(missing)]) if missing else x[place] for x in flat]

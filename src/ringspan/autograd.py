"""How does a call take part in autograd and in torch.compile?

What is kept for the backward pass is this rank's q, k, v, out and lse. The backward pass is a call of its own: every
rank must make it, in the same order as the others, as with any collective.

Two ways lead to the same functions: an autograd Function for eager calls, which costs little, and a pair of custom
operators for compiled ones, which the compiler takes as they are. An operator takes numbers and tensors only, so the
rest of a call is kept in a table, where the compiled program finds it by its index.
"""

from typing import Any

import torch

from ringspan.attend import Attention, Call, run_attention, run_gradients
from ringspan.errors import UnsupportedError
from ringspan.kernels.base import Merged
from ringspan.softmax import accumulator_dtype


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Attention:
    """Attention, differentiable where one of the tensors asks for it."""
    wants_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, sinks))
    if torch.compiler.is_compiling():
        return Attention(*_attend_op(q, k, v, sinks, _enter(call), wants_grad))
    if wants_grad:
        return Attention(*_Attend.apply(q, k, v, sinks, call))  # type: ignore[no-untyped-call]
    return run_attention(call, q, k, v, sinks, wants_grad)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_attention(call, q, k, v, sinks, wants_grad=True)
        ctx.call = call
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = _check_grads(out, *grads)
        with torch.no_grad():
            gradients = run_gradients(ctx.call, q, k, v, sinks, Merged(dout, out, lse))
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _Once.apply(*gradients, dout, q, k, v)  # type: ignore[no-untyped-call]
        return *gradients, None


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated themselves: says so when somebody tries."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return tuple(None if x is None else x.view_as(x) for x in tensors[:4])

    @staticmethod
    def backward(ctx: Any, *_: object) -> None:  # noqa: ARG004
        raise UnsupportedError("attention has first derivatives only; leave out create_graph, or detach its gradients")


def _check_grads(out: torch.Tensor, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> torch.Tensor:
    if dlse is not None:
        raise UnsupportedError("the lse of attention has no gradient; use lse.detach() in what is differentiated")
    return torch.zeros_like(out) if dout is None else dout


_calls: list[Call] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _enter(call: Call) -> int:
    """The index of a call. It stays in the table, since a compiled program may ask for it at any time."""
    _calls.append(call)
    return len(_calls) - 1


@torch.library.custom_op("ringspan::attend", mutates_args=())
def _attend_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: int, wants_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = run_attention(_calls[call], q, k, v, sinks, wants_grad)
    return out.contiguous(), lse.contiguous()


@_attend_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,
    sinks: torch.Tensor | None,  # noqa: ARG001
    call: int,  # noqa: ARG001
    wants_grad: bool,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op("ringspan::attend_backward", mutates_args=())
def _attend_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *gradients, dsinks = run_gradients(_calls[call], q, k, v, sinks, Merged(dout, out, lse))
    dq, dk, dv = (x.contiguous() for x in gradients)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_attend_backward_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    dout: torch.Tensor,  # noqa: ARG001
    out: torch.Tensor,  # noqa: ARG001
    lse: torch.Tensor,  # noqa: ARG001
    call: int,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.call, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    dout = _check_grads(out, *grads)
    dq, dk, dv, dsinks = _attend_backward_op(q, k, v, sinks, dout, out, lse, ctx.call)
    return dq, dk, dv, None if sinks is None else dsinks, None, None


_attend_op.register_autograd(_differentiate, setup_context=_save)

"""How does a call take part in autograd?

What is kept for the backward pass is this rank's q, k, v, out and lse. The backward pass is a call of its own: every
rank must make it, in the same order as the others, as with any collective. Its place says which forward call it belongs
to, so that ranks that differentiate identical calls in a different order are detected.

Compiled programs use the custom operators of `compiled.py` instead, which call the same functions.
"""

from typing import Any, NoReturn

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad

from ringspan.errors import UnsupportedError
from ringspan.kernels.base import Merged
from ringspan.runtime.contract import Place
from ringspan.runtime.engine import Attention, Call, run_attention, run_gradients
from ringspan.runtime.session import session_of


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Attention:
    """Attention, differentiable if one of the tensors requires a gradient."""
    for x in (q, k, v, sinks):
        if isinstance(x, torch.Tensor) and (
            is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        ):
            with session_of(call.group).call(call.timeout_s, contract=call.contract):
                raise _refusal(x)
    if needs_grad(q, k, v, sinks):
        return Attention(*_Attend.apply(q, k, v, sinks, call))  # type: ignore[no-untyped-call]
    return run_attention(call, q, k, v, sinks, wants_grad=False)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """True if gradients are recorded and one of the tensors requires one."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    return False


def gradients_of(call: Call, number: int) -> Call:
    """The backward pass of the call with this number, which another rank may run in a different order."""
    return call._replace(place=Place("gradients of call", number))


def check_grads(out: torch.Tensor, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> torch.Tensor:
    """Return dout, or zeros if it is None; refuse a gradient of lse."""
    if dlse is not None:
        refuse_lse()
    return torch.zeros_like(out) if dout is None else dout


def refuse_lse() -> NoReturn:
    raise UnsupportedError("the lse of attention has no gradient", argument="lse", remedy="use lse.detach()")


def _refusal(x: torch.Tensor) -> UnsupportedError:
    """Refuse tensors of torch.func before the call: they cannot be sent, and torch fails only in the middle of it.

    Tangents of forward-mode differentiation are not sent either, so those of other ranks' keys would be missing.
    """
    if is_functorch_wrapped_tensor(x):
        return UnsupportedError(
            "attention inside torch.func (vmap, grad, jvp …): its tensors cannot be sent to other ranks",
            remedy="use the batch dim instead of vmap, and loss.backward() or torch.autograd.grad for gradients",
        )
    return UnsupportedError(
        "attention of dual tensors (forward-mode differentiation): tangents are not sent to other ranks",
        remedy="use loss.backward() or torch.autograd.grad",
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_attention(call, q, k, v, sinks, wants_grad=True)
        ctx.call = gradients_of(call, session_of(call.group).contract.num_calls)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: Call = ctx.call
        dout, dlse = grads
        if dout is None or dlse is not None:
            with session_of(call.group).call(call.timeout_s, contract=call.contract):
                dout = check_grads(out, dout, dlse)
        with torch.no_grad():
            gradients = run_gradients(call, q, k, v, sinks, Merged(dout, out, lse))
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _Once.apply(*gradients, dout, q, k, v, sinks)  # type: ignore[no-untyped-call]
        return *gradients, None


class _Once(torch.autograd.Function):
    """Gradients that refuse to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return tuple(None if x is None else x.view_as(x) for x in tensors[:4])

    @staticmethod
    def backward(ctx: Any, *_: object) -> None:  # noqa: ARG004
        raise UnsupportedError(
            "attention has first derivatives only", remedy="leave out create_graph, or detach its gradients"
        )

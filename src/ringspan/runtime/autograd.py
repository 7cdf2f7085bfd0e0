"""How does a call take part in autograd and in torch.compile?

What is kept for the backward pass is this rank's q, k, v, out and lse. The backward pass is a call of its own: every
rank must make it, in the same order as the others, as with any collective. It says which call it belongs to, so that
ranks that differentiate like calls in different orders find out.

Two ways lead to the same functions: an autograd Function for eager calls, which costs little, and a pair of custom
operators for compiled ones, which the compiler takes as they are. An operator takes tensors, numbers and texts only, so
the rest of a call is kept in a table, where the compiled program finds it by its key.
"""

import functools
import hashlib
import itertools
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._guards import TracingContext
from torch.autograd import forward_ad

from ringspan.errors import UnsupportedError
from ringspan.kernels.base import Merged
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout, balanced, contiguous, striped, zigzag
from ringspan.mask import Mask, documents, frame_causal, per_row, prefix, sliding_window
from ringspan.runtime.contract import Place
from ringspan.runtime.engine import Attention, Call, Options, run_attention, run_gradients
from ringspan.runtime.session import session_of


def attend(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Attention:
    """Attention, differentiable where one of the tensors asks for it."""
    wants_grad = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, k, v, sinks))
    if torch.compiler.is_compiling():
        out, lse, _ = _attend_op(q, k, v, sinks, _constant(call), wants_grad)
        return Attention(out, _lse_op(lse, out))
    with _telling_refusals(call):
        _refuse_transforms(q, k, v, sinks)
    if wants_grad:
        return Attention(*_Attend.apply(q, k, v, sinks, call))  # type: ignore[no-untyped-call]
    return run_attention(call, q, k, v, sinks, wants_grad)


def _telling_refusals(call: Call) -> AbstractContextManager[None]:
    return session_of(call.group).contract.telling_refusals(call.timeout_s) if call.contract else nullcontext()


def _refuse_transforms(*tensors: object) -> None:
    """What torch.func wraps has no numbers that could be sent; torch says so only in the midst of a call.

    Tangents would stay at home: those of other ranks' keys and values would be missing.
    """
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    if any(is_functorch_wrapped_tensor(x) for x in given):
        raise UnsupportedError(
            "attention inside torch.func (vmap, grad, jvp …): ranks exchange numbers, and such tensors have none; use "
            "the batch dim instead of vmap, and loss.backward() or torch.autograd.grad for gradients"
        )
    if any(forward_ad.unpack_dual(x).tangent is not None for x in given):  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            "attention of dual tensors (forward-mode differentiation): tangents are not sent to other ranks; use "
            "loss.backward() or torch.autograd.grad"
        )


def _to_differentiate(call: Call, number: int) -> Call:
    """The gradients of the call of this number, which may be made in another order on some rank."""
    return call._replace(place=Place("gradients of call", number))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run_attention(call, q, k, v, sinks, wants_grad=True)
        ctx.call = _to_differentiate(call, session_of(call.group).contract.num_calls)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        with _telling_refusals(ctx.call):
            dout = _check_grads(out, *grads)
        with torch.no_grad():
            gradients = run_gradients(ctx.call, q, k, v, sinks, Merged(dout, out, lse))
        if torch.is_grad_enabled():  # create_graph=True
            gradients = _Once.apply(*gradients, dout, q, k, v, sinks)  # type: ignore[no-untyped-call]
        return *gradients, None


class _Once(torch.autograd.Function):
    """Gradients that cannot be differentiated themselves: says so when somebody tries."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        return tuple(None if x is None else x.view_as(x) for x in tensors[:4])

    @staticmethod
    def backward(ctx: Any, *_: object) -> None:  # noqa: ARG004
        raise UnsupportedError("attention has first derivatives only; leave out create_graph, or detach its gradients")


def _refuse_lse() -> NoReturn:
    raise UnsupportedError("the lse of attention has no gradient; use lse.detach() in what is differentiated")


def _check_grads(out: torch.Tensor, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> torch.Tensor:
    if dlse is not None:
        _refuse_lse()
    return torch.zeros_like(out) if dout is None else dout


_calls: dict[str, Call] = {}
_places: "WeakKeyDictionary[object, Iterator[int]]" = WeakKeyDictionary()  # for each program being compiled


def _constant(call: Call) -> str:
    """The key of a call while a program is compiled, which is compiled anew for another one.

    The fields are given one by one, since the compiler then has the very objects and guards each of them. It would make
    a variable of a number that changes from call to call, unless told to take it as it is.
    """
    options = call.options._replace(scale=_as_it_is(call.options.scale))
    return _enter(*options, call.group, _as_it_is(call.timeout_s), call.contract, call.record)


def _as_it_is(number: float | None) -> float | None:
    (constant,) = {number}  # what is in a set must have a hash, and so a value
    return constant


def _enter(*fields: Any) -> str:
    """The key of a call. It stays in the table, since a compiled program may ask for it at any time.

    The compiler may change the order of calls that do not depend on each other, and on each rank in its own way. So a
    call knows its place in the program as written, and the ranks agree on that too.
    """
    if getattr(torch.compiler, "is_exporting", bool)():  # since torch 2.7
        raise UnsupportedError(
            "attention inside torch.export: masks, layouts and groups cannot be kept in an exported program; use "
            "torch.compile"
        )
    *fields_of_options, group, timeout_s, contract, record = fields
    options = Options(*fields_of_options)
    # While it compiles, torch 2.13 has a stand-in for a process group.
    group = getattr(group, "real_obj", group)
    place = Place("place in the compiled program", next(_places.setdefault(TracingContext.get(), itertools.count())))
    key = f"{len(_calls)}, {_digest(options)}"
    _calls[key] = Call(options, group, timeout_s, contract, record, place)
    return key


def _digest(options: Options) -> str:
    """Of what is asked for and of this file, so that a program of another process never runs another call.

    torch keeps compiled programs on disk, finds them by the names and arguments of operators, and would run what was
    compiled with the fakes and gradients of another release.
    """
    asked = [x.fingerprint() if isinstance(x, Layout) else repr(x) for x in options]
    return hashlib.sha256("\n".join([_own_text(), *asked]).encode()).hexdigest()[:12]


@functools.cache
def _own_text() -> str:
    return (pkgutil.get_data(__package__, Path(__file__).name) or b"").decode(errors="replace")


def _entered(key: str) -> Call:
    if key not in _calls:
        raise UnsupportedError(
            "a program that was compiled in another process: its masks, layouts and group are unknown here; compile it "
            "in this one"
        )
    return _calls[key]


# What torch.compiler.assume_constant_result would do, which imports the compiler: a second for all who never compile.
vars(_enter).update(_dynamo_marked_constant=True)

# The compiler follows neither NumPy nor slots. causal() and full() have no fields, and no need of this.
_BUILT_OUTSIDE = (
    Layout.__post_init__,
    Mask.__and__,
    Mask.__or__,
    balanced,
    contiguous,
    documents,
    frame_causal,
    per_row,
    prefix,
    sliding_window,
    striped,
    zigzag,
)
_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def _mark_outside(function: Callable[..., Any], what: str) -> None:
    message = f"ringspan: {what} outside of the compiled function"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=message)


def outside_of_programs(what: str) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """A function that sends messages: the compiler calls it and all below it as they are, or says why it cannot."""

    def wrap(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @functools.wraps(function)
        def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]

        _mark_outside(call, what)
        return call

    return wrap


for _build in _BUILT_OUTSIDE:
    _mark_outside(_build, "build masks and layouts")


@torch.library.custom_op("ringspan::attend", mutates_args=())
def _attend_op(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: str, wants_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output and lse; and the number of the call, which its gradients are told by: a program may run many times."""
    entered = _entered(call)
    out, lse = run_attention(entered, q, k, v, sinks, wants_grad)
    number = session_of(entered.group).contract.num_calls
    return out.contiguous(), lse.contiguous(), torch.tensor(number, device="cpu")


@_attend_op.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,  # noqa: ARG001
    v: torch.Tensor,
    sinks: torch.Tensor | None,  # noqa: ARG001
    call: str,  # noqa: ARG001
    wants_grad: bool,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse, torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ringspan::attend_backward", mutates_args=())
def _attend_backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    dout: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    number: torch.Tensor,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    numbered = _to_differentiate(_entered(call), int(number.item()))
    *gradients, dsinks = run_gradients(numbered, q, k, v, sinks, Merged(dout, out, lse))
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
    number: torch.Tensor,  # noqa: ARG001
    call: str,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.call, _ = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    q, k, v, sinks, out, lse, number = ctx.saved_tensors
    dout = _check_grads(out, *grads[:2])
    dq, dk, dv, dsinks = _attend_backward_op(q, k, v, sinks, dout, out, lse, number, ctx.call)
    return dq, dk, dv, None if sinks is None else dsinks, None, None


_attend_op.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("ringspan::lse", mutates_args=())
def _lse_op(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """The lse as if it could be differentiated like out, so that doing so is refused; else it would be a constant."""
    return lse.clone()


@_lse_op.register_fake
def _(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(lse)


_lse_op.register_autograd(lambda *_: _refuse_lse())

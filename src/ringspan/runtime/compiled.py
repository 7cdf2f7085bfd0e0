"""How does a call take part in torch.compile, and why not in torch.export?

A compiled program calls custom operators, which the compiler treats as opaque. An operator takes tensors, numbers and
strings only, so the rest of a call is kept in a table and found by a key that is compiled into the program. The table
holds a process group weakly: a compiled program does not keep its group alive. An exported program could not carry the
masks, layouts and groups of its calls, so torch.export is refused.
"""

import functools
import hashlib
import itertools
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._guards import TracingContext

from ringspan.errors import TransportError, UnsupportedError
from ringspan.kernels.base import Merged
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout, balanced, contiguous, striped, zigzag
from ringspan.mask import Mask, blocks, chunks, documents, frame_causal, per_row, prefix, sliding_window
from ringspan.runtime.autograd import check_grads, gradients_of, needs_grad, refuse_lse
from ringspan.runtime.contract import Place
from ringspan.runtime.engine import Attention, Call, run_attention, run_gradients
from ringspan.runtime.plan import CallOptions
from ringspan.runtime.session import session_of


def attend_compiled(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> Attention:
    """`autograd.attend` while a program is compiled."""
    out, lse, _ = _attend_op(q, k, v, sinks, _constant(call), needs_grad(q, k, v, sinks))
    return Attention(out, _lse_op(lse, out))


class _Entry(NamedTuple):
    """A call of a compiled program without its group."""

    call: Call
    find_group: Callable[[], Any]


_entries: dict[str, _Entry] = {}
_numbers = itertools.count()
_places: "WeakKeyDictionary[object, Iterator[int]]" = WeakKeyDictionary()  # by program being compiled


def _constant(call: Call) -> str:
    """The key of a call, as a constant of the program; for another call the program is compiled again.

    The fields are passed one by one, so that the compiler guards the identity of each object. It would turn a number
    that changes between calls into a variable, so numbers are marked as constants.
    """
    options = call.options._replace(scale=_as_constant(call.options.scale), softcap=_as_constant(call.options.softcap))
    return _enter(*options, call.group, _as_constant(call.timeout_s), call.contract, call.record)


def _as_constant(number: float | None) -> float | None:
    (constant,) = {number}  # the element of a set needs a hash, and therefore a value
    return constant


def _enter(*fields: Any) -> str:
    """Add a call to the table and return its key.

    The compiler may reorder calls that do not depend on each other, in its own way on each rank. So a call knows its
    place in the program as written, and the ranks agree on that too.
    """
    if getattr(torch.compiler, "is_exporting", bool)():  # since torch 2.7
        raise UnsupportedError(
            "attention inside torch.export: an exported program cannot contain masks, layouts and groups",
            remedy="use torch.compile",
        )
    *fields_of_options, group, timeout_s, contract, record = fields
    options = CallOptions(*fields_of_options)
    group = getattr(group, "real_obj", group)  # torch 2.13 passes a stand-in for a process group while it compiles
    place = Place("place in the compiled program", next(_places.setdefault(TracingContext.get(), itertools.count())))
    key = f"{next(_numbers)}, {_digest(options)}"
    _entries[key] = _Entry(Call(options, None, timeout_s, contract, record, place=place), _held(group, key))
    return key


def _held(group: Any, key: str) -> Callable[[], Any]:
    """A function that returns the group; a process group is held weakly, and its entry goes with it.

    A DeviceMesh refers to its group by name, and a slice such as mesh["cp"] is a new object each time: it is kept.
    """
    if isinstance(group, dist.ProcessGroup):
        weakref.finalize(group, _entries.pop, key, None)
        return weakref.ref(group)
    return lambda: group


def _digest(options: CallOptions) -> str:
    """Hash of the options and of this source file.

    torch keeps compiled programs on disk and finds them by the names and arguments of operators. With the hash among
    the arguments, an entry made for another call or by another release is not reused.
    """
    fields = [x.fingerprint() if isinstance(x, Layout) else repr(x) for x in options]
    return hashlib.sha256("\n".join([_own_text(), *fields]).encode()).hexdigest()[:12]


@functools.cache
def _own_text() -> str:
    return (pkgutil.get_data(__package__, Path(__file__).name) or b"").decode(errors="replace")


def _entered(key: str) -> Call:
    entry = _entries.get(key)
    if entry is None:
        raise UnsupportedError(
            "this program was compiled in another process, or for a process group that is gone: its mask, layout and "
            "group are unknown here",
            remedy="compile it again",
        )
    group = entry.find_group()
    if group is None and isinstance(entry.find_group, weakref.ref):
        raise TransportError("the process group of a compiled call is gone", remedy="compile it again for another one")
    return entry.call._replace(group=group)


# What torch.compiler.assume_constant_result would do, except that it imports the compiler, which takes a second.
vars(_enter).update(_dynamo_marked_constant=True)

# The compiler follows neither NumPy nor slots. causal() and full() have no fields, so they need no mark.
_BUILT_OUTSIDE = (
    Layout.__post_init__,
    Mask.__and__,
    Mask.__or__,
    balanced,
    blocks,
    chunks,
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
    """Mark a function that sends messages: the compiler calls it without compiling it, or says why it cannot."""

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
    """Compute out, lse and the number of the call, by which the backward pass finds it: programs run many times."""
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
    backward = gradients_of(_entered(call), int(number.item()))
    *gradients, dsinks = run_gradients(backward, q, k, v, sinks, Merged(dout, out, lse))
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
    dout = check_grads(out, *grads[:2])
    dq, dk, dv, dsinks = _attend_backward_op(q, k, v, sinks, dout, out, lse, number, ctx.call)
    return dq, dk, dv, None if sinks is None else dsinks, None, None


_attend_op.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("ringspan::lse", mutates_args=())
def _lse_op(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    """A copy of lse that requires a gradient, as out does, so that differentiating it is refused, not 0."""
    return lse.clone()


@_lse_op.register_fake
def _(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(lse)


_lse_op.register_autograd(lambda *_: refuse_lse())

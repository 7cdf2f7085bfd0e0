"""The whole call on this rank, forward and backward: check, prepare, agree, run, finish.

`session.call` is open from the first check to the last message. Before the ranks agree, an error on one rank is sent to
all of them; after that, an error aborts the call on all of them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from ringspan.arguments import CALLABLE, FLAG, check_arguments, optional
from ringspan.kernels.base import KernelGradients, Merged
from ringspan.kernels.softmax import Partial
from ringspan.layout import Layout
from ringspan.program.execute import Arithmetic, Event, Value, Wire, execute
from ringspan.program.prepare import Prepared
from ringspan.program.problem import LocalRows, Problem, local_rows
from ringspan.runtime.arithmetic import is_widened, without_autocast
from ringspan.runtime.checks import Looks, look_at
from ringspan.runtime.contract import Place
from ringspan.runtime.plan import CallOptions, CallPlan, Pass, make_plan
from ringspan.runtime.session import Session, session_of
from ringspan.runtime.wire import TransportWire
from ringspan.schedule import ALL, Block

_Result = TypeVar("_Result")


class Attention(NamedTuple):
    """The result of a call with `return_lse`: out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq)."""

    out: torch.Tensor
    lse: torch.Tensor


class Call(NamedTuple):
    """A call without its tensors."""

    options: CallOptions
    group: Any
    timeout_s: float | None
    contract: bool
    record: Callable[[Event], None] | None
    return_lse: bool = False
    place: Place | None = None  # set if ranks might issue identical calls in a different order


def run_attention(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, wants_grad: bool
) -> Attention:
    """This rank's out, in q's dtype, and lse, sinks included."""
    session = session_of(call.group)
    with session.call(call.timeout_s, contract=call.contract is not False) as ranks:
        # Check what depends on this call only; the rest is checked once, when the plan is made.
        if call.record is not None or call.contract is not True or call.return_lse is not False:
            check_arguments(  # the defaults need no check
                contract=(FLAG, call.contract),
                record=(optional(CALLABLE), call.record),
                return_lse=(FLAG, call.return_lse),
            )
        looks = look_at(q, k, v, sinks)
        # Prepare: the proved and bound program, the kernel and the signature, from the session or made now.
        which: Pass = "forward, to be differentiated" if wants_grad else "forward"
        plan = _find_plan(session, call.options, looks, which)
        # Agree: no payload is sent before all ranks are known to make this call.
        ranks.agree(plan.signature, call.place)
        # Run: attend what is here while the next block travels.
        kv = (k, v) if plan.codec is None else plan.codec.encode(k, v)
        out, lse = _run(run_forward, plan, session, ranks.deadline_s, call.record, q, *kv)
    # Finish: sinks need no message, and sums return to q's dtype.
    if sinks is not None:
        out, lse = plan.mode.with_sinks(Partial(out, lse), sinks)
    return Attention(out.to(q.dtype), lse)


def run_gradients(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, merged: Merged
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """This rank's dq, dk, dv and dsinks, each in the dtype of its tensor.

    dsinks is this rank's share of the sum over all ranks; in the reproducible mode it is that sum.
    """
    session = session_of(call.group)
    dsinks = None
    with session.call(call.timeout_s, contract=call.contract) as ranks:
        plan = _find_plan(session, call.options, look_at(q, k, v, sinks), "backward")
        ranks.agree(plan.signature, call.place)
        dq, dk, dv = _run(run_backward, plan, session, ranks.deadline_s, call.record, q, k, v, merged)
        if sinks is not None:
            layout = call.options.layout
            dsinks = plan.mode.sink_gradients(session.transport, layout, merged, sinks, ranks.deadline_s)
            dsinks = dsinks.to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _find_plan(session: Session, options: CallOptions, looks: Looks, which: Pass) -> CallPlan:
    try:
        plan: CallPlan | None = session.plans.get((options, looks, which))
    except TypeError:  # An option is unhashable; no valid option is, and make_plan names it.
        plan = None
    return plan or make_plan(options, looks, which, session)


def _run(
    run: Callable[..., _Result],
    plan: CallPlan,
    session: Session,
    deadline_s: float | None,
    record: Callable[[Event], None] | None,
    q: torch.Tensor,
    *tensors: Any,
) -> _Result:
    lent = session.scratch.lend() if is_widened(q) else nullcontext()
    with without_autocast(q.device.type), plan.threads(plan.kernel) as kernel, lent as scratch:
        result = run(
            plan.prepared,
            q,
            *tensors,
            arithmetic=plan.arithmetic(kernel, plan.scale, q, scratch),
            wire=TransportWire(session.transport, session.buffers, q, deadline_s, plan.kv_dtypes),
            rank=session.transport.rank,
            record=record,
        )
    session.buffers.trim()
    return result


def run_forward(
    prepared: Prepared[Problem],
    q: torch.Tensor,
    *kv: torch.Tensor,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> Partial:
    """This rank's out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq), in the accumulator dtype.

    `kv` is k and v, or the four tensors of their encoding.
    """
    inputs = {Block("q", rank): (q,)} | _kv_inputs(prepared.problem.kv_layout, rank, *kv)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    out, lse = state.sum(Block("out", rank))
    return Partial(out, lse.squeeze(-1))


def run_backward(
    prepared: Prepared[Problem],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    merged: Merged,
    *,
    arithmetic: Arithmetic,
    wire: Wire,
    rank: int,
    record: Callable[[Event], None] | None = None,
) -> KernelGradients:
    """This rank's dq, dk and dv, in the accumulator dtype; those of replicated keys are its share of the sum."""
    dout, out, lse = merged
    # A row that sees no key gets lse = +inf, so that its weights are 0; a row whose scores reach +inf gets NaN.
    lse = lse.masked_fill(lse == torch.inf, torch.nan).masked_fill_(lse == -torch.inf, torch.inf)
    layout = prepared.problem.kv_layout
    inputs = {Block("q_grad", rank): (q, dout, out, lse.unsqueeze(-1))} | _kv_inputs(layout, rank, k, v)
    state = prepared.state(rank, inputs, arithmetic)
    for _ in execute(prepared.program, state, wire, record):
        pass
    (dq,) = state.sum(Block("dq", rank))
    dkv = state.sum(Block("dkv", rank))
    if layout.replicated:
        dkv = _join(local_rows(layout, rank), dkv, state.sum(Block("dkv", ALL)))
    return KernelGradients(dq, *dkv)


def _kv_inputs(layout: Layout, rank: int, *kv: torch.Tensor) -> dict[Block, Value]:
    if not layout.replicated:
        return {Block("kv", rank): kv}
    own, replicated = local_rows(layout, rank)
    return {
        Block("kv", rank): tuple(x[..., own, :] for x in kv),
        Block("kv", ALL): tuple(x[..., replicated, :] for x in kv),
    }


def _join(rows: LocalRows, own: Value, replicated: Value) -> Value:
    """Put a rank's own rows and the replicated ones together in the order of its shard."""

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(*x.shape[:-2], x.shape[-2] + y.shape[-2], x.shape[-1])
        whole[..., rows.own, :], whole[..., rows.replicated, :] = x, y
        return whole

    return tuple(map(joined, own, replicated))

"""One call on this rank, forward or backward: checked, agreed upon by all ranks, then run.

Everything is checked before the first message: the arguments on this rank, then, by the contract, that all ranks mean
the same call. A rank that fails in the middle of a call tells the others, which would wait for it in vain.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from ringspan.algorithms import ALGORITHMS, Direction, Mesh, as_mesh, check_algorithm
from ringspan.algorithms.choose import DEFAULT, RingWork, choose_by_time
from ringspan.errors import LayoutError, TransportError, UnsupportedError
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, Merged, Request
from ringspan.kernels.softmax import Partial
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.bind import Problem, check_kinds, softmax_scale
from ringspan.program.execute import Event
from ringspan.runtime.arithmetic import TorchArithmetic, without_autocast
from ringspan.runtime.calibrate import measure_machine
from ringspan.runtime.checks import Looks, check_looks, check_rows, check_timeout, look_at
from ringspan.runtime.contract import Place, Signature
from ringspan.runtime.encoded import EncodedArithmetic, EncodedWire
from ringspan.runtime.passes import Prepared, prepare, run_backward, run_forward
from ringspan.runtime.quantize import Format, encode_kv, encoded_dtypes, find_format
from ringspan.runtime.reproducible_arithmetic import SteadyArithmetic, on_single_threads, tiles_at_once
from ringspan.runtime.session import Session, session_of
from ringspan.runtime.sinks import sink_gradients, sink_gradients_of_tiles, with_sinks
from ringspan.runtime.tile_sums import sum_over_tiles, tile_layout
from ringspan.runtime.wire import TransportWire
from ringspan.schedule import Block
from ringspan.transports.telling import telling

_LOG = logging.getLogger("ringspan")
_Result = TypeVar("_Result")
_KEPT_PLANS = 256
Pass = Literal["forward", "forward, to be differentiated", "backward"]


class Attention(NamedTuple):
    """What a call returns with `return_lse`: out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq)."""

    out: torch.Tensor
    lse: torch.Tensor


class Options(NamedTuple):
    """What all ranks must ask for alike."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    algorithm: str
    mesh: tuple[int, int] | None
    direction: Direction | None
    kernel: str
    scale: float | None
    wire: str | None
    reproducible: bool


class Call(NamedTuple):
    """What is asked for, apart from the tensors."""

    options: Options
    group: Any
    timeout_s: float | None
    contract: bool
    record: Callable[[Event], None] | None
    place: Place | None = None  # if some ranks might make like calls in another order


class _Plan(NamedTuple):
    """All that depends on the kind of call only, not on its numbers."""

    prepared: Prepared
    kernel: Kernel
    scale: float
    form: Format | None  # in which k and v travel
    signature: Signature


class _Ready(NamedTuple):
    """A call that all ranks are about to make."""

    plan: _Plan
    session: Session
    timeout_s: float
    record: Callable[[Event], None] | None


def run_attention(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    wants_grad: bool,
) -> Attention:
    """This rank's out, in q's type, and lse, with the sinks taken in."""
    ready = _prepare(call, q, k, v, sinks, "forward, to be differentiated" if wants_grad else "forward")
    out, lse = _run(run_forward, ready, q, k, v)
    if sinks is not None:
        out, lse = with_sinks(Partial(out, lse), sinks, is_steady=call.options.reproducible)
    return Attention(out.to(q.dtype), lse)


def run_gradients(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, merged: Merged
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """This rank's dq, dk, dv and dsinks, each in the type of its tensor.

    dsinks is this rank's share of the sum over all ranks; in the reproducible mode it is that sum.
    """
    ready = _prepare(call, q, k, v, sinks, "backward")
    dq, dk, dv = _run(run_backward, ready, q, k, v, merged)
    dsinks = None if sinks is None else _sink_gradients(ready, call.options, merged, sinks).to(sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _prepare(
    call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, which: Pass
) -> _Ready:
    session = session_of(call.group)
    transport = session.transport
    timeout_s = transport.timeout_s
    try:
        timeout_s = check_timeout(call.timeout_s, timeout_s)
        looks = look_at(q, k, v, sinks)
        options = call.options
        check_kinds(options.mask, options.layout, options.kv_layout)
        plan = _find_plan(options, looks, which, session)
    except TransportError:
        raise  # the others know
    except Exception as error:
        if call.contract and transport.world_size > 1:
            session.contract.refuse(f"{type(error).__name__}: {error}", timeout_s)
        raise
    if call.contract:
        if call.place is None:
            session.contract.agree(plan.signature, timeout_s)
        else:
            session.contract.agree(plan.signature.at(call.place), timeout_s, is_new=False)
    return _Ready(plan, session, timeout_s, call.record)


def _find_plan(options: Options, looks: Looks, which: Pass, session: Session) -> _Plan:
    try:
        plan: _Plan | None = session.plans.get((options, looks, which))
    except TypeError:  # something cannot be looked up by, as no option can that there is
        for name, value in zip(options._fields, options, strict=True):
            if not _has_hash(value):
                raise UnsupportedError(
                    f"{name}={value!r}: a {type(value).__name__} is nothing that {name} can be; see rs.attention"
                ) from None
        raise
    return plan or _make_plan(options, looks, which, session)


def _has_hash(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _make_plan(options: Options, looks: Looks, which: Pass, session: Session) -> _Plan:
    """For the first call of its kind in a session."""
    decided = _without_auto(options, looks, session)
    transport = session.transport
    plan = _plan(decided, looks, which, transport.rank, transport.world_size, session.mesh)
    if len(session.plans) >= _KEPT_PLANS:
        session.plans.clear()
    session.plans[options, looks, which] = plan
    return plan


def _run(run: Callable[..., _Result], ready: _Ready, q: torch.Tensor, *tensors: Any) -> _Result:
    (prepared, kernel, scale, form, _), session, timeout_s, record = ready
    transport = session.transport
    alike = nullcontext(kernel) if prepared.growth is None else on_single_threads(kernel, q.device)
    wire = TransportWire(transport, session.buffers, q, timeout_s)
    lent = session.scratch.lend()
    with telling(transport), without_autocast(q.device.type), alike as kernel, lent as scratch:
        arithmetic = (TorchArithmetic if prepared.growth is None else SteadyArithmetic)(kernel, scale, q, scratch)
        if form is not None:
            k, v = tensors
            tensors = encode_kv(k, v, form)
            arithmetic = EncodedArithmetic(kernel, scale, q, scratch)
            wire = EncodedWire(transport, session.buffers, q, timeout_s, encoded_dtypes(form))
        result = run(
            prepared,
            q,
            *tensors,
            arithmetic=arithmetic,
            wire=wire,
            rank=transport.rank,
            record=record,
        )
    session.buffers.trim()
    return result


def _sink_gradients(ready: _Ready, options: Options, merged: Merged, sinks: torch.Tensor) -> torch.Tensor:
    """This rank's share of dsinks; in the reproducible mode the sum over all ranks, on each of them."""
    if not options.reproducible:
        return sink_gradients(merged, sinks)
    transport, tiling = ready.session.transport, tile_layout(options.layout)
    with telling(transport):
        parts = sink_gradients_of_tiles(tiling.strips[transport.rank], merged, sinks)
        like = merged.lse.new_empty(len(sinks))
        return sum_over_tiles(transport, tiling, parts, like, ready.timeout_s)


def _check_wire(options: Options, which: Pass) -> Format | None:
    """The format of wire=, where K and V travel and no gradients are wanted."""
    if options.wire is None:
        return None
    form = find_format("wire", options.wire)
    if options.reproducible:
        raise UnsupportedError(
            f"reproducible=True, wire={options.wire!r}: encoded keys and values are not cut on the grid; leave one of "
            "them out"
        )
    if which != "forward":
        raise UnsupportedError(
            f"wire={options.wire!r}: gradients through rounded K and V would not be exact; call under torch.no_grad()"
        )
    if options.algorithm in ALGORITHMS and not ALGORITHMS[options.algorithm].moves_kv:
        raise UnsupportedError(f"wire={options.wire!r}: in {options.algorithm} K and V do not travel; leave it out")
    return form


def _without_auto(options: Options, looks: Looks, session: Session) -> Options:
    """For algorithm="auto" the one that should be faster here, with its reason in the log."""
    if options.algorithm != "auto":
        return options
    world_size = session.transport.world_size
    is_for_others = options.layout.world_size != world_size or options.kv_layout.world_size != world_size
    if world_size == 1 or is_for_others or options.wire is not None:  # which is about K and V on their way
        return options._replace(algorithm=DEFAULT)
    work = _ring_work(options, looks)
    choice = choose_by_time(work, None, world_size)
    if choice is None:
        q = looks.q
        figures = measure_machine(session, dtype=q.dtype, head_dim=q.shape[3], device=q.device)
        choice = choose_by_time(work, figures, world_size)
        assert choice is not None
    _LOG.info(choice.reason)
    return options._replace(algorithm=choice.algorithm)


def _ring_work(options: Options, looks: Looks) -> RingWork:
    shapes = check_looks(looks)
    problem = Problem(options.mask, options.layout, options.kv_layout, shapes)
    pairs = problem.layout.count_pairs(problem.mask, problem.kv_layout).sum() / problem.world_size
    rows = 1 if problem.mask.rows is None else len(problem.mask.rows)
    flops = 2 * pairs * shapes.batch[0] / rows * shapes.heads.num_heads * (shapes.head_dim + shapes.v_head_dim)
    largest = {
        kind: max(problem.block_bytes(Block(kind, rank)) for rank in range(problem.world_size))
        for kind in ("kv", "q", "out")
    }
    return RingWork(float(flops), largest["kv"], largest["q"], largest["out"])


def _plan(options: Options, looks: Looks, which: Pass, rank: int, world_size: int, group_mesh: Mesh | None) -> _Plan:
    shapes = check_looks(looks)
    form = _check_wire(options, which)
    if form is not None:
        shapes = replace(shapes, is_encoded=True)
    problem = Problem(options.mask, options.layout, options.kv_layout, shapes)
    check_rows(problem, rank, world_size, looks)
    algorithm = options.algorithm
    check_algorithm(algorithm, ["auto", *ALGORITHMS])
    asked_mesh = as_mesh(options.mesh)
    if asked_mesh is not None and group_mesh is not None and asked_mesh != group_mesh:
        raise LayoutError(f"mesh={tuple(asked_mesh)}: the group's own mesh is {tuple(group_mesh)}; leave mesh out")
    # A group of two dimensions serves the algorithms of one as well.
    takes = ALGORITHMS[algorithm].options
    mesh = asked_mesh or (group_mesh if "mesh" in takes else None)
    direction = options.direction
    if direction is None and "direction" in takes:
        direction = "forward"
    request = Request(looks.q.device, looks.q.dtype, shapes.head_dim, shapes.v_head_dim, options.reproducible)
    kernel = choose_kernel(options.kernel, request)
    scale = softmax_scale(options.scale, shapes.head_dim)
    fields = {
        "call": "attention",
        "pass": which,
        "batch": shapes.batch[0],
        "heads": f"{shapes.heads.num_heads} over {shapes.heads.num_kv_heads}",
        "head_dim": f"{shapes.head_dim}, {shapes.v_head_dim} for v",
        "dtype": looks.q.dtype,
        "mask": problem.mask,
        "layout": problem.layout.fingerprint(),
        "kv_layout": problem.kv_layout.fingerprint(),
        "algorithm": " ".join(map(str, filter(None, (algorithm, mesh and tuple(mesh), direction)))),
        "scale": scale,
        "kernel": kernel.name,
        "wire": options.wire or "as it is",
        "sinks": "none" if looks.sinks is None else "given",
        "reproducible": options.reproducible,
    }
    at_once = tiles_at_once(kernel.name, request) if options.reproducible else None
    side = problem.lighter_side() if which == "backward" else None
    prepared = prepare(problem, rank, algorithm, mesh, direction, side, at_once)
    return _Plan(prepared, kernel, scale, form, Signature.of(fields))

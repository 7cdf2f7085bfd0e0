"""What follows from the options and shapes of a call, before any number is seen? Made once per kind of call.

A plan holds the prepared program, the kernel, the mode, the softmax scale and the signature that ranks compare. Every
check that depends on options and shapes only is made here, so a repeated call makes none of them.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch

from ringspan.algorithms import ALGORITHMS, Direction, Mesh, as_mesh, check_algorithm
from ringspan.algorithms.choose import DEFAULT_ALGORITHM, RingWork, choose_by_time
from ringspan.arguments import FLAG, TEXT, check_arguments, optional
from ringspan.errors import LayoutError, UnsupportedError
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, KernelRequest
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.execute import Arithmetic
from ringspan.program.prepare import Prepared, ProgramOptions, prepare
from ringspan.program.problem import Problem, Scores, Shapes, check_kinds, check_scores
from ringspan.runtime import modes
from ringspan.runtime.calibrate import measure_machine
from ringspan.runtime.checks import Looks, check_looks, check_rows
from ringspan.runtime.codec import Codec, Quantized, codec_arithmetic
from ringspan.runtime.contract import Signature
from ringspan.runtime.quantize import find_format
from ringspan.runtime.scratch import Scratch
from ringspan.runtime.session import Session
from ringspan.schedule import Block

_LOG = logging.getLogger("ringspan")
_KEPT_PLANS = 256

Pass = Literal["forward", "forward, to be differentiated", "backward"]


class CallOptions(NamedTuple):
    """The options of a call; they must be equal on all ranks."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    algorithm: str
    mesh: tuple[int, int] | None
    direction: Direction | None
    kernel: str
    scale: float | None
    softcap: float | None
    wire: str | None
    reproducible: bool


class CallPlan(NamedTuple):
    """Everything that depends on the kind of call only, not on its numbers."""

    prepared: Prepared[Problem]
    mode: modes.TorchMode
    kernel: Kernel
    threads: Callable[[Kernel], AbstractContextManager[Kernel]]
    """A context in which the program runs, which gives the kernel to call there."""
    arithmetic: Callable[[Kernel, float, torch.Tensor, Scratch | None], Arithmetic]
    scale: float
    codec: Codec | None
    """How k and v are encoded for sending; None sends them as they are."""
    kv_dtypes: tuple[torch.dtype, ...] | None
    """Dtypes of the tensors of an encoded kv block; None for those of q."""
    signature: Signature


def make_plan(options: CallOptions, looks: Looks, which: Pass, session: Session) -> CallPlan:
    """Plan the first call of its kind in a session, and keep the plan there."""
    check_kinds(options.mask, options.layout, options.kv_layout)
    check_arguments(reproducible=(FLAG, options.reproducible), direction=(optional(TEXT), options.direction))
    _check_hashable(options)
    decided = _without_auto(options, looks, session)
    transport = session.transport
    plan = _plan(decided, looks, which, transport.rank, transport.world_size, session.mesh)
    if len(session.plans) >= _KEPT_PLANS:
        session.plans.clear()
    session.plans[options, looks, which] = plan
    return plan


def _check_hashable(options: CallOptions) -> None:
    for name, value in zip(options._fields, options, strict=True):
        try:
            hash(value)
        except TypeError:
            raise UnsupportedError(
                f"a {type(value).__name__} is not a valid value", argument=name, value=value, remedy="see rs.attention"
            ) from None


def _without_auto(options: CallOptions, looks: Looks, session: Session) -> CallOptions:
    """Replace algorithm="auto" by the algorithm that should be faster here, and log the reason."""
    if options.algorithm != "auto":
        return options
    world_size = session.transport.world_size
    is_for_others = options.layout.world_size != world_size or options.kv_layout.world_size != world_size
    if world_size == 1 or is_for_others or options.wire is not None:  # wire= is about K and V on their way
        return options._replace(algorithm=DEFAULT_ALGORITHM)
    work = _ring_work(options, looks)
    choice = choose_by_time(work, None, world_size)
    if choice is None:
        q = looks.q
        figures = measure_machine(session, dtype=q.dtype, head_dim=q.shape[3], device=q.device)
        choice = choose_by_time(work, figures, world_size)
        assert choice is not None
    _LOG.info(choice.reason)
    return options._replace(algorithm=choice.algorithm)


def _ring_work(options: CallOptions, looks: Looks) -> RingWork:
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


def _plan(
    options: CallOptions, looks: Looks, which: Pass, rank: int, world_size: int, group_mesh: Mesh | None
) -> CallPlan:
    shapes = check_looks(looks)
    codec = _check_wire(options, which)
    if codec is not None:
        shapes = replace(shapes, is_encoded=True)
    problem = Problem(options.mask, options.layout, options.kv_layout, shapes)
    check_rows(problem, rank, world_size, looks)
    check_algorithm(options.algorithm, ["auto", *ALGORITHMS])
    mode = modes.REPRODUCIBLE if options.reproducible else modes.DEFAULT
    scores = check_scores(options.scale, options.softcap, shapes.head_dim)
    dims = shapes.head_dim, shapes.v_head_dim
    request = KernelRequest(looks.q.device, looks.q.dtype, *dims, options.reproducible, scores.softcap)
    kernel = choose_kernel(options.kernel, request)
    mesh, direction = _ring_options(options, group_mesh)
    program_options = ProgramOptions(
        mesh=mesh,
        direction=direction,
        backward=problem.lighter_side() if which == "backward" else None,
        mode=mode.program,
        tiles_at_once=mode.tiles_at_once(kernel.name, request),
    )
    algorithm = " ".join(map(str, filter(None, (options.algorithm, mesh and tuple(mesh), direction))))
    return CallPlan(
        prepared=prepare(problem, rank, options.algorithm, program_options),
        mode=mode,
        kernel=kernel,
        threads=mode.threads(looks.q.device),
        arithmetic=mode.arithmetic if codec is None else partial(codec_arithmetic, codec),
        scale=scores.scale,
        codec=codec,
        kv_dtypes=None if codec is None else codec.dtypes,
        signature=_signature(options, looks, which, problem, algorithm, scores, kernel.name),
    )


def _ring_options(options: CallOptions, group_mesh: Mesh | None) -> tuple[Mesh | None, Direction | None]:
    """The mesh and direction to build with. A group of two dimensions serves algorithms of one dimension too."""
    mesh, direction = as_mesh(options.mesh), options.direction
    if mesh is not None and group_mesh is not None and mesh != group_mesh:
        raise LayoutError(
            f"the group's own mesh is {tuple(group_mesh)}", argument="mesh", value=tuple(mesh), remedy="leave mesh out"
        )
    takes = ALGORITHMS[options.algorithm].options
    if mesh is None and "mesh" in takes:
        mesh = group_mesh
    if direction is None and "direction" in takes:
        direction = "forward"
    return mesh, direction


def _check_wire(options: CallOptions, which: Pass) -> Codec | None:
    """The codec of wire=; refused where K and V do not travel or gradients are wanted."""
    if options.wire is None:
        return None
    form = find_format("wire", options.wire)
    if options.reproducible:
        raise UnsupportedError(
            "encoded keys and values are not cut on the grid of reproducible=True",
            argument="wire",
            value=options.wire,
            remedy="leave one of the two out",
        )
    if which != "forward":
        raise UnsupportedError(
            "gradients through rounded K and V would not be exact",
            argument="wire",
            value=options.wire,
            remedy="call under torch.no_grad()",
        )
    if options.algorithm in ALGORITHMS and not ALGORITHMS[options.algorithm].moves_kv:
        raise UnsupportedError(
            f"in {options.algorithm} K and V do not travel", argument="wire", value=options.wire, remedy="leave it out"
        )
    return Quantized(form)


def _signature(
    options: CallOptions, looks: Looks, which: Pass, problem: Problem, algorithm: str, scores: Scores, kernel: str
) -> Signature:
    shapes: Shapes = problem.shapes
    return Signature.of(
        {
            "call": "attention",
            "pass": which,
            "batch": shapes.batch[0],
            "heads": f"{shapes.heads.num_heads} over {shapes.heads.num_kv_heads}",
            "head_dim": f"{shapes.head_dim}, {shapes.v_head_dim} for v",
            "dtype": looks.q.dtype,
            "mask": problem.mask,
            "layout": problem.layout.fingerprint(),
            "kv_layout": problem.kv_layout.fingerprint(),
            "algorithm": algorithm,
            "scale": scores.scale,
            "softcap": scores.softcap,
            "kernel": kernel,
            "wire": options.wire or "as it is",
            "sinks": "none" if looks.sinks is None else "given",
            "reproducible": options.reproducible,
        }
    )

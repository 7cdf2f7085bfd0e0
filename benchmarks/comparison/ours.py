"""This library: the public call, its kernel on its pieces alone, and the call on more and more ranks."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import ringspan as rs
from comparison.case import Case, Contender, Tensors, with_gradients
from comparison.points import GROWTH, HEADS, IDEALS, OURS, WIDE
from ringspan.bench.baselines import Inputs, attend_pieces, own_pieces
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.program.prepare import ProgramOptions, prepare
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads


def _mask(case: Case) -> rs.Mask:
    return rs.causal() if case.point.is_causal else rs.full()


def _layout(case: Case, world_size: int) -> rs.Layout:
    return (rs.zigzag if case.point.is_causal else rs.contiguous)(case.point.seq_len, world_size)


def ringspan(case: Case, world_size: int | None = None) -> Contender:
    """The public call, on the first ranks or on all."""
    world_size = case.point.world_size if world_size is None else world_size
    group = dist.new_group(list(range(world_size)))
    if case.rank >= world_size:
        return Contender(lambda: None, None)
    mask, layout = _mask(case), _layout(case, world_size)
    rows = torch.from_numpy(layout.positions(case.rank))
    own = case.whole.rows(rows)
    attend = partial(rs.attention, mask=mask, layout=layout, group=group)
    return Contender(lambda: with_gradients(case, attend, own), rows)


def in_float32(case: Case) -> Contender:
    """The public call with the same numbers in float32."""
    return ringspan(dataclasses.replace(case, whole=Tensors(*(x.float() for x in case.whole))))


def ideal(case: Case) -> Contender:
    """The pieces of the call's own program with its own kernel: no messages, no merges, no sums."""
    layout = _layout(case, case.point.world_size)
    own = case.whole.rows(case.own_rows())
    wide = accumulator_dtype(own.q.dtype)
    head_dim = case.point.head_dim
    shapes = Shapes((1,), Heads(HEADS, HEADS), head_dim, head_dim, own.q.itemsize, wide.itemsize)
    problem = Problem(_mask(case), layout, layout, shapes)
    kernel = choose_kernel("auto", KernelRequest(own.q.device, own.q.dtype, head_dim, head_dim))
    sides = (None, problem.lighter_side()) if case.point.has_backward else (None,)
    pieces = [
        piece
        for side in sides
        for piece in own_pieces(prepare(problem, case.rank, "pass_kv", ProgramOptions(backward=side)), Inputs(*own[:3]))
    ]
    return Contender(lambda: attend_pieces(kernel, 1 / math.sqrt(head_dim), pieces), None)


CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    OURS: ringspan,
    WIDE: in_float32,
    IDEALS[1]: ideal,
    **{name: partial(ringspan, world_size=number) for name, number in GROWTH.items()},
}

"""What do the two modes do with tensors? The default one, and the reproducible one.

`program/prepare.py` holds what the modes do with schedules; this file adds kernels, arithmetic and sinks.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch

from ringspan.kernels.base import Kernel, KernelRequest, Merged
from ringspan.kernels.softmax import Partial
from ringspan.layout import Layout
from ringspan.program import prepare
from ringspan.program.prepare import Mode
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.reproducible_arithmetic import SteadyArithmetic, on_single_threads, tiles_at_once
from ringspan.runtime.sinks import sink_gradients, sink_gradients_of_tiles, with_sinks
from ringspan.runtime.tile_sums import sum_over_tiles, tile_layout
from ringspan.transports.base import Transport


class TorchMode(NamedTuple):
    """How a mode prepares programs, calls kernels, adds tensors and treats sinks."""

    program: Mode
    arithmetic: type[TorchArithmetic]
    threads: Callable[[torch.device], Callable[[Kernel], AbstractContextManager[Kernel]]]
    """For a device: a context in which a program runs, which gives the kernel to call there."""
    tiles_at_once: Callable[[str, KernelRequest], int]
    with_sinks: Callable[[Partial, torch.Tensor], Partial]
    sink_gradients: Callable[[Transport, Layout, Merged, torch.Tensor, float | None], torch.Tensor]
    """dsinks from (transport, layout, merged, sinks, deadline_s): this rank's share, or the sum on all ranks."""


def _share_of_sink_gradients(
    transport: Transport,  # noqa: ARG001
    layout: Layout,  # noqa: ARG001
    merged: Merged,
    sinks: torch.Tensor,
    deadline_s: float | None,  # noqa: ARG001
) -> torch.Tensor:
    return sink_gradients(merged, sinks)


def _sum_of_sink_gradients(
    transport: Transport, layout: Layout, merged: Merged, sinks: torch.Tensor, deadline_s: float | None
) -> torch.Tensor:
    tiling = tile_layout(layout)
    parts = sink_gradients_of_tiles(tiling.strips[transport.rank], merged, sinks)
    return sum_over_tiles(transport, tiling, parts, merged.lse.new_empty(len(sinks)), deadline_s)


DEFAULT = TorchMode(
    program=prepare.DEFAULT,
    arithmetic=TorchArithmetic,
    threads=lambda _: nullcontext,
    tiles_at_once=lambda *_: 1,
    with_sinks=lambda part, sinks: with_sinks(part, sinks, is_steady=False),
    sink_gradients=_share_of_sink_gradients,
)

REPRODUCIBLE = TorchMode(
    program=prepare.REPRODUCIBLE,
    arithmetic=SteadyArithmetic,
    threads=lambda device: partial(on_single_threads, device=device),
    tiles_at_once=tiles_at_once,
    with_sinks=lambda part, sinks: with_sinks(part, sinks, is_steady=True),
    sink_gradients=_sum_of_sink_gradients,
)

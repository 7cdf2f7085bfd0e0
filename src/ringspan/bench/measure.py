"""How long does attention take on these ranks, beside one device and beside the ideal?

Three things are timed in turn, repeat by repeat, so that whatever the machine does to one it does to all: one device
(rank 0 computes everything with one thread while the others are idle), the ideal (every rank computes the pieces its
programs give it, with no messages and nothing merged) and the ranks (the public call). A few more runs are taken apart
under a watch; they tell where the time goes and what was sent, and are not among the times.
"""

import math
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from ringspan.bench.baselines import Drawn, Results, attend_pieces, check, draw, one_device, own_pieces, with_gradients
from ringspan.bench.breakdown import Interval
from ringspan.bench.conclude import Conclusion, Dissected, conclude
from ringspan.bench.group import gather_values, meet
from ringspan.bench.launch import Progress
from ringspan.bench.memory import measure_peak
from ringspan.bench.result import Measured, MeasuredMemory
from ringspan.bench.settings import Job, Settings
from ringspan.bench.timed import TimedArithmetic, TimedKernel, TimedSteadyArithmetic, TimedWire, Watch
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, KernelRequest, Merged
from ringspan.program.bind import Exchange
from ringspan.program.prepare import Prepared, ProgramOptions, prepare
from ringspan.program.problem import Problem
from ringspan.runtime import modes
from ringspan.runtime.api import attention
from ringspan.runtime.engine import run_backward, run_forward
from ringspan.runtime.session import Session, session_of
from ringspan.training import gather
from ringspan.transports.base import CountingTransport

T = TypeVar("T")

DISSECTED = 3  # recorded runs, at most


class _Bench(NamedTuple):
    """One rank's inputs and options of a measurement."""

    settings: Settings
    group: Any
    session: Session
    device: torch.device
    drawn: Drawn
    passes: tuple[Prepared[Problem], ...]  # forward, and backward if it is measured
    kernel: Kernel

    @property
    def rank(self) -> int:
        return self.session.transport.rank

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.settings.head_dim)


def measure(job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> Measured | None:
    """Measure on this rank. Returns the result on rank 0, None on the others."""
    assert job.settings is not None
    bench = _prepare(job.settings, group, device)
    settings, is_first = bench.settings, bench.rank == 0
    num_dissected = min(DISSECTED, settings.repeats)
    tell = Steps(report, 2 + 3 * settings.repeats + num_dissected)
    tell("the first call")
    memory = _first_call(bench)
    whole = draw(settings, settings.layout.all_positions(), device) if is_first else None
    alone = None if whole is None else one_device(settings, whole)
    pieces = [piece for each in bench.passes for piece in own_pieces(each, bench.drawn.inputs)]
    found = Conclusion([], [], [], [], _scheduled_bytes(bench), memory)
    expected = results = None
    for i in range(settings.repeats):
        of = f"{i + 1} of {settings.repeats}"
        tell(f"one device, {of}")
        expected = _time(bench, found.one_device_s, alone.run if alone else _idle)
        tell(f"the ideal, {of}")
        _time(bench, found.ideal_s, lambda: attend_pieces(bench.kernel, bench.scale, pieces))
        tell(f"the ranks, {of}")
        results = _time(bench, found.ranks_s, lambda: _call(bench))
        if i < num_dissected:
            tell(f"where the time goes, {i + 1} of {num_dissected}")
            found.dissected.append(_dissect(bench))
    tell("the check")
    assert results is not None
    results = tuple(gather(x, settings.layout, group, dim=2) for x in results)
    everyone = gather_values(bench.session.transport, found, settings.timeout_s)
    if whole is None or alone is None or expected is None:
        return None
    checked = check(settings, whole, results, expected)
    return conclude(settings, bench.kernel.name, alone.method, device, everyone, checked)


class Steps:
    """Reports progress, one step at a time."""

    def __init__(self, report: Callable[[Progress], None], total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def __call__(self, what: str) -> None:
        """Report that the next step begins."""
        self._report(Progress(self._done, self._total, what))
        self._done += 1


def _prepare(settings: Settings, group: Any, device: torch.device) -> _Bench:
    session = session_of(group)
    rank = session.transport.rank
    drawn = draw(settings, settings.layout.positions(rank), device)
    dims = settings.head_dim, settings.head_dim
    request = KernelRequest(device, drawn.inputs.q.dtype, *dims, settings.reproducible)
    kernel = choose_kernel(settings.kernel, request)
    mode = modes.REPRODUCIBLE if settings.reproducible else modes.DEFAULT
    options = ProgramOptions(
        settings.mesh,
        settings.direction,
        mode=mode.program,
        tiles_at_once=mode.tiles_at_once(kernel.name, request),
    )
    passes = tuple(
        prepare(settings.problem(), rank, settings.algorithm, options._replace(backward=side))
        for side in settings.passes()
    )
    return _Bench(settings, group, session, device, drawn, passes, kernel)


def _call(bench: _Bench) -> Results:
    settings = bench.settings

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(
            q,
            k,
            v,
            mask=settings.mask,
            layout=settings.layout,
            group=bench.group,
            algorithm=settings.algorithm,
            mesh=settings.mesh,
            direction=settings.direction,
            kernel=settings.kernel,
            reproducible=settings.reproducible,
            timeout_s=settings.timeout_s,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return with_gradients(attend, bench.drawn)


def _first_call(bench: _Bench) -> MeasuredMemory:
    """Memory is measured in the first call, before the allocator holds blocks to reuse."""
    input_bytes = bench.drawn.nbytes
    _, (peak, above) = measure_peak(bench.device, lambda: _call(bench))
    if bench.settings.carrier == "threads":
        return MeasuredMemory(input_bytes, None, None)
    return MeasuredMemory(input_bytes, peak, above)


def _time(bench: _Bench, seconds: list[float], call: Callable[[], T]) -> T:
    """Time a call that begins after a barrier."""
    meet(bench.session.transport, bench.settings.timeout_s)
    _finish(bench.device)
    start_s = time.perf_counter()
    value = call()
    _finish(bench.device)
    seconds.append(time.perf_counter() - start_s)
    return value


def _idle() -> None:
    """Do nothing: only rank 0 computes; this rank continues to the next barrier."""


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _dissect(bench: _Bench) -> Dissected:
    """Run the programs of the call and record them."""
    watch = Watch(bench.rank, bench.device)
    transport = CountingTransport(bench.session.transport)
    q = bench.drawn.inputs.q
    timed_arithmetic = TimedSteadyArithmetic if bench.settings.reproducible else TimedArithmetic

    def wire() -> TimedWire:
        timed = TimedWire(transport, bench.session.buffers, q, bench.settings.timeout_s)
        timed.watch = watch
        return timed

    forward, *backward = bench.passes
    with bench.session.scratch.lend() as scratch:
        arithmetic = timed_arithmetic(TimedKernel(bench.kernel, watch), bench.scale, q, scratch)
        common: dict[str, Any] = {"arithmetic": arithmetic, "rank": bench.rank, "record": watch.note}
        meet(bench.session.transport, bench.settings.timeout_s)
        start_s = watch.now()
        out, lse = run_forward(forward, *bench.drawn.inputs, wire=wire(), **common)
        for prepared in backward:
            assert bench.drawn.dout is not None
            watch.first_step = forward.schedule.num_steps
            merged = Merged(bench.drawn.dout, out.to(q.dtype), lse)
            run_backward(prepared, *bench.drawn.inputs, merged, wire=wire(), **common)
    call = Interval(start_s, watch.now())
    return Dissected(socket.gethostname(), call, tuple(watch.activities), sum(transport.bytes_sent))


def _scheduled_bytes(bench: _Bench) -> int:
    """Bytes that the schedules make this rank send."""
    return sum(
        message.nbytes
        for prepared in bench.passes
        for exchange in prepared.program
        if isinstance(exchange, Exchange)
        for message in exchange.sends
    )

"""How fast do this machine's ranks compute and send? The figures that choosing an algorithm needs.

They are measured once per group, device, dtype and head_dim, on all ranks at the same time: a kernel on one tile, and
messages round the ring that grow until they take long enough to measure. It takes a few hundred milliseconds. All ranks
then use the slowest figures, so they make the same choice.
"""

import math
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

from ringspan.algorithms.choose import RingMachine
from ringspan.arguments import WHOLE, check_arguments, instance_of
from ringspan.errors import ShapeError
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.program.pieces import Piece, PieceKind
from ringspan.runtime.checks import DEVICE, DTYPE
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import Session, session_of
from ringspan.transports.base import Receive, Send

TILE = 1024  # tokens
LONG_ENOUGH_S = 0.05
FIRST_BYTES, LAST_BYTES = 2**16, 2**24
ROUNDS = 5


def measure_machine(
    group: Any = None,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 64,
    device: torch.device | str = "cpu",
) -> RingMachine:
    """The figures of a group for one dtype, head_dim and device, measured at the first call; a collective call."""
    check_arguments(dtype=(DTYPE, dtype), head_dim=(WHOLE, head_dim), device=(DEVICE, device))
    if head_dim < 1:
        raise ShapeError("a head has elements", argument="head_dim", value=head_dim, remedy="use 1 or more")
    session = group if isinstance(group, Session) else session_of(group)
    device = torch.empty(0, device=device).device
    key = (device.type, dtype, head_dim)
    figures: RingMachine | None = session.measured.get(key) or session.measured.get(None)
    if figures is None:
        figures = session.measured[key] = _measure(session, device, dtype, head_dim)
    return figures


def use_machine(machine: RingMachine, group: Any = None) -> None:
    """Use these figures from now on instead of measuring. All ranks must pass the same."""
    check_arguments(machine=(instance_of(RingMachine, "that of rs.measure_machine"), machine))
    if min(machine.compute_flops_per_s, machine.link_bytes_per_s) <= 0 or machine.latency_s < 0:
        raise ShapeError(
            "rates are above 0 and a latency is not below 0",
            argument="machine",
            value=machine,
            remedy="give flop/s, bytes/s and seconds",
        )
    session = session_of(group)
    session.plans.clear()
    session.measured.clear()
    session.measured[None] = machine


def _measure(session: Session, device: torch.device, dtype: torch.dtype, head_dim: int) -> RingMachine:
    fields = {"call": "calibrate", "device": device.type, "dtype": dtype, "head_dim": head_dim}
    with session.call() as call:
        call.agree(Signature.of(fields))
        return _measure_together(session, device, dtype, head_dim)


def _measure_together(session: Session, device: torch.device, dtype: torch.dtype, head_dim: int) -> RingMachine:
    transport = session.transport
    latency_s = _slowest(session, _time_message(session, device, 8))
    nbytes = FIRST_BYTES
    while (seconds := _slowest(session, _time_message(session, device, nbytes))) < LONG_ENOUGH_S / ROUNDS:
        if nbytes >= LAST_BYTES:
            break
        nbytes *= 4
    link_bytes_per_s = nbytes / max(seconds - latency_s, 1e-9)
    tile_s = _slowest(session, _median(attend := _tile(device, dtype, head_dim)))
    compute = 4 * TILE * TILE * head_dim / tile_s
    if transport.world_size == 1 or device.type != "cpu":
        return RingMachine(compute, link_bytes_per_s, latency_s)
    # Attend for longer than a message takes; the extra time with a message under way is what its bytes cost the CPU.
    tiles = math.ceil(2 * seconds / tile_s)
    busy_s = _slowest(session, _median(lambda: _with_message(session, device, nbytes, attend, tiles))) - tiles * tile_s
    return RingMachine(compute, link_bytes_per_s, latency_s, max(0.0, busy_s) / nbytes)


def _tile(device: torch.device, dtype: torch.dtype, head_dim: int) -> Callable[[], None]:
    """A function that attends one tile."""
    kernel = choose_kernel("auto", KernelRequest(device, dtype, head_dim, head_dim))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, TILE, head_dim, generator=generator, dtype=torch.float32, device="cpu").to(dtype).to(device)
    piece = Piece(slice(0, TILE), slice(0, TILE), PieceKind.FULL, None, None)

    def run() -> None:
        kernel.forward(x, x, x, piece, head_dim**-0.5)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _with_message(session: Session, device: torch.device, nbytes: int, attend: Callable[[], None], times: int) -> None:
    """Attend while a message is under way."""
    wait = _start_message(session, device, nbytes)
    for _ in range(times):
        attend()
    wait()


def _time_message(session: Session, device: torch.device, nbytes: int) -> float:
    """Seconds for a message to the next rank while one comes from the previous."""
    if session.transport.world_size == 1:
        return 1e-9
    return _median(lambda: _start_message(session, device, nbytes)())


def _start_message(session: Session, device: torch.device, nbytes: int) -> Callable[[], None]:
    """Start a message to the next rank and one from the previous; returns a function that waits for both."""
    transport = session.transport
    mine, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    dst, src = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    posted = transport.exchange([Send(dst, mine)], [Receive(src, theirs)])

    def wait() -> None:
        for handle in (*posted.receives, *posted.sends):
            handle.wait(transport.timeout_s)

    return wait


def _median(run: Callable[[], None]) -> float:
    run()
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[ROUNDS // 2]


def _slowest(session: Session, seconds: float) -> float:
    """The largest of all ranks' figures."""
    everyone = session.transport.all_gather_bytes(struct.pack("<d", seconds), session.transport.timeout_s)
    return float(max(struct.unpack("<d", one)[0] for one in everyone))

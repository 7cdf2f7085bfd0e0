"""How fast is this machine, in the planner's terms? The curves of one rank, measured while all ranks compute.

Tiles run through the runtime's own arithmetic, so slabs and copies count as they will in a call; all ranks compute at
the same time, since cores share memory and power. Messages go both ways at once, as in a ring.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ringspan.bench.calibration import Calibration, Point, Tiles, fit_attention, fit_link
from ringspan.bench.group import gather_values, meet
from ringspan.bench.launch import Progress
from ringspan.bench.settings import CalibrationSettings, Job
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.planner.cost import BACKWARD_RATIO
from ringspan.planner.software import RINGSPAN
from ringspan.program.pieces import Piece, PieceKind
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.session import Session, session_of
from ringspan.schedule import Block
from ringspan.transports.base import MessageHandle, Receive, Send

TILES = {
    "full": PieceKind.FULL,
    "causal": PieceKind.CAUSAL,
    "full backward": PieceKind.FULL,
    "causal backward": PieceKind.CAUSAL,
}
TILE_LENGTHS = (512, 1024, 2048, 4096, 8192)
MESSAGE_BYTES = (2**12, 2**18, 2**20, 2**22, 2**24)
STOLEN_FROM = 2048  # tokens of the tile that is computed while a message travels
REPEATS = 5  # the least number
MOST_REPEATS = 25
BUDGET_S = 1.0  # per measurement, for repeats beyond REPEATS


class _Here(NamedTuple):
    job: Job
    settings: CalibrationSettings
    session: Session
    device: torch.device
    arithmetic: TorchArithmetic


def calibrate(job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> Calibration | None:
    """Measure on this rank. Returns the curves on rank 0, None on the others."""
    assert job.calibration is not None
    settings, session = job.calibration, session_of(group)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    kernel = choose_kernel(settings.kernel, KernelRequest(device, dtype, settings.head_dim, settings.head_dim))
    like = torch.empty(1, dtype=dtype, device=device)
    here = _Here(job, settings, session, device, TorchArithmetic(kernel, 1 / math.sqrt(settings.head_dim), like))
    lengths = [n for n in TILE_LENGTHS if n <= max(settings.seq_len, TILE_LENGTHS[0])]
    num_tiles = len(TILES) * len(lengths)
    total = num_tiles + len(MESSAGE_BYTES) + 2
    seconds: dict[tuple[str, int], list[float]] = {}
    for i, (name, n) in enumerate((name, n) for name in TILES for n in lengths):
        report(Progress(i, total, f"a {name} tile of {n:,} tokens"))
        seconds[name, n] = (_backward_tile_s if "backward" in name else _tile_s)(here, n, TILES[name])
    report(Progress(num_tiles, total, "merging"))
    merging_s = _merge_s(here, lengths[-1])
    messages: list[tuple[int, list[float]]] = []
    for i, nbytes in enumerate(MESSAGE_BYTES if session.transport.world_size > 1 else ()):
        report(Progress(num_tiles + 1 + i, total, f"messages of {nbytes:,} bytes"))
        messages.append((nbytes, _message_s(here, nbytes)))
    report(Progress(total - 1, total, "a tile while a message travels"))
    stolen_s = _stolen_s(here) if session.transport.world_size > 1 else [0.0]
    everyone = gather_values(session.transport, (seconds, merging_s, messages, stolen_s), job.timeout_s)
    if session.transport.rank:
        return None
    return _conclude(here, kernel.name, lengths, everyone)


def _conclude(here: _Here, kernel: str, lengths: Sequence[int], everyone: Sequence[Any]) -> Calibration:
    settings = here.settings
    slowest = {key: _slowest([rank[0][key] for rank in everyone]) for key in everyone[0][0]}
    heads = settings.batch * settings.num_heads
    flops = 4.0 * heads * settings.head_dim

    def points(name: str) -> list[Point]:
        products = BACKWARD_RATIO if "backward" in name else 1.0
        pairs = {n: n * (n + 1) / 2 if TILES[name] is PieceKind.CAUSAL else float(n * n) for n in lengths}
        return [(n, products * flops * pairs[n], slowest[name, n]) for n in lengths]

    elements = lengths[-1] * heads * settings.head_dim
    messages = [(n, _slowest([rank[2][i][1] for rank in everyone])) for i, (n, _) in enumerate(everyone[0][2])]
    return Calibration(
        attention=fit_attention(
            kernel,
            Tiles(points("full"), points("causal")),
            Tiles(points("full backward"), points("causal backward")),
        ),
        link=fit_link(messages),
        steals=max(0.0, _slowest([rank[3] for rank in everyone])) / messages[-1][1] if messages else 0.0,
        merge_bytes_per_s=elements * RINGSPAN.merge_bytes / _slowest([rank[1] for rank in everyone]),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(everyone),
        memory_bytes_per_s=_read_bytes_per_s(here.device),
        dense_flops_per_s=_matmul_flops_per_s(here.device),
        node_size=len(everyone),
        about=f"{settings.dtype}, head_dim {settings.head_dim}, {len(everyone)} ranks over {here.job.carrier}",
        tiles=tuple((kind, n, slowest[kind, n]) for kind, n in slowest),
        messages=tuple(messages),
    )


def _slowest(of_ranks: Sequence[Sequence[float]]) -> float:
    """The median over repeats of the slowest rank, for which the others wait."""
    return float(statistics.median(max(seconds) for seconds in zip(*of_ranks, strict=True)))


def _time(here: _Here, call: Callable[[], object]) -> list[float]:
    """Seconds of every repeat. All ranks begin together; two warm-up runs are not counted."""
    seconds: list[float] = []
    num_repeats = 2 + REPEATS
    while len(seconds) < num_repeats:
        meet(here.session.transport, here.job.timeout_s)
        start_s = time.perf_counter()
        call()
        _finish(here.device)
        seconds.append(time.perf_counter() - start_s)
        if len(seconds) == 2:
            told = gather_values(here.session.transport, seconds[1], here.job.timeout_s)
            num_repeats = 2 + max(REPEATS, min(MOST_REPEATS, int(BUDGET_S / max(told))))
    return seconds[2:]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _operands(here: _Here, n: int) -> tuple[tuple[torch.Tensor], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    settings = here.settings
    dtype = getattr(torch, settings.dtype)

    def some(heads: int) -> torch.Tensor:
        return torch.randn(settings.batch, heads, n, settings.head_dim).to(here.device, dtype)

    q, k, v = some(settings.num_heads), some(settings.num_kv_heads), some(settings.num_kv_heads)
    shape = (settings.batch, settings.num_heads, n)
    sums = here.arithmetic.new_sum(Block("out", 0), ((*shape, settings.head_dim), (*shape, 1)))
    return (q,), (k, v), sums


def _tile_s(here: _Here, n: int, kind: PieceKind) -> list[float]:
    q, kv, out = _operands(here, n)
    piece = Piece(slice(0, n), slice(0, n), kind, None, None)
    return _time(here, lambda: here.arithmetic.attend(piece, q, kv, out, True))


def _backward_tile_s(here: _Here, n: int, kind: PieceKind) -> list[float]:
    """Seconds of the gradients of a tile that starts its sums; the values of the other operands do not matter."""
    q, kv, out = _operands(here, n)
    dout = torch.randn_like(out[0]).to(q[0].dtype)
    q_grad = (*q, dout, torch.zeros_like(dout), torch.full_like(out[1], math.log(n)))
    piece = Piece(slice(0, n), slice(0, n), kind, None, None)
    return _time(here, lambda: here.arithmetic.attend_grad(piece, q_grad, kv, None, None))


def _merge_s(here: _Here, n: int) -> list[float]:
    block, into, part = Block("out", 0), _operands(here, n)[2], _operands(here, n)[2]
    return _time(here, lambda: here.arithmetic.merge(block, into, part))


def _stolen_s(here: _Here) -> list[float]:
    """Extra seconds of a tile while the largest message travels both ways, for each pair of repeats."""
    q, kv, out = _operands(here, STOLEN_FROM)
    piece = Piece(slice(0, STOLEN_FROM), slice(0, STOLEN_FROM), PieceKind.FULL, None, None)
    exchange = _exchange(here, MESSAGE_BYTES[-1])
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * MOST_REPEATS):
        is_sending = bool(i % 2)
        meet(here.session.transport, here.job.timeout_s)
        handles = exchange() if is_sending else ()
        start_s = time.perf_counter()
        here.arithmetic.attend(piece, q, kv, out, True)
        _finish(here.device)
        seconds[is_sending].append(time.perf_counter() - start_s)
        for handle in handles:
            handle.wait(here.job.timeout_s)
    return [busy - free for free, busy in zip(seconds[False], seconds[True], strict=True)]


def _message_s(here: _Here, nbytes: int) -> list[float]:
    exchange = _exchange(here, nbytes)

    def wait() -> None:
        for handle in exchange():
            handle.wait(here.job.timeout_s)

    return _time(here, wait)


def _exchange(here: _Here, nbytes: int) -> Callable[[], Sequence[MessageHandle]]:
    """Return a call that sends a message to the next rank and receives one from the previous rank."""
    transport = here.session.transport
    rank, size = transport.rank, transport.world_size
    sent, buffer = (torch.zeros(nbytes, dtype=torch.uint8, device=here.device) for _ in range(2))

    def exchange() -> Sequence[MessageHandle]:
        posted = transport.exchange([Send((rank + 1) % size, sent)], [Receive((rank - 1) % size, buffer)])
        return *posted.receives, *posted.sends

    return exchange


def _read_bytes_per_s(device: torch.device) -> float:
    x = torch.ones(2**24, device=device)
    return x.nbytes / _best_s(lambda: float(x.sum()))


def _matmul_flops_per_s(device: torch.device) -> float:
    x = torch.ones(1024, 1024, device=device)
    return 2.0 * 1024**3 / _best_s(lambda: float((x @ x)[0, 0]))


def _best_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return float(np.min(seconds))

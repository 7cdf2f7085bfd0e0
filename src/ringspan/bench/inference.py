"""How long do prefill and decode with a cache take? One rank's part: every point is timed and checked.

The ways run in turn, so that what drifts slowly meets all of them. Outputs are compared with attention in float64, by
the definition, for a few rows of every point.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ringspan.algorithms import Query
from ringspan.algorithms.choose import DEFAULT_ALGORITHM, Q_RING
from ringspan.bench.launch import Progress
from ringspan.bench.result import (
    MISS_RATES,
    PARTS,
    WAYS,
    DecodePoint,
    InferenceResult,
    PrefillPoint,
    Timing,
)
from ringspan.bench.settings import InferenceSettings, Job
from ringspan.cache import KVCache, Turn
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.program.pieces import Piece, PieceKind
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.calibrate import measure_machine
from ringspan.runtime.session import session_of
from ringspan.transports.base import Receive, Send

TOLERANCES = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 4e-2, "float16": 4e-3}
CHECKED = 8  # rows
QUERIES: dict[str, Query] = {Q_RING: "sharded", "one_shot": "replicated"}


def measure_inference(
    job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]
) -> InferenceResult:
    """Measure all points of a job. Times are those of the slowest rank."""
    settings = job.inference
    assert settings is not None
    bench = _InferenceBench(settings, group, device)
    figures = measure_machine(group, dtype=bench.dtype, head_dim=settings.head_dim, device=device)
    machine = (
        f"{figures.compute_flops_per_s / 1e9:.4g} GFLOP/s, {figures.link_bytes_per_s / 1e6:.4g} MB/s, "
        f"{1e6 * figures.latency_s:.3g} µs"
    )
    prefills: list[PrefillPoint] = []
    decodes: list[DecodePoint] = []
    if settings.phase == "prefill":
        for done, miss in enumerate(MISS_RATES):
            report(Progress(done, len(MISS_RATES), f"{miss} % new"))
            prefills.append(bench.prefill_point(miss))
    else:
        contexts = [settings.seq_len // 16, settings.seq_len // 4, settings.seq_len]
        points = [(context, batch) for batch in dict.fromkeys((1, settings.batch)) for context in contexts]
        for done, (context, batch) in enumerate(points):
            report(Progress(done, len(points), f"{context} tokens, batch {batch}"))
            decodes.append(bench.decode_point(context, batch))
    return InferenceResult(
        settings, job.world_size, job.carrier, machine, TOLERANCES[settings.dtype], tuple(prefills), tuple(decodes)
    )


class _InferenceBench:
    def __init__(self, settings: InferenceSettings, group: Any, device: torch.device) -> None:
        self.settings = settings
        self.group = group
        self.device = device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.transport = session_of(group).transport
        self.rank = self.transport.rank

    def prefill_point(self, miss: int) -> PrefillPoint:
        """Time new tokens against a cache, with every algorithm."""
        num_new = max(1, self.settings.seq_len * miss // 100)
        cached = self.settings.seq_len - num_new
        q, k, v = self._tensors(1, self.settings.seq_len, miss)
        cache = self._cache()
        if cached:
            self._store(cache, {0: cached}, k[:, :, :cached], v[:, :, :cached])
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        error, picked = 0.0, ("", "")
        for number in range(self.settings.repeats + 1):  # the first is a warm-up
            for way in WAYS:
                turn, out, took = self._timed_turn(cache, {0: num_new}, [x[:, :, cached:] for x in (q, k, v)], way)
                if number:
                    seconds[way].append(took)
                if way == "auto":
                    picked = turn.algorithm, turn.reason
                if number == 0:
                    error = max(error, self._error(turn, out, q, k, v))
                turn.abort()
        times = {way: Timing.of(runs) for way, runs in seconds.items()}
        algorithm, reason = picked
        return PrefillPoint(miss, num_new, cached, times, algorithm, reason, self._largest_error(error))

    def decode_point(self, context: int, batch: int) -> DecodePoint:
        """Time one token per sequence: the parts alone, then whole steps of both kinds."""
        cache = self._cache()
        q, k, v = self._tensors(batch, context + 1, context)
        for sequence in range(batch):
            rows = slice(sequence, sequence + 1)
            self._store(cache, {sequence: context}, k[rows, :, :context], v[rows, :, :context])
        new = [x[:, :, context:] for x in (q, k, v)]
        runs: dict[str, list[float]] = {name: [] for name in PARTS}
        error = 0.0
        for number in range(self.settings.repeats + 1):
            took = {
                "attention": self._timed(lambda: self._attend_own(cache, batch, new[0])),
                "sendrecv": self._timed(lambda: self._exchange(new[0], [(self.rank + 1) % self.transport.world_size])),
                "all_to_all": self._timed(lambda: self._exchange(new[0].float(), self._peers())),
            }
            for name, query in QUERIES.items():
                turn = cache.begin([1] * batch, query=query)
                out, took[name] = self._timed_decode(turn, new)
                if number == 0:
                    error = max(error, self._decode_error(turn, out, q, k, v))
                turn.abort()
            if number:
                for name, one in took.items():
                    runs[name].append(one)
        times = {name: Timing.of(seconds) for name, seconds in runs.items()}
        return DecodePoint(context, batch, times, self._largest_error(error))

    def _cache(self) -> KVCache:
        s = self.settings
        return KVCache(
            num_layers=1,
            num_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            dtype=self.dtype,
            kernel=s.kernel,
            device=self.device,
            group=self.group,
        )

    def _tensors(self, batch: int, tokens: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed + seed)
        s = self.settings
        return [
            torch.randn(batch, n, tokens, s.head_dim, generator=generator).to(self.dtype).to(self.device)
            for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)
        ]

    def _store(self, cache: KVCache, lengths: dict[int, int], k: torch.Tensor, v: torch.Tensor) -> None:
        with cache.begin(lengths, algorithm=DEFAULT_ALGORITHM) as turn:
            k, v = (turn.layout.shard(x, self.rank, 2) for x in (k, v))
            turn.store(k, v, layer=0)

    def _timed_turn(
        self, cache: KVCache, lengths: dict[int, int], new: list[torch.Tensor], way: str
    ) -> tuple[Turn, torch.Tensor, float]:
        self._meet()
        start = time.perf_counter()
        turn = cache.begin(lengths, algorithm=way)
        q, k, v = (turn.layout.shard(x, self.rank, 2) for x in new)
        out = turn.prefill(q, k, v, layer=0)
        self._settle()
        assert isinstance(out, torch.Tensor)
        return turn, out, self._largest(time.perf_counter() - start)

    def _timed(self, run: Callable[[], object]) -> float:
        self._meet()
        start = time.perf_counter()
        run()
        self._settle()
        return self._largest(time.perf_counter() - start)

    def _timed_decode(self, turn: Turn, new: list[torch.Tensor]) -> tuple[torch.Tensor, float]:
        own = turn.layout.positions(self.rank)
        q, k, v = (x[own] for x in new)
        self._meet()
        start = time.perf_counter()
        out = turn.decode(q, k, v, layer=0)
        self._settle()
        assert isinstance(out, torch.Tensor)
        return out, self._largest(time.perf_counter() - start)

    def _decode_error(self, turn: Turn, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        worst = 0.0
        for row, sequence in enumerate(turn.layout.positions(self.rank)[:CHECKED].tolist()):
            exact = _exact(q[sequence, :, -1:], k[sequence], v[sequence])
            worst = max(worst, _difference(out[row], exact))
        return worst

    def _attend_own(self, cache: KVCache, batch: int, q: torch.Tensor) -> None:
        """Attend this rank's cached rows, as a decode step does, without messages."""
        s = self.settings
        kernel = choose_kernel(s.kernel, KernelRequest(self.device, self.dtype, s.head_dim, s.head_dim))
        with session_of(self.group).scratch.lend() as scratch:
            arithmetic = TorchArithmetic(kernel, s.head_dim**-0.5, q, scratch)
            for sequence in range(batch):
                for rows in cache.rows(sequence, layer=0):
                    arithmetic.begin(_full(rows[0].shape[2]), (q[sequence : sequence + 1],), rows)

    def _exchange(self, x: torch.Tensor, peers: list[int]) -> None:
        """Send x to some ranks, and receive tensors of its size from as many."""
        world_size = self.transport.world_size
        sources = [(2 * self.rank - peer) % world_size for peer in peers if peer != self.rank]
        posted = self.transport.exchange(
            [Send(peer, x.contiguous()) for peer in peers if peer != self.rank],
            [Receive(source, torch.empty_like(x, memory_format=torch.contiguous_format)) for source in sources],
        )
        for handle in (*posted.receives, *posted.sends):
            handle.wait(self.transport.timeout_s)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.transport.world_size) if peer != self.rank]

    def _error(self, turn: Turn, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
        positions = turn.positions.tolist()
        worst = 0.0
        for row in range(0, len(positions), max(1, len(positions) // CHECKED)):
            end = positions[row] + 1
            exact = _exact(q[0, :, end - 1 : end], k[0, :, :end], v[0, :, :end])
            worst = max(worst, _difference(out[0, :, row : row + 1], exact))
        return worst

    def _meet(self) -> None:
        self._settle()
        self.transport.all_gather_bytes(b"meet", self.transport.timeout_s)

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _largest_error(self, value: float) -> float | None:
        worst = self._largest(value)
        return worst if math.isfinite(worst) else None

    def _largest(self, value: float) -> float:
        everyone = self.transport.all_gather_bytes(value.hex().ljust(32).encode(), self.transport.timeout_s)
        return max(float.fromhex(one.decode().strip()) for one in everyone)


def _full(num_keys: int) -> Piece:
    return Piece(slice(0, 1), slice(0, num_keys), PieceKind.FULL, None, None)


def _difference(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest element; NaN counts as infinite."""
    worst = float((out.double().cpu() - exact).abs().max())
    return math.inf if math.isnan(worst) else worst


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One row q (heads, 1, dim) against k and v (KV heads, keys, dim), in float64 by the definition."""
    group = q.shape[0] // k.shape[0]
    q, k, v = (x.double().cpu() for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 0).mT * q.shape[-1] ** -0.5
    out: torch.Tensor = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    return out

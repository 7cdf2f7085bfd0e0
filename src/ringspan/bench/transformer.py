"""How fast is a whole model on these ranks, compared with one process and with the ideal, and is it right?

Everything is timed in turn, repeat by repeat: one process (rank 0 alone, the others idle), the ideal and the ranks, for
prefill, decode and a training step. A few more runs are taken apart under a watch. Every rank continues
with the tokens that one process chose, so that all logits can be compared.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from ringspan.bench.conclude import Dissected, GatheredModel, conclude_transformer
from ringspan.bench.decoder import VOCABULARY, Attend, Decoder
from ringspan.bench.group import gather_values
from ringspan.bench.launch import Progress
from ringspan.bench.measure import Steps
from ringspan.bench.memory import LiveStorages, measure_peak
from ringspan.bench.model_runs import Answer, Ideal, OneProcess, OnRanks, Outcome, check_model
from ringspan.bench.result import ANSWER, ModelMemory, Phase, TransformerResult
from ringspan.bench.settings import Job
from ringspan.bench.timed import Watch, record_calls, time_call
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.layout import zigzag
from ringspan.runtime.session import session_of

T = TypeVar("T")

DISSECTED = 2  # recorded runs, at most


def measure_transformer(
    job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]
) -> TransformerResult | None:
    """Measure on this rank. Returns the result on rank 0, None on the others."""
    bench = _ModelBench(job, group, device, report)
    memory, one_memory, expected = bench.first_calls()
    for number in range(bench.settings.repeats):
        bench.repeat(number)
    bench.tell("the check")
    assert bench.outcome is not None
    chosen = [logits.argmax(-1).tolist() for logits in bench.outcome.answer]
    found = GatheredModel(dict(bench.seconds), dict(bench.cpu_seconds), dict(bench.dissected), memory, chosen)
    everyone = gather_values(bench.transport, found, bench.settings.timeout_s)
    if bench.alone is None or one_memory is None or expected is None:
        return None
    checked = check_model(bench.alone, bench.given, expected, bench.outcome, [found.chosen for found in everyone])
    return conclude_transformer(job, bench.model, bench.kernel.name, device, everyone, one_memory, checked)


class _ModelBench:
    """One rank's inputs and measurements."""

    def __init__(self, job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> None:
        assert job.transformer is not None
        self.settings = settings = job.transformer
        self.shares_process = job.carrier == "threads"
        self.group = group
        self.device = device
        self.transport = session_of(group).transport
        self.rank = self.transport.rank
        self.model = Decoder(settings, device)
        generator = torch.Generator().manual_seed(settings.seed + 1)
        shape = (settings.batch, settings.seq_len)
        self.tokens = torch.randint(VOCABULARY, shape, generator=generator).to(device)
        request = KernelRequest(device, getattr(torch, settings.dtype), settings.head_dim, settings.head_dim)
        self.kernel = choose_kernel(settings.kernel, request)
        layout = zigzag(settings.seq_len, self.transport.world_size)
        self.ranks = OnRanks(settings, self.model, self.tokens, layout, group)
        self.ideal = Ideal(self.ranks, self.kernel)
        self.alone = OneProcess(settings, self.model, self.tokens) if self.rank == 0 else None
        self.num_dissected = min(DISSECTED, settings.repeats)
        self.tell = Steps(report, 3 + 4 * settings.repeats + 2 * self.num_dissected)
        self.seconds: defaultdict[tuple[Phase, str], list[float]] = defaultdict(list)
        self.cpu_seconds: defaultdict[tuple[Phase, str], list[float]] = defaultdict(list)
        self.dissected: defaultdict[Phase, list[Dissected]] = defaultdict(list)
        self.given: list[torch.Tensor] = []
        self.outcome: Outcome | None = None  # of the last run on ranks

    def first_calls(self) -> tuple[ModelMemory, ModelMemory | None, Outcome | None]:
        """Measure memory before the allocator holds blocks to reuse; give all ranks the tokens of one process."""
        self.tell("the first calls, one process")
        one_memory, expected = (None, None) if self.alone is None else self._call_first(self.alone)
        tokens = [] if expected is None else [logits.argmax(-1).tolist() for logits in expected.answer[:-1]]
        first, *_ = gather_values(self.transport, tokens, self.settings.timeout_s)
        self.given = [torch.tensor(row, device=self.device) for row in first]
        self.tell("the first calls, the ranks")
        memory, _ = self._call_first(self.ranks)
        self.ideal.prefill()
        return memory, one_memory, expected

    def repeat(self, number: int) -> None:
        """Run everything once."""
        of = f"{number + 1} of {self.settings.repeats}"
        alone, ranks, ideal = self.alone, self.ranks, self.ideal
        self.tell(f"prefill and decode, one process, {of}")
        self._time_answer("one", _idle if alone is None else alone.prefill, _idle if alone is None else alone.decode)
        self.tell(f"prefill and decode, the ideal and the ranks, {of}")
        answer = self._in_turn(
            number,
            lambda: self._time("prefill", "ideal", ideal.prefill),
            lambda: self._time_answer("ranks", ranks.prefill, ranks.decode),
        )
        if number < self.num_dissected:
            self.tell(f"where the time of prefill and decode goes, {number + 1} of {self.num_dissected}")
            self._dissect(
                prefill=lambda watch: ranks.prefill(_watching(watch)),
                decode=lambda watch: [ranks.decode(tokens, _watching(watch)) for tokens in self.given],
            )
        self.tell(f"training, one process, {of}")
        self._time("train", "one", _idle if alone is None else alone.train)
        self.tell(f"training, the ideal and the ranks, {of}")
        trained = self._in_turn(
            number,
            lambda: self._time("train", "ideal", ideal.train),
            lambda: self._time("train", "ranks", ranks.train),
        )
        self.outcome = Outcome(answer, trained)
        if number < self.num_dissected:
            self.tell(f"where the time of training goes, {number + 1} of {self.num_dissected}")
            self._dissect(train=lambda watch: ranks.train(_watching(watch)))

    def _in_turn(self, number: int, ideal: Callable[[], object], ranks: Callable[[], T]) -> T:
        """Run both and return the ranks' value. The order alternates, so that drift favours neither."""
        if number % 2:
            value = ranks()
            ideal()
            return value
        ideal()
        return ranks()

    def _time_answer(self, who: str, prefill: Callable[..., Any], decode: Callable[..., Any]) -> Answer:
        first = self._time("prefill", who, prefill)
        others = self._time("decode", who, lambda: [decode(tokens) for tokens in self.given])
        return [first, *others]

    def _time(self, phase: Phase, who: str, call: Callable[[], T]) -> T:
        """Time a call; decode is timed for each token."""
        timed = time_call(self.transport, self.device, self.settings.timeout_s, call)
        self.cpu_seconds[phase, who].append(timed.cpu_s)
        self.seconds[phase, who].append(timed.taken_s / ANSWER if phase == "decode" else timed.taken_s)
        return timed.value

    def _dissect(self, **calls: Callable[[Watch], object]) -> None:
        """Record phases that belong together, one after the other."""
        found = record_calls(self.group, self.device, self.settings.timeout_s, list(calls.values()))
        for phase, dissected in zip(calls, found, strict=True):
            self.dissected[cast("Phase", phase)].append(dissected)

    def _call_first(self, runs: OneProcess | OnRanks) -> tuple[ModelMemory, Outcome]:
        """The memory and the results of the first calls; the answer continues with its own tokens."""
        with LiveStorages() as live:
            answer = [runs.prefill()]
        prefill_peak, kv_cache = live.peak, runs.cache_bytes
        for _ in range(ANSWER):
            answer.append(runs.decode(answer[-1].argmax(-1)))
        kept: list[int] = []
        with LiveStorages() as live:
            trained, peak = measure_peak(self.device, lambda: runs.train(at_turn=lambda: kept.append(live.now)))
        memory = ModelMemory(
            weights=self.model.nbytes,
            kv_cache=kv_cache,
            prefill_peak=prefill_peak,
            activations=kept[0],
            train_peak=live.peak,
            process_peak=None if self.shares_process else peak.peak_bytes,
        )
        return memory, Outcome(answer, trained)


def _idle(*_: object) -> Any:
    """Do nothing: only rank 0 computes; this rank continues to the next barrier."""


def _watching(watch: Watch) -> Callable[[Attend], Attend]:
    """Record attention, forward and backward: its time without messages."""

    def wrap(attend: Attend) -> Attend:
        def timed(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            watch.begin_attention()
            out = attend(layer, q, k, v)
            watch.end_attention(f"layer {layer}")
            if out.grad_fn is not None:
                out.grad_fn.register_prehook(lambda _: watch.begin_attention())
                out.grad_fn.register_hook(lambda *_: watch.end_attention(f"layer {layer} backward"))
            return out

        return timed

    return wrap

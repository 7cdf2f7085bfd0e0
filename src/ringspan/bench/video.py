"""How fast is a denoising step on these ranks, compared with one process and with the ideal, and is it right?

Timed in turn, repeat by repeat: one process (rank 0 alone with the unmodified model, the others idle), the ideal and
the ranks. One more run of each is taken apart under a watch.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ringspan.adapters.diffusers import parallelize
from ringspan.adapters.diffusers.wiring import SDPA
from ringspan.bench.conclude import FoundSteps, Learned, conclude_video
from ringspan.bench.group import gather_values
from ringspan.bench.launch import Progress
from ringspan.bench.measure import Steps
from ringspan.bench.memory import LiveStorages, measure_peak
from ringspan.bench.result import ResultCheck, StepMemory, VideoResult
from ringspan.bench.settings import Job
from ringspan.bench.timed import Watch, record_calls, time_call
from ringspan.bench.video_ideal import MessagelessRun, Pieces
from ringspan.bench.video_models import build_video_model, draw_call, draw_example
from ringspan.runtime.session import session_of

_RELATIVE = {"float64": 1e-9, "float32": 2e-5}
_TIMES = 2  # error allowed in a half type, relative to that of one process in the same type

Call = Callable[[], torch.Tensor]


@torch.no_grad()
def measure_video(job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> VideoResult | None:
    """Measure on this rank. Returns the result on rank 0, None on the others."""
    bench = _VideoBench(job, group, device, report)
    try:
        bench.first_calls()
        for number in range(bench.settings.repeats):
            bench.repeat(number)
        found = bench.take_apart()
    finally:
        bench.handle.restore()
    bench.tell("the check")
    everyone = gather_values(bench.transport, found, bench.settings.timeout_s)
    if bench.unmodified is None:
        return None
    check = bench.check([found.output for found in everyone])
    return conclude_video(job, bench.learned, device, everyone, bench.one_memory, check)


class _VideoBench:
    """One rank's inputs and measurements."""

    one_memory: StepMemory  # on rank 0
    memory: StepMemory

    def __init__(self, job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> None:
        assert job.video is not None
        self.settings = settings = job.video
        self.group, self.device, self.shares_process = group, device, job.carrier == "threads"
        self.transport = session_of(group).transport
        self.tell = Steps(report, 4 + 2 * settings.repeats)
        self.tell("building the model")
        self.model = build_video_model(settings, device)
        self.arguments = draw_call(settings, device)
        self.unmodified = sharing_weights(self.model) if self.transport.rank == 0 else None
        start_s = time.perf_counter()
        example = draw_example(settings, device)
        self.handle = parallelize(self.model, group, algorithm=settings.algorithm, example=example)
        (described,) = self.handle.plans["transformer"]
        num_parameters = sum(x.numel() for x in self.model.parameters())
        self.learned = Learned(num_parameters, described, time.perf_counter() - start_s)
        self.pieces: Pieces = {}
        self.times: dict[str, list[float]] = {"one": [], "ideal": [], "ranks": []}
        self.cpu_times: dict[str, list[float]] = {"one": [], "ideal": [], "ranks": []}

    def first_calls(self) -> None:
        """Measure memory before the allocator holds blocks to reuse."""
        self.tell("the first calls")
        if self.unmodified is not None:
            self.expected, self.one_memory = self._call_first(self.alone)
        self.output, self.memory = self._call_first(self.on_ranks)
        self.without_messages()

    def repeat(self, number: int) -> None:
        """Run everything once. The order of ideal and ranks alternates, so that drift favours neither."""
        of = f"{number + 1} of {self.settings.repeats}"
        self.tell(f"one process, {of}")
        self._time("one", self.alone)
        self.tell(f"the ideal and the ranks, {of}")
        calls = {"ideal": self.without_messages, "ranks": self.on_ranks}
        for who in sorted(calls, reverse=bool(number % 2)):
            self._time(who, calls[who])

    def take_apart(self) -> FoundSteps:
        """Run once more with recording, and return all measurements."""
        self.tell("where the time goes")

        def call(watch: Watch) -> None:
            with attention_watched(self.model, watch):
                self.on_ranks()

        dissected = record_calls(self.group, self.device, self.settings.timeout_s, [call])
        return FoundSteps(self.times, self.cpu_times, dissected, self.memory, self.output.cpu())

    def check(self, outputs: Sequence[torch.Tensor]) -> ResultCheck:
        """Compare every rank's output with one process; in half dtypes with one process in float32."""
        assert self.unmodified is not None
        right, name, tolerance = self.expected, "one process", _RELATIVE.get(self.settings.dtype)
        if tolerance is None:
            wide = {key: x.float() if _is_half(x) else x for key, x in self.arguments.items()}
            right, name = copy.deepcopy(self.unmodified).float()(**wide)[0], "one process in float32"
            tolerance = _TIMES * error_of(self.expected, right)
        worst = max(error_of(output, right) for output in outputs)
        return ResultCheck(worst if math.isfinite(worst) else None, tolerance, name)

    def alone(self) -> torch.Tensor:
        """Run the unmodified model in one process, on rank 0 only."""
        output: torch.Tensor = self.arguments["hidden_states"]
        return output if self.unmodified is None else self.unmodified(**self.arguments)[0]

    def on_ranks(self) -> torch.Tensor:
        """Run the parallelized model as a user calls it."""
        output: torch.Tensor = self.model(**self.arguments)[0]
        return output

    def without_messages(self) -> torch.Tensor:
        """Run the ideal."""
        adapter = self.handle.adapters["transformer"]
        run = MessagelessRun(adapter.find_plan(self.arguments), adapter.options, self.pieces)
        with adapter.wiring.running(run):
            return self.on_ranks()

    def _time(self, who: str, call: Call) -> None:
        timed = time_call(self.transport, self.device, self.settings.timeout_s, call)
        self.times[who].append(timed.taken_s)
        self.cpu_times[who].append(timed.cpu_s)

    def _call_first(self, call: Call) -> tuple[torch.Tensor, StepMemory]:
        with LiveStorages() as live:
            output, peak = measure_peak(self.device, call)
        weights = sum(x.nbytes for x in self.model.parameters())
        return output, StepMemory(weights, live.peak, None if self.shares_process else peak.peak_bytes)


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of the model that shares its parameters."""
    return copy.deepcopy(model, {id(x): x for x in model.parameters()})


@contextmanager
def attention_watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """Record every call of attention in the model's forward."""
    stack = ExitStack()
    hooks = [
        model.register_forward_pre_hook(lambda *_: stack.enter_context(_AttentionMode(watch)) and None),
        model.register_forward_hook(lambda *_: stack.close(), prepend=True, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _AttentionMode(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not SDPA:
            return func(*args, **(kwargs or {}))
        self._watch.begin_attention()
        out = func(*args, **(kwargs or {}))
        self._watch.end_attention("attention")
        return out


def error_of(x: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error in units of the largest number; NaN if there is one."""
    x, expected = x.double().cpu(), expected.double().cpu()
    return float((x - expected).abs().max() / expected.abs().max())


def _is_half(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)

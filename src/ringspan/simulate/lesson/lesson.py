"""How is the lesson of `ringspan simulate` computed and checked?

This module neither prints nor parses. Its values hold only numbers, strings and tuples, so they convert to JSON
directly and every report can be made from them.

`list_choices` asks the paper's rules for pass-KV or pass-Q from a warm cache to an empty one. Its sizes are those of a
real prefill, because the small simulation has too little work for the rules.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ringspan.algorithms import ALGORITHMS
from ringspan.algorithms.choose import (
    Machine,
    Workload,
    all_to_all_miss_rate,
    choose_algorithm_1,
    choose_algorithm_5,
    crossing_algorithm_1,
    crossing_algorithm_5,
    new_tokens_to_hide_kv,
)
from ringspan.simulate.lesson.decode import Decode, DecodeRun, DecodeStep, run_decode
from ringspan.simulate.lesson.dense import Check
from ringspan.simulate.lesson.prefill import (
    LayoutWork,
    LessonShard,
    OneQuery,
    Prefill,
    Reference,
    Run,
    Tokens,
    Traffic,
    run_prefill,
)
from ringspan.simulate.lesson.settings import (
    LAYOUTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_SEQ_LEN,
    MAX_WORLD_SIZE,
    LayoutChoice,
    LessonSettings,
    check_heads,
)

NUM_KEYS = 128_000  # new and cached tokens together
FLOPS_PER_BYTE = 18_000.0  # compute over link bandwidth of a rank
BYTES_PER_ELEMENT = 2
MISS_RATES_PERMILLE = (10, 25, 50, 100, 125, 150, 200, 300, 500, 750, 1000)


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """The choices of algorithms 1 and 5 at one miss rate; algorithm 5 counts the return of pass-Q's outputs."""

    miss_rate: float
    new_tokens: int
    cached_tokens: int
    miss_rate_limit: float  # equation 5: below it pass-Q wins
    algorithm_1: str
    reason_1: str
    algorithm_5: str
    reason_5: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices for all miss rates, and where they change."""

    num_keys: int
    world_size: int
    num_heads: int
    num_kv_heads: int
    bytes_per_element: int
    flops_per_byte: float
    new_tokens_to_hide_kv: float
    crossing_miss_rate_1: float  # from here on algorithm 1 chooses pass-KV; above 1: never
    crossing_miss_rate_5: float
    rows: tuple[ChoiceRow, ...]


def list_choices(world_size: int, num_heads: int, num_kv_heads: int) -> Choices | None:
    """Compute the table; None for a single rank, which has no choice."""
    if world_size == 1:
        return None
    machine = Machine(world_size, compute_flops_per_s=FLOPS_PER_BYTE, link_bytes_per_s=1.0)  # only the ratio counts

    def workload(permille: int) -> Workload:
        new_tokens = NUM_KEYS * permille // 1000
        return Workload(new_tokens, NUM_KEYS - new_tokens, num_heads, num_kv_heads, BYTES_PER_ELEMENT)

    any_rate = workload(MISS_RATES_PERMILLE[0])
    return Choices(
        num_keys=NUM_KEYS,
        world_size=world_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        bytes_per_element=BYTES_PER_ELEMENT,
        flops_per_byte=FLOPS_PER_BYTE,
        new_tokens_to_hide_kv=new_tokens_to_hide_kv(any_rate, machine),
        crossing_miss_rate_1=crossing_algorithm_1(any_rate, machine),
        crossing_miss_rate_5=crossing_algorithm_5(any_rate, machine),
        rows=tuple(_row(workload(permille), machine) for permille in MISS_RATES_PERMILLE),
    )


def _row(workload: Workload, machine: Machine) -> ChoiceRow:
    return ChoiceRow(
        workload.miss_rate,
        workload.new_tokens,
        workload.cached_tokens,
        all_to_all_miss_rate(workload, machine),
        *choose_algorithm_1(workload, machine),
        *choose_algorithm_5(workload, machine),
    )


__all__ = [
    "LAYOUTS",
    "MAX_HEADS",
    "MAX_HEAD_DIM",
    "MAX_SEQ_LEN",
    "MAX_WORLD_SIZE",
    "Check",
    "ChoiceRow",
    "Choices",
    "Decode",
    "DecodeRun",
    "DecodeStep",
    "LayoutChoice",
    "LayoutWork",
    "Lesson",
    "LessonSettings",
    "LessonShard",
    "OneQuery",
    "Parameters",
    "Prefill",
    "Reference",
    "Run",
    "Traffic",
    "check_heads",
    "run_lesson",
]


@dataclass(frozen=True, slots=True)
class Parameters:
    world_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    mask: str
    layout: str
    algorithms: tuple[str, ...]
    direction: str | None  # None if no algorithm has a direction
    mesh: tuple[int, int] | None
    seed: int
    reproducible: bool


@dataclass(frozen=True, slots=True)
class Lesson:
    """All results, those that differ from the dense reference, and those whose bits differ from one device."""

    parameters: Parameters
    prefill: Prefill
    decode: Decode
    choices: Choices | None
    num_checks: int
    failures: tuple[str, ...]
    other_bits: tuple[str, ...]
    is_verified: bool


def run_lesson(settings: LessonSettings, progress: Callable[[str], None]) -> Lesson:
    """Compute and check all parts; `progress` is called with the name of each part before it starts."""
    rng = np.random.default_rng(settings.seed)
    tokens = Tokens.random(settings, settings.seq_len, rng)
    prefill = run_prefill(settings, tokens, progress)
    progress("decode")
    decode = run_decode(settings, tokens, rng)
    checks = dict(_checks(prefill, decode))
    failures = tuple(name for name, check in checks.items() if not check.is_verified)
    other_bits = tuple(run.algorithm for run in prefill.runs if run.bits is not None and not run.bits.is_same)
    return Lesson(
        parameters=_parameters(settings),
        prefill=prefill,
        decode=decode,
        choices=list_choices(settings.world_size, settings.num_heads, settings.num_kv_heads),
        num_checks=len(checks),
        failures=failures,
        other_bits=other_bits,
        is_verified=not failures and not other_bits,
    )


def _checks(prefill: Prefill, decode: Decode) -> Iterator[tuple[str, Check]]:
    for run in prefill.runs:
        yield run.algorithm, run.check
    for name, decode_run in (("one sequence", decode.one_sequence), ("batch", decode.batch)):
        for step in decode_run.steps if decode_run else ():
            yield f"decode step {step.step} of the {name}", step.check


def _parameters(settings: LessonSettings) -> Parameters:
    return Parameters(
        world_size=settings.world_size,
        seq_len=settings.seq_len,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        dtype="float32",
        mask=repr(settings.mask),
        layout=str(settings.layout),
        algorithms=settings.algorithms,
        direction=_direction(settings),
        mesh=settings.mesh,
        seed=settings.seed,
        reproducible=settings.reproducible,
    )


def _direction(settings: LessonSettings) -> str | None:
    has_one = any("direction" in ALGORITHMS[name].options for name in settings.algorithms)
    return settings.direction or "forward" if has_one else None

"""How is the lesson of `ringspan simulate` computed and checked?

This module neither prints nor parses. Its values hold only numbers, strings and tuples, so they convert to JSON
directly and every report can be made from them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ringspan.algorithms import ALGORITHMS
from ringspan.simulate.lesson.choices import ChoiceRow, Choices, list_choices
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

"""Is this attention right? Every case of the table is run on ranks and compared with the oracle."""

import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ringspan.arguments import CALLABLE, FLAG, ITERABLE, WHOLE, check_arguments, optional
from ringspan.errors import ShapeError
from ringspan.verify.budget import budget
from ringspan.verify.cases import VerifyCase, make_cases
from ringspan.verify.diagnose import Failure, diagnose
from ringspan.verify.oracle import answer
from ringspan.verify.outcome import Computed, find_deviations
from ringspan.verify.ranks import Broken, Hung, Outcome, Refused, run_processes, run_threads
from ringspan.verify.report import CaseVerdict, Status, VerifyReport
from ringspan.verify.targets.base import RanksAs, Target
from ringspan.verify.targets.find import find_target
from ringspan.verify.transformer_models import PREFIX, verify_model

WORLD_SIZES = (1, 2, 3, 4, 5)
_MOST_LOST_S = 100.0  # less than two time limits
Progressing = Callable[[int, int, VerifyCase], None]


def verify(
    target: Any,
    *,
    world_sizes: Iterable[int] = WORLD_SIZES,
    features: Collection[str] | None = None,
    layouts: Collection[str] | None = None,
    ranks: RanksAs | None = None,
    thorough: bool = False,
    seed: int = 0,
    progress: Progressing | None = None,
) -> VerifyReport:
    """Run a target over the table of cases.

    Args:
        target: A function `f(q, k, v, ...)`, a `Target`, the name of a library, `"module:name"`, or
            `"transformers:MODEL"` for a class, a model type or a folder.
        world_sizes: Numbers of ranks.
        features: For a function: what it can do; by default what its parameters can say.
        layouts: For a function: how it is sharded; "contiguous" by default.
        ranks: For a function: "threads" or "processes".
        thorough: Add every layout, mask, grouping of heads and type.
        seed: Of the inputs.
        progress: Called before each case with its number, how many there are, and the case.

    Returns:
        A report; nothing is raised for a wrong result.
    """
    check_arguments(
        world_sizes=(ITERABLE, world_sizes),
        features=(optional(ITERABLE), features),
        layouts=(optional(ITERABLE), layouts),
        thorough=(FLAG, thorough),
        seed=(WHOLE, seed),
        progress=(optional(CALLABLE), progress),
    )
    sizes = tuple(world_sizes)
    if not sizes or any(not isinstance(size, int) or not 1 <= size <= 8 for size in sizes):
        raise ShapeError("numbers of ranks are from 1 to 8", argument="world_sizes", value=sizes)
    if isinstance(target, str) and target.startswith(PREFIX):
        return verify_model(target, sizes, progress or (lambda *_: None))
    found = find_target(target, features=features, layouts=layouts, ranks=ranks)
    cases = cases_for(found, sizes, thorough=thorough, seed=seed)
    start = time.monotonic()
    verdicts, failures = [], []
    make_again = functools.partial(find_target, target, features=features, layouts=layouts, ranks=ranks)
    for case, outcome in _outcomes(found, make_again, cases, progress or (lambda *_: None)):
        missing = tuple(sorted(case.features - set(found.features)))
        verdict, failure = judge(case, outcome, missing)
        verdicts.append(verdict)
        failures += [] if failure is None else [failure]
    diagnosis = diagnose(failures) if failures else None
    return VerifyReport(found.name, tuple(verdicts), diagnosis, time.monotonic() - start)


def cases_for(target: Target, world_sizes: Iterable[int], *, thorough: bool, seed: int) -> list[VerifyCase]:
    """The table for a target; one that declares no gradients is asked for none."""
    cases = make_cases(world_sizes, tuple(target.layouts), thorough=thorough, seed=seed)
    return cases if "backward" in target.features else [replace(case, has_backward=False) for case in cases]


def check(target: Any, **options: Any) -> VerifyReport:
    """Assert that an attention is right: `verify` with the same arguments, and AssertionError if it is not."""
    __tracebackhide__ = True  # of pytest
    report = verify(target, **options)
    if not report.has_passed:
        raise AssertionError(report.to_text())
    return report


def _outcomes(
    target: Target, make_again: Callable[[], Target], cases: Sequence[VerifyCase], progress: Progressing
) -> Iterator[tuple[VerifyCase, Outcome | None]]:
    """Each case with what came of it, None if it cannot be asked for.

    When cases that ended badly have taken `_MOST_LOST_S`, no further case is run.
    """
    asked = sorted(filter(target.can_ask, cases), key=lambda case: case.world_size)
    yield from ((case, None) for case in cases if not target.can_ask(case))
    outcomes = _run_on_threads(target, asked) if target.ranks == "threads" else _run_on_processes(make_again, asked)
    lost_s = 0.0
    for done, case in enumerate(asked, len(cases) - len(asked)):
        if lost_s > _MOST_LOST_S:
            yield case, Hung(f"not run, because {lost_s:.0f} s were lost to cases without a result")
            continue
        progress(done, len(cases), case)
        start = time.monotonic()
        outcome = next(outcomes)
        lost_s += time.monotonic() - start if isinstance(outcome, Hung) else 0.0
        yield case, outcome


def _run_on_threads(target: Target, cases: Sequence[VerifyCase]) -> Iterator[Outcome]:
    return (run_threads(target, case) for case in cases)


def _run_on_processes(make_again: Callable[[], Target], cases: Sequence[VerifyCase]) -> Iterator[Outcome]:
    for _, same_size in itertools.groupby(cases, key=lambda case: case.world_size):
        for _, outcome in run_processes(make_again, list(same_size)):
            yield outcome


def judge(
    case: VerifyCase, outcome: Outcome | None, missing: tuple[str, ...] = ()
) -> tuple[CaseVerdict, Failure | None]:
    """Compare an outcome with the oracle's answer."""
    if outcome is None:
        return CaseVerdict(case, "not asked", missing), None
    if isinstance(outcome, Hung):
        return CaseVerdict(case, "hung", missing, outcome.message), None
    if isinstance(outcome, Broken):
        return CaseVerdict(case, "error", missing, outcome.message), None
    if isinstance(outcome, Refused):
        status: Status = "refused" if missing else "error"
        return CaseVerdict(case, status, missing, f"{outcome.kind}: {outcome.message}"), None
    assert isinstance(outcome, Computed)
    question = case.question()
    right = answer(question)
    deviations = find_deviations(case, outcome, right, budget(question, right, case.dtype, case.world_size))
    if not deviations:
        return CaseVerdict(case, "right", missing), None
    verdict = CaseVerdict(case, "wrong", missing, "; ".join(map(str, deviations)))
    return verdict, Failure(case, outcome, tuple(deviations))

"""What kind of mistake is it? Wrong results are compared with what every known mistake would give.

A guess explains a result if it matches in every unit (batch row, rank, head) in which the result is wrong, so a mistake
on one rank or in one head is found too. The mistake that explains most failing cases is named; of equals, the one
whose guess matches in the most units, and then the first in the list, which has the more specific ones first.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ringspan.verify.budget import budget
from ringspan.verify.cases import VerifyCase
from ringspan.verify.guesses import (
    Guess,
    Setting,
    guess_gradients,
    guess_masks,
    guess_merges,
    guess_rearranged,
    guess_schedules,
)
from ringspan.verify.outcome import Computed, Deviation
from ringspan.verify.patterns import Numbers

UNKNOWN = "unknown mistake"
_MOST_CASES = 8
_SMALL = 0.05  # of the right values, for what rounding could explain
_SLACK, _RELATIVE = 8.0, 2e-3  # a guess may miss by so many budgets, or by this part of what it changes


class Failure(NamedTuple):
    """A case in which a result exceeded its budget."""

    case: VerifyCase
    computed: Computed
    deviations: tuple[Deviation, ...]


class Diagnosis(NamedTuple):
    """The mistake that fits best: in how many of the failing cases that were looked at, and where it begins."""

    mistake: str
    detail: str
    num_explained: int
    num_cases: int
    where: str

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.mistake}{detail}, fits {self.num_explained} of {self.num_cases} failing cases; {self.where}"


class _Match(NamedTuple):
    mistake: str
    detail: str
    score: float


def diagnose(failures: Sequence[Failure]) -> Diagnosis:
    """Name the mistake behind the failing cases of one target."""
    chosen = _most_telling(failures)
    matches = [_matches(failure) for failure in chosen]
    totals: dict[str, float] = {}
    for found in matches:
        best: dict[str, float] = {}
        for match in found:
            best[match.mistake] = max(best.get(match.mistake, 0.0), match.score)
        for mistake, score in best.items():
            totals[mistake] = totals.get(mistake, 0.0) + score
    where = f"begins in {chosen[0].case}: {chosen[0].deviations[0]}"
    if not totals:
        mistake, detail = _by_shape(chosen, failures)
        return Diagnosis(mistake, detail, 0, len(chosen), where)
    mistake = max(totals, key=lambda name: totals[name])
    fitting = [match for found in matches for match in found if match.mistake == mistake]
    num_explained = sum(any(match.mistake == mistake for match in found) for found in matches)
    detail = max(fitting, key=lambda match: match.score).detail
    if 4 * num_explained < len(chosen):
        return Diagnosis(UNKNOWN, f"{mistake} explains a few cases", num_explained, len(chosen), where)
    return Diagnosis(mistake, detail, num_explained, len(chosen), where)


def _most_telling(failures: Sequence[Failure]) -> list[Failure]:
    """The failures with the earliest wrong result, in the most precise types; every world size in its turn."""
    order = {"out": 0, "lse": 1}

    def rank(failure: Failure) -> tuple[int, int]:
        is_half = failure.case.dtype in ("bfloat16", "float16")
        return min(order.get(deviation.name, 2) for deviation in failure.deviations), is_half

    best = min(map(rank, failures))
    turns: dict[int, int] = {}
    places = []
    for failure in failures:
        if rank(failure) == best:
            size = failure.case.world_size
            places.append((turns.setdefault(size, 0), failure))
            turns[size] += 1
    return [failure for _, failure in sorted(places, key=lambda place: place[0])][:_MOST_CASES]


@functools.lru_cache(maxsize=32)
def _setting(case: VerifyCase) -> Setting:
    return Setting.of(case)


@functools.lru_cache(maxsize=64)
def _guesses(case: VerifyCase, is_forward: bool) -> tuple[Guess, ...]:
    setting = _setting(case)
    if not is_forward:
        return tuple(guess_gradients(setting))
    return (*guess_schedules(setting), *guess_masks(setting), *guess_merges(setting))


def _matches(failure: Failure) -> list[_Match]:
    """Mistakes that explain all of what is wrong first: the output, else the log-sum-exp, else the gradients."""
    wrong = {deviation.name: deviation for deviation in failure.deviations}
    if "out" in wrong or "lse" in wrong:
        first = "out" if "out" in wrong else "lse"
        found = _explaining(failure, first, [guess for guess in _guesses(failure.case, True) if guess.result == first])
        return found if first == "out" else _leaving_out_right(failure, found)
    by_mistake: dict[str, _Match] = {}
    for name in wrong:
        guesses = [guess for guess in _guesses(failure.case, False) if guess.result == name]
        best: dict[str, _Match] = {}
        for match in _explaining(failure, name, guesses):
            if match.mistake not in best or best[match.mistake].score < match.score:
                best[match.mistake] = match
        for mistake, match in best.items():
            known = by_mistake.get(mistake, match._replace(score=0.0))
            by_mistake[mistake] = known._replace(score=known.score + match.score / len(wrong))
    return list(by_mistake.values())


def _leaving_out_right(failure: Failure, found: list[_Match]) -> list[_Match]:
    """Mistakes that explain a wrong log-sum-exp without making the output wrong as well."""
    setting = _setting(failure.case)
    limit = 10 * budget(setting.question, setting.right, failure.case.dtype, failure.case.world_size).out
    spoils_out = {
        (guess.mistake, guess.detail)
        for guess in _guesses(failure.case, True)
        if guess.result == "out" and (_distance(guess.values, setting.right.out) > limit).any()
    }
    return [match for match in found if (match.mistake, match.detail) not in spoils_out]


def _explaining(failure: Failure, name: str, guesses: Sequence[Guess]) -> list[_Match]:
    setting = _setting(failure.case)
    computed, right = getattr(failure.computed, name), getattr(setting.right, name)
    if computed.shape != right.shape:
        return []
    limits = budget(setting.question, setting.right, failure.case.dtype, failure.case.world_size)
    limit = getattr(limits, name)
    owners = setting.q_rank if name in ("out", "lse", "dq") else setting.kv_rank
    units = _Units(computed, right, limit, owners)
    found = []
    for guess in (*guesses, *guess_rearranged(setting, name, computed)):
        score = units.score(guess.values)
        if score > 0:
            found.append(_Match(guess.mistake, guess.detail, score))
    return found


class _Units:
    """A result by (batch row, rank, head): which are wrong, and whether a guess matches them."""

    def __init__(self, computed: Numbers, right: Numbers, limit: Numbers, owners: Numbers) -> None:
        self._computed, self._right, self._limit, self._owners = computed, right, limit, owners
        distance = _distance(computed, right)
        self._where = distance > limit
        self._before = distance[self._where]
        self._is_wrong = self._by_unit(self._where, any_of=True)

    def _by_unit(self, flags: Numbers, *, any_of: bool) -> Numbers:
        if flags.ndim == 1:  # one number per head
            return flags[None, None]
        together = np.any if any_of else np.all
        rows = together(flags.reshape(*flags.shape[:3], -1), axis=-1)
        parts = [rows[..., self._owners == rank] for rank in range(int(self._owners.max()) + 1)]
        return np.stack([together(part, axis=-1) for part in parts], 1)

    def score(self, values: Numbers) -> float:
        """0 if the guess leaves a wrong unit unexplained; else up to 1, less for right units that it would change."""
        if not self._is_closer(values):
            return 0.0
        with np.errstate(invalid="ignore", over="ignore"):
            tolerance = _SLACK * self._limit * (1 + abs(np.nan_to_num(values, posinf=0, neginf=0)))
            tolerance = tolerance + _RELATIVE * np.nan_to_num(_distance(values, self._right), posinf=0.0)
        misses = _distance(self._computed, values)
        fits = self._by_unit(misses <= tolerance, any_of=False)
        if (self._is_wrong & ~fits).any():
            return 0.0
        return 1.0 - 0.5 * float((~self._is_wrong & ~fits).mean())

    def _is_closer(self, values: Numbers) -> bool:
        """Whether the guess is much nearer to the wrong result than the right answer is."""
        after = _distance(self._computed[self._where], values[self._where])
        if not np.isfinite(self._before).all():
            return bool(np.isfinite(after).all())
        with np.errstate(over="ignore"):
            return bool(np.linalg.norm(after) <= 0.15 * np.linalg.norm(self._before))


def _distance(x: Numbers, y: Numbers) -> Numbers:
    """|x - y|; 0 for equal infinities and for NaN in both, infinity for NaN in one."""
    with np.errstate(invalid="ignore"):
        distance = abs(x - y)
    is_same = (x == y) | (np.isnan(x) & np.isnan(y))
    return np.where(is_same, 0.0, np.where(np.isnan(distance), np.inf, distance))


def _by_shape(failures: Sequence[Failure], everything: Sequence[Failure]) -> tuple[str, str]:
    """Describe an error that no guess explains, by the wrong rows and the size of the differences."""
    names = {failure.deviations[0].name for failure in failures}
    firsts = [(failure, failure.deviations[0]) for failure in failures]
    if any(
        getattr(failure.computed, first.name).shape != _right(failure, first.name).shape for failure, first in firsts
    ):
        return "wrong shape", f"of {', '.join(sorted(names))}"
    if all(_has_nan(failure, first.name) for failure, first in firsts):
        return ("NaN" if names <= {"out", "lse"} else "NaN in gradients"), ""
    if all(_is_small(failure, first.name) for failure, first in firsts):
        return "precision lost", "errors are small but beyond the budget of the type"
    if names <= {"out"} and all(_is_zero(failure) for failure in failures):
        return "output left at zero", "in some rows"
    if names <= {"out"}:
        return _by_rank([failure for failure in everything if failure.deviations[0].name == "out"])
    return UNKNOWN, ""


def _right(failure: Failure, name: str) -> Numbers:
    right: Numbers = getattr(_setting(failure.case).right, name)
    return right


def _has_nan(failure: Failure, name: str) -> bool:
    """NaN, or an infinity where none belongs."""
    return bool((~np.isfinite(getattr(failure.computed, name)) & np.isfinite(_right(failure, name))).any())


def _is_zero(failure: Failure) -> bool:
    wrong = failure.computed.out[failure.deviations[0].is_wrong]
    return wrong.size > 0 and not wrong.any()


def _is_small(failure: Failure, name: str) -> bool:
    computed, right = getattr(failure.computed, name), _right(failure, name)
    finite = np.isfinite(right)
    error = _distance(computed, right)[finite]
    return bool(error.max(initial=0.0) <= _SMALL * abs(right[finite]).max(initial=0.0))


def _by_rank(failures: Sequence[Failure]) -> tuple[str, str]:
    """Rows of one rank only, or exactly the rows that see the keys of one rank."""
    for rank in range(max(failure.case.world_size for failure in failures)):
        if all(_are_rows_of(failure, rank) for failure in failures):
            return "wrong queries of one rank", f"only rows of rank {rank} are wrong"
    for rank in range(max(failure.case.world_size for failure in failures)):
        fits = [_see_keys_of(failure, rank) for failure in failures]
        if all(is_exact for is_exact, _ in fits) and any(is_telling for _, is_telling in fits):
            return "wrong keys of one rank", f"exactly the rows that see keys of rank {rank} are wrong"
    return UNKNOWN, ""


def _are_rows_of(failure: Failure, rank: int) -> bool:
    return failure.deviations[0].ranks == (rank,)


def _see_keys_of(failure: Failure, rank: int) -> tuple[bool, bool]:
    """Whether exactly the rows that see keys of a rank are wrong, and whether there are others.

    A row that sees a single key does not depend on what is in it.
    """
    setting = _setting(failure.case)
    counts = np.broadcast_to(setting.question.counts, (failure.case.batch, *setting.question.counts.shape[-2:]))
    sees = counts[..., setting.kv_rank == rank].any(-1)
    is_wrong = failure.deviations[0].is_wrong.any(1)
    must_be = sees & (counts.sum(-1) > 1)
    return bool((is_wrong <= sees).all() and (must_be <= is_wrong).all()), not sees.all()

"""The whole answer: every way to split the work, ranked, with what else one would ask about the best.

Ways that fit into memory come before those that do not; of the former the faster first, of the latter those that lack
least. Ways whose times are closer to the fastest than their common uncertainty are tied with it. Lengths are found by
halving: the longest that fits, and those from which on another way is better.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringspan.algorithms.choose import DEFAULT_ALGORITHM, KV_RING, Q_RING, RINGS
from ringspan.planner.accuracy import BETWEEN, is_tie, range_of
from ringspan.planner.plan.candidates import MANY_RANKS, Illegal, list_setups, usual_tps
from ringspan.planner.plan.explain import ExplainedTerm, explain, late_s, list_caveats
from ringspan.planner.plan.memory import Memory, count_memory
from ringspan.planner.plan.passes import shown_window, timeline_of
from ringspan.planner.plan.picture import draw_plan
from ringspan.planner.plan.predict import Prediction, WholeVideo, predict, whole_video
from ringspan.planner.plan.request import MOST_TOKENS, Request, Setup, legal_tps
from ringspan.planner.plan.settings import Recipe, list_recipes
from ringspan.planner.timeline import is_quick


class Option(NamedTuple):
    """One way, with its time, the range of the middle 80 %, and its memory."""

    prediction: Prediction
    low_s: float
    high_s: float
    memory: Memory
    fits: bool

    @property
    def setup(self) -> Setup:
        """The setup: the way in which the work is split."""
        return self.prediction.setup


class BreakEven(NamedTuple):
    """The number of new tokens, for a fixed number of keys, below which pass-Q is faster than pass-KV.

    None where one of them, named by `always`, is as fast or faster throughout.
    """

    num_keys: int
    new_tokens: int | None
    always: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer to a request: every option, its memory and its time."""

    request: Request
    options: tuple[Option, ...]
    tied: tuple[Option, ...]  # that fit, and are as fast as the best for all that is known
    illegal: tuple[Illegal, ...]
    longest_tokens: int | None  # that fit, with the best way
    break_even_tokens: int | None  # from which the best way is clearly faster than one device or group
    crossing: BreakEven | None
    recipes: tuple[Recipe, ...]
    explanation: tuple[ExplainedTerm, ...]
    caveats: tuple[str, ...]
    video: WholeVideo | None  # by the best way, where steps and size are known

    def _repr_html_(self) -> str:
        return draw_plan(self)

    @property
    def best(self) -> Option:
        """The first of the options."""
        return self.options[0]

    @property
    def fits_barely(self) -> bool:
        """Whether the free memory is smaller than the error of the estimate."""
        return self.best.memory.fits_barely(self.request.cluster.device.memory_bytes)


def build_plan(request: Request) -> Plan:
    """Answer a request."""
    options, illegal = rank_options(request)
    best = options[0]
    return Plan(
        request=request,
        options=tuple(options),
        tied=tuple(_tied(request, options)),
        illegal=tuple(illegal),
        longest_tokens=longest(request, best.setup),
        break_even_tokens=break_even(request, best.setup),
        crossing=crossing(request, best.setup),
        recipes=tuple(list_recipes(request, [option.prediction for option in options if option.fits])),
        explanation=tuple(explain(request, best.prediction, best.memory)),
        caveats=tuple(list_caveats(request, best.setup)),
        video=whole_video(request, best.prediction.total_s),
    )


def rank_options(request: Request) -> tuple[list[Option], list[Illegal]]:
    """Every option, the best first, and the impossible setups with their reasons."""
    setups, illegal = list_setups(request, usual_tps(request))
    options = _ranked(request, setups)
    if not options[0].fits and request.tp is None:
        # Nothing fits: tensor parallelism across nodes is slow, but it divides the weights.
        wider = [tp for tp in legal_tps(request.model, request.cluster) if tp > request.cluster.per_node]
        more, _ = list_setups(request, wider)
        options = sorted([*options, *_ranked(request, more)], key=_order)
    return options, illegal


def _ranked(request: Request, setups: list[Setup]) -> list[Option]:
    device, options = request.cluster.device, []
    for setup in setups:
        memory, prediction = count_memory(request, setup), predict(request, setup)
        low, high = range_of(prediction.parts, device)
        total_s = prediction.total_s
        high_s = total_s * high + late_s(request, setup)
        options.append(Option(prediction, total_s * low, high_s, memory, memory.fits(device.memory_bytes)))
    return sorted(options, key=_order)


def _order(option: Option) -> tuple[bool, float]:
    """Order options: those that fit by time, then the others by memory; ties go to the simpler layout."""
    return not option.fits, option.prediction.total_s if option.fits else option.memory.total


def _tied(request: Request, options: list[Option]) -> list[Option]:
    best, device = options[0], request.cluster.device
    if not best.fits:
        return []
    parts = best.prediction.parts
    return [option for option in options[1:] if option.fits and is_tie(parts, option.prediction.parts, device)]


def longest(request: Request, setup: Setup) -> int | None:
    """The most tokens that fit, cached ones as asked; None if not even one does."""

    def fits(tokens: int) -> bool:
        memory = count_memory(replace(request, tokens=tokens), setup)
        return memory.fits(request.cluster.device.memory_bytes)

    return last_that(fits, MOST_TOKENS - request.cached_tokens)


def last_that(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number for which a condition holds, if it holds up to some number and not above."""
    if not holds(1):
        return None
    low, high = 1, most
    if holds(high):
        return high
    while high - low > max(1, low // 2**20):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def break_even(request: Request, setup: Setup) -> int | None:
    """The length from which the best way is faster than the same group alone by more than their uncertainty."""
    if not 1 < setup.cp <= MANY_RANKS or request.phase == "decode" or not is_quick(setup.algorithm, setup.cp):
        return None
    alone = Setup(DEFAULT_ALGORITHM, "contiguous", setup.tp, 1, setup.copies)

    def is_unclear(tokens: int) -> bool:
        asked = replace(request, tokens=tokens, cached_tokens=0, chunk_tokens=None)
        ours, theirs = predict(asked, setup), predict(asked, alone)
        is_slower = ours.total_s >= theirs.total_s
        return is_slower or is_tie(ours.parts, theirs.parts, request.cluster.device)

    lengths = [1 << k for k in range(24, -1, -1)]
    last = next((length for length in lengths if is_unclear(length)), None)
    if last is None:
        return 1
    low, high = last, 2 * last
    while high - low > low // 16 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_unclear(middle) else (low, middle)
    return high


def crossing(request: Request, setup: Setup) -> BreakEven | None:
    """For the same number of keys, how many may be new for pass-Q to win."""
    if request.phase != "prefill" or not 1 < setup.cp <= MANY_RANKS:
        return None
    num_keys = request.tokens + request.cached_tokens
    window = shown_window(request.model)
    kv, q = (setup._replace(algorithm=name, layout="zigzag", inner=1) for name in RINGS)

    def q_wins(new: int) -> bool:
        asked = replace(request, tokens=new, cached_tokens=num_keys - new)
        q_s, kv_s = (timeline_of(asked, way, window=window).makespan_s for way in (q, kv))
        return q_s < (1 - BETWEEN) * kv_s

    least = min(setup.cp, num_keys)
    if q_wins(num_keys):
        return BreakEven(num_keys, None, Q_RING)
    if not q_wins(least):
        return BreakEven(num_keys, None, KV_RING)
    low, high = least, num_keys
    while high - low > low // 32 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if q_wins(middle) else (low, middle)
    return BreakEven(num_keys, high, "")

"""The whole answer: every way to split the work, ranked, with what else one would ask about the best.

Ways that fit into memory come before those that do not; of the former the faster first, of the latter those that lack
least.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringspan.algorithms.choose import DEFAULT_ALGORITHM, KV_RING, Q_RING, RINGS
from ringspan.planner.catalog.files import read_data
from ringspan.planner.plan.candidates import MANY_RANKS, Illegal, list_setups, usual_tps
from ringspan.planner.plan.caveats import list_caveats
from ringspan.planner.plan.explain import Line, explain
from ringspan.planner.plan.memory import Memory, count_memory
from ringspan.planner.plan.picture import draw_plan
from ringspan.planner.plan.predict import Prediction, predict, shown_window, timeline_of
from ringspan.planner.plan.request import MOST_TOKENS, Request, Setup, legal_tps
from ringspan.planner.plan.settings import Recipe, list_recipes
from ringspan.planner.timeline import is_quick

LEAST_GAIN = 0.01  # where both are hidden their times are equal, and neither wins


class Option(NamedTuple):
    """One way, with its time and its memory."""

    prediction: Prediction
    memory: Memory
    fits: bool

    @property
    def setup(self) -> Setup:
        """How the work is split."""
        return self.prediction.setup


class Crossing(NamedTuple):
    """Where pass-KV and pass-Q take the same time, the number of keys held: below `new_tokens`, pass-Q is faster.

    None where one of them, named by `always`, is as fast or faster throughout.
    """

    num_keys: int
    new_tokens: int | None
    always: str


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known about a request."""

    request: Request
    options: tuple[Option, ...]
    illegal: tuple[Illegal, ...]
    low: float  # published measurements lie between low and high times the prediction, mostly
    high: float
    longest_tokens: int | None  # that fit, with the best way
    break_even_tokens: int | None  # below, one device (or tensor-parallel group) is faster than the best way
    crossing: Crossing | None
    recipes: tuple[Recipe, ...]
    explanation: tuple[Line, ...]
    caveats: tuple[str, ...]

    def _repr_html_(self) -> str:
        return draw_plan(self)

    @property
    def best(self) -> Option:
        """The first of the options."""
        return self.options[0]


def build_plan(request: Request) -> Plan:
    """Answer a request."""
    setups, illegal = list_setups(request, usual_tps(request))
    options = _ranked(request, setups)
    if not options[0].fits and request.tp is None:
        # Nothing fits: tensor parallelism across nodes is slow, but it divides the weights.
        wider = [tp for tp in legal_tps(request.model, request.cluster) if tp > request.cluster.per_node]
        more, _ = list_setups(request, wider)
        options = sorted([*options, *_ranked(request, more)], key=_order)
    best = options[0]
    accuracy = read_data("accuracy.toml")
    return Plan(
        request=request,
        options=tuple(options),
        illegal=tuple(illegal),
        low=accuracy["low"],
        high=accuracy["high"],
        longest_tokens=_longest(request, best.setup),
        break_even_tokens=_break_even(request, best.setup),
        crossing=_crossing(request, best.setup),
        recipes=tuple(list_recipes(request, [option.prediction for option in options if option.fits])),
        explanation=tuple(explain(request, best.prediction, best.memory)),
        caveats=tuple(list_caveats(request, best.setup)),
    )


def _ranked(request: Request, setups: list[Setup]) -> list[Option]:
    room = request.cluster.device.memory_bytes
    options = []
    for setup in setups:
        memory = count_memory(request, setup)
        options.append(Option(predict(request, setup), memory, memory.total <= room))
    return sorted(options, key=_order)


def _order(option: Option) -> tuple[bool, float]:
    """What fits first, by time; the rest by memory; ties go to the plainer layout."""
    return not option.fits, option.prediction.total_s if option.fits else option.memory.total


def _longest(request: Request, setup: Setup) -> int | None:
    """The most tokens that fit, cached ones as asked; None if not even one does."""

    def fits(tokens: int) -> bool:
        memory = count_memory(replace(request, tokens=tokens), setup)
        return memory.total <= request.cluster.device.memory_bytes

    return _last(fits, MOST_TOKENS - request.cached_tokens)


def _last(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number for which it holds, if it holds up to some number and then no longer."""
    if not holds(1):
        return None
    low, high = 1, most
    if holds(high):
        return high
    while high - low > max(1, low // 2**20):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _break_even(request: Request, setup: Setup) -> int | None:
    """The first power of two, refined, at which the best way beats the same group without context parallelism."""
    if not 1 < setup.cp <= MANY_RANKS or request.phase == "decode" or not is_quick(setup.algorithm, setup.cp):
        return None
    alone = Setup(DEFAULT_ALGORITHM, "contiguous", setup.tp, 1, setup.copies)

    def is_slower(tokens: int) -> bool:
        asked = replace(request, tokens=tokens, cached_tokens=0)
        return predict(asked, setup).total_s >= predict(asked, alone).total_s

    lengths = [1 << k for k in range(24, -1, -1)]
    last = next((length for length in lengths if is_slower(length)), None)
    if last is None:
        return 1
    low, high = last, 2 * last
    while high - low > low // 16 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_slower(middle) else (low, middle)
    return high


def _crossing(request: Request, setup: Setup) -> Crossing | None:
    """For the same number of keys, how many may be new for pass-Q to win."""
    if request.phase != "prefill" or not 1 < setup.cp <= MANY_RANKS:
        return None
    num_keys = request.tokens + request.cached_tokens
    window = shown_window(request.model)
    kv, q = (setup._replace(algorithm=name, layout="zigzag", inner=1) for name in RINGS)

    def q_wins(new: int) -> bool:
        asked = replace(request, tokens=new, cached_tokens=num_keys - new)
        q_s, kv_s = (timeline_of(asked, way, window=window).makespan_s for way in (q, kv))
        return q_s < (1 - LEAST_GAIN) * kv_s

    least = min(setup.cp, num_keys)
    if q_wins(num_keys):
        return Crossing(num_keys, None, Q_RING)
    if not q_wins(least):
        return Crossing(num_keys, None, KV_RING)
    low, high = least, num_keys
    while high - low > low // 32 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if q_wins(middle) else (low, middle)
    return Crossing(num_keys, high, "")

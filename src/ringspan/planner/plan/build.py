"""The whole answer: every way to split the work, ranked, with what else one would ask about the best.

Ways that fit into memory come before those that do not; of the former the faster first, of the latter those that lack
least. Ways whose times are closer to the fastest than their common uncertainty are tied with it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ringspan.planner.accuracy import is_tie, range_of
from ringspan.planner.plan.candidates import Illegal, list_setups, usual_tps
from ringspan.planner.plan.caveats import late_s, list_caveats
from ringspan.planner.plan.explain import ExplainedTerm, explain
from ringspan.planner.plan.lengths import BreakEven, break_even, crossing, longest
from ringspan.planner.plan.memory import Memory, count_memory
from ringspan.planner.plan.picture import draw_plan
from ringspan.planner.plan.predict import Prediction, predict
from ringspan.planner.plan.request import Request, Setup, legal_tps
from ringspan.planner.plan.settings import Recipe, list_recipes
from ringspan.planner.plan.video import WholeVideo, whole_video


class Option(NamedTuple):
    """One way, with its time, the range of the middle 80 %, and its memory."""

    prediction: Prediction
    low_s: float
    high_s: float
    memory: Memory
    fits: bool

    @property
    def setup(self) -> Setup:
        """How the work is split."""
        return self.prediction.setup


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is known about a request."""

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
        """Whether memory is so full that estimates may be off by what is left."""
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
    """Every way, the best first, and what is not possible."""
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
    """What fits first, by time; the rest by memory; ties go to the plainer layout."""
    return not option.fits, option.prediction.total_s if option.fits else option.memory.total


def _tied(request: Request, options: list[Option]) -> list[Option]:
    best, device = options[0], request.cluster.device
    if not best.fits:
        return []
    parts = best.prediction.parts
    return [option for option in options[1:] if option.fits and is_tie(parts, option.prediction.parts, device)]

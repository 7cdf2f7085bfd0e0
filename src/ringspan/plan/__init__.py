"""Will it fit, how long will it take, which algorithm, and why?"""

from ringspan.plan.build import Crossing, Option, Plan, build_plan
from ringspan.plan.candidates import Illegal
from ringspan.plan.explain import Line
from ringspan.plan.memory import Memory, count_memory
from ringspan.plan.predict import Pass, Prediction, predict, timeline_of
from ringspan.plan.request import PHASES, Phase, Request, Setup
from ringspan.plan.settings import Recipe

__all__ = [
    "PHASES",
    "Crossing",
    "Illegal",
    "Line",
    "Memory",
    "Option",
    "Pass",
    "Phase",
    "Plan",
    "Prediction",
    "Recipe",
    "Request",
    "Setup",
    "build_plan",
    "count_memory",
    "predict",
    "timeline_of",
]

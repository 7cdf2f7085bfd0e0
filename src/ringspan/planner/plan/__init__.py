"""Will it fit, how long will it take, which algorithm, and why?"""

from ringspan.planner.plan.build import Crossing, Option, Plan, build_plan
from ringspan.planner.plan.candidates import Illegal
from ringspan.planner.plan.explain import Line
from ringspan.planner.plan.memory import Memory, count_memory
from ringspan.planner.plan.predict import Pass, Prediction, predict, timeline_of
from ringspan.planner.plan.request import PHASES, Phase, Request, Setup
from ringspan.planner.plan.settings import Recipe

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

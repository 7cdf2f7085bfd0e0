"""Will it fit, how long will it take, which algorithm, and why?"""

from ringspan.planner.plan.ask import make_request, parse_cluster, plan
from ringspan.planner.plan.build import BreakEven, Option, Plan, build_plan
from ringspan.planner.plan.candidates import Illegal
from ringspan.planner.plan.explain import ExplainedTerm
from ringspan.planner.plan.memory import Memory, count_memory
from ringspan.planner.plan.passes import Pass, timeline_of
from ringspan.planner.plan.predict import Prediction, WholeVideo, predict
from ringspan.planner.plan.questions import (
    Answer,
    Cost,
    cost_of,
    fewest_devices,
    largest_batch,
    longest_context,
    sweep,
)
from ringspan.planner.plan.request import PHASES, Phase, Request, Setup
from ringspan.planner.plan.settings import Recipe

__all__ = [
    "PHASES",
    "Answer",
    "BreakEven",
    "Cost",
    "ExplainedTerm",
    "Illegal",
    "Memory",
    "Option",
    "Pass",
    "Phase",
    "Plan",
    "Prediction",
    "Recipe",
    "Request",
    "Setup",
    "WholeVideo",
    "build_plan",
    "cost_of",
    "count_memory",
    "fewest_devices",
    "largest_batch",
    "longest_context",
    "make_request",
    "parse_cluster",
    "plan",
    "predict",
    "sweep",
    "timeline_of",
]

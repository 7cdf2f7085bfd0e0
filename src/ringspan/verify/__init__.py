"""Is this attention right? Any context-parallel attention, verified against an independent float64 oracle.

The oracle, the cases, the diagnosis and the faults need NumPy only; what runs a target on ranks loads torch when it is
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ringspan.verify import faults
from ringspan.verify.cases import FEATURES, VerifyCase, make_cases
from ringspan.verify.diagnose import Diagnosis
from ringspan.verify.report import CaseVerdict, VerifyReport

if TYPE_CHECKING:
    from ringspan.verify.agreement import Agreement, ranks_agree
    from ringspan.verify.models import ModelDifference, compare_models
    from ringspan.verify.run import check, verify
    from ringspan.verify.targets import FunctionTarget, Target, TargetCall

__all__ = [
    "FEATURES",
    "Agreement",
    "CaseVerdict",
    "Diagnosis",
    "FunctionTarget",
    "ModelDifference",
    "Target",
    "TargetCall",
    "VerifyCase",
    "VerifyReport",
    "check",
    "compare_models",
    "faults",
    "make_cases",
    "ranks_agree",
    "verify",
]

_NEED_TORCH = {
    "Agreement": "agreement",
    "FunctionTarget": "targets",
    "ModelDifference": "models",
    "TargetCall": "targets",
    "Target": "targets",
    "check": "run",
    "compare_models": "models",
    "ranks_agree": "agreement",
    "verify": "run",
}


def __getattr__(name: str) -> object:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'ringspan.verify' has no attribute {name!r}")
    return getattr(import_module(f"ringspan.verify.{_NEED_TORCH[name]}"), name)

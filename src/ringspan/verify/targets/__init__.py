"""What can be verified: this library, other libraries, and any function or Target."""

from ringspan.verify.targets.base import FunctionTarget, Target, TargetCall
from ringspan.verify.targets.find import find_target
from ringspan.verify.targets.peers import PEERS
from ringspan.verify.targets.ringspan import RingspanTarget

__all__ = ["PEERS", "FunctionTarget", "RingspanTarget", "Target", "TargetCall", "find_target"]

"""Faults that can be injected into a correct attention, to see whether a test notices them."""

from ringspan.verify.faults import backward, kernels, masks, places, schedules
from ringspan.verify.faults.record import FAULTS, Fault, fault
from ringspan.verify.faults.ring import FaultyRing, KeysValues, RankView, RingPart

__all__ = [
    "FAULTS",
    "Fault",
    "FaultyRing",
    "KeysValues",
    "RankView",
    "RingPart",
    "backward",
    "fault",
    "kernels",
    "masks",
    "places",
    "schedules",
]

"""What a fault is: a ring with one stage replaced, the mistake it makes, and where it can show."""

from collections.abc import Callable
from typing import NamedTuple

from ringspan.errors import ShapeError
from ringspan.verify.cases import VerifyCase
from ringspan.verify.faults.ring import FaultyRing
from ringspan.verify.outcome import Computed


class Fault(NamedTuple):
    """A mistake that can be injected into a correct attention.

    Attributes:
        name: such as "partials added".
        area: "mask", "schedule", "wire", "kernel", "merge", "heads", "backward" or "adapter".
        mistakes: what a diagnosis may call it; more than one where two mistakes give the same numbers.
        ring: the faulty attention.
        min_world_size: with fewer ranks it changes nothing.
    """

    name: str
    area: str
    mistakes: tuple[str, ...]
    ring: type[FaultyRing]
    min_world_size: int = 1

    @property
    def about(self) -> str:
        """The mistake in one sentence."""
        return (self.ring.__doc__ or "").strip()

    def run(self, case: VerifyCase) -> Computed:
        """The faulty result of a case."""
        return self.ring(case).run()


FAULTS: dict[str, Fault] = {}


def fault(
    name: str, area: str, *mistakes: str, min_world_size: int = 2
) -> Callable[[type[FaultyRing]], type[FaultyRing]]:
    """Register a faulty ring; without `mistakes` its name is also that of the mistake."""

    def register(ring: type[FaultyRing]) -> type[FaultyRing]:
        if name in FAULTS:
            raise ShapeError("there is a fault of this name already", argument="name", value=name)
        FAULTS[name] = Fault(name, area, mistakes or (name,), ring, min_world_size)
        return ring

    return register

"""Does the number of devices change the bits of a result, and what does reproducible mode cost?"""

import hashlib
from dataclasses import dataclass

import numpy as np

from ringspan.program.prepare import DEFAULT, build
from ringspan.program.reproducible.bind import bind_grid
from ringspan.simulate.simulator import Simulation


@dataclass(frozen=True, slots=True)
class Bits:
    """A run in reproducible mode compared with one device; bytes count all messages."""

    digest: str  # of the bits of out and lse
    is_same: bool
    pending_nodes: int  # the largest number of pending nodes of one tile of a sum on any rank
    sent_bytes_by_default: int  # in the default mode, which sends sums instead of nodes


def digest_bits(simulation: Simulation) -> str:
    """Hash every bit of out and lse to a few characters."""
    found = hashlib.blake2b(digest_size=6)
    for x in (simulation.out, simulation.lse):
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()


def compare_bits(simulation: Simulation, alone: Simulation) -> Bits:
    case, problem = simulation.case, simulation.case.problem
    grown = [bind_grid(simulation.schedule, rank, problem) for rank in range(problem.world_size)]
    assert isinstance(case.algorithm, str)
    by_default = build(problem, case.algorithm, case.options()._replace(mode=DEFAULT))
    return Bits(
        digest=digest_bits(simulation),
        is_same=digest_bits(simulation) == digest_bits(alone),  # -0.0 has other bits than 0.0
        pending_nodes=max(growth.pending for _, growth in grown),
        sent_bytes_by_default=sum(
            problem.block_bytes(transfer.block) for step in by_default.steps for transfer in step.transfers
        ),
    )

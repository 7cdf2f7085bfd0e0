"""Which rank is this, if torchrun started it, and what does a rank without a front do?

Under torchrun, the process of rank 0 is the front, with rank 0 as its child; every other process is a rank. A rank that
is lost ends all of them, and torchrun starts them again if it was told to (`--max-restarts`).
"""

import logging
import os
import signal
from typing import NamedTuple

from ringspan.errors import RingspanError
from ringspan.serve.frames import Frame
from ringspan.serve.lead import follow
from ringspan.serve.pulse import Pulse
from ringspan.serve.rank import describe
from ringspan.serve.team import join

log = logging.getLogger("ringspan.serve")


class TorchrunPlace(NamedTuple):
    """This process's place among those that torchrun started."""

    rank: int
    num_ranks: int


def torchrun_place() -> TorchrunPlace | None:
    """The place that the environment describes; None if torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return TorchrunPlace(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def serve_rank(place: TorchrunPlace, task: Frame) -> None:
    """Run a rank until rank 0 ends it.

    Raises:
        RingspanError: Rank 0 or another rank was lost.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # torchrun signals all processes; rank 0 ends the others when it is through
    log.info("rank %d of %d", *place)
    try:
        team = join(place.rank, place.num_ranks, "env://", task, Pulse(lambda _: None, task["rank_timeout_s"]))
        follow(team)
    except Exception as error:
        raise RingspanError(f"rank {place.rank}: {describe(error)}") from error
    finally:
        logging.shutdown()
    os._exit(0)  # tearing down a group may take its time

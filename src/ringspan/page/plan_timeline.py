"""One layer's attention of one way of a plan, on the real schedule: what `--trace` writes and the plan's page draws."""

from ringspan.algorithms import find_algorithm
from ringspan.errors import UnsupportedError
from ringspan.planner.plan import Request, Setup
from ringspan.planner.plan.predict import ring_of, sequence_of, shard_of, shown_window
from ringspan.planner.timeline import Timeline, real_timeline

MOST_RANKS = 64


def setup_timeline(request: Request, setup: Setup) -> Timeline:
    """The forward pass, with every step recorded."""
    if setup.cp > MOST_RANKS:
        raise UnsupportedError(
            f"the best way has {setup.cp} ranks, and a trace shows every rank",
            argument="trace",
            remedy=f"use at most {MOST_RANKS}, with more tensor parallelism or fewer devices",
        )
    if request.model.latent is not None or request.cached_tokens or request.phase == "decode":
        raise UnsupportedError(
            "only a prefill without cache, a denoising or a training step, without MLA, has a trace",
            argument="trace",
            remedy="leave it out",
        )
    shard = shard_of(request, setup)
    sequence = sequence_of(request, setup, shown_window(request.model))
    record, device = find_algorithm(setup.algorithm), request.cluster.device
    return real_timeline(record, ring_of(request, setup), sequence, shard, device, records_moments=True)

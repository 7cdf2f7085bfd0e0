"""Where is a plan less sure than its range says, and what of the request does not change the time?

The range is that of published runs; it says nothing of work that none of them was like.
"""

from collections.abc import Iterator

from ringspan.planner.plan.predict import shard_of
from ringspan.planner.plan.request import Request, Setup

SHORT_TOKENS = (
    8192  # new ones on a rank: with fewer, judged rows of `ringspan plan --check` took up to SHORT_RATIO times
)
SHORT_RATIO = 4.6


def list_caveats(request: Request, setup: Setup) -> Iterator[str]:
    """In sentences."""
    new_tokens = -(-request.tokens // setup.cp) * shard_of(request, setup).batch
    if request.phase != "decode" and new_tokens < SHORT_TOKENS:
        yield (
            f"Short work: {new_tokens:,} new tokens on a rank. The host's own time is not modelled, and published runs "
            f"with fewer than {SHORT_TOKENS:,} took up to {SHORT_RATIO} times as long as predicted."
        )
    if request.phase == "train":
        yield "No published time of a whole training step was held against this; the range is that of other runs."
    device = request.cluster.device
    if "fp8" in (request.weights, request.mlp_weights) and device.fp8_ratio == 1:
        yield f"How much faster fp8 is on {device.id} is not known: matrix products are planned at the rate of bf16."

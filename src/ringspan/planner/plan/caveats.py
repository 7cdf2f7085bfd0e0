"""Where is a plan less sure than its range says, and what of the request does not change the time?

The range is that of published runs; it says nothing of work that none of them was like.
"""

from collections.abc import Iterator

from ringspan.planner.plan.passes import shard_of
from ringspan.planner.plan.request import Request, Setup

SHORT_TOKENS = 8192  # new ones on a rank: below, published prefills over a cache took longer than their parts
LATE_S = 5.5e-3  # per layer: arXiv 2411.01783 Table 4 with 320 to 3,200 new tokens on a rank, 4.6 to 5.6 ms more


def is_short(request: Request, setup: Setup) -> bool:
    """Whether there is so little to compute that what no part of the time accounts for shows."""
    new_tokens = -(-request.chunk // setup.cp) * shard_of(request, setup).batch
    return request.phase != "decode" and new_tokens < SHORT_TOKENS


def late_s(request: Request, setup: Setup) -> float:
    """What the upper end of the range is later by: short prefills over a cache, on several ranks."""
    is_cached = request.cached_tokens > 0 or request.chunk < request.tokens
    if not (is_cached and setup.cp > 1 and is_short(request, setup)):
        return 0.0
    return LATE_S * request.model.layers * -(-request.tokens // request.chunk)


def list_caveats(request: Request, setup: Setup) -> Iterator[str]:
    """In sentences."""
    if late_s(request, setup):
        yield (
            f"Short work: fewer than {SHORT_TOKENS:,} new tokens on a rank. Published prefills like this took up to "
            f"{LATE_S * 1e3:.1f} ms per layer longer than their parts; the upper end of the range includes that."
        )
    elif is_short(request, setup):
        yield f"Short work: fewer than {SHORT_TOKENS:,} new tokens on a rank, as in few published runs."
    device, model = request.cluster.device, request.model
    if "fp8" in (request.weights, request.mlp_weights) and device.fp8_ratio == 1:
        yield f"How much faster fp8 is on {device.id} is not known: matrix products are planned at the rate of bf16."
    if model.video is not None and not request.is_resident:
        yield "Text encoder and VAE are not counted as memory: they are taken to leave the devices meanwhile."
    if request.phase == "train":
        yield "Optimizer steps, data loading and checkpoints are not counted as time."

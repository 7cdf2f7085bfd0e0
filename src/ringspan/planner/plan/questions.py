"""What people ask beside a plan: how few devices, how long a context, how large a batch, and at what price?"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ringspan.errors import RingspanError, ShapeError
from ringspan.planner.catalog import Cluster
from ringspan.planner.plan.build import Option, last_that, longest, rank_options
from ringspan.planner.plan.candidates import list_setups
from ringspan.planner.plan.memory import count_memory
from ringspan.planner.plan.predict import whole_video
from ringspan.planner.plan.request import MOST_SEQUENCES, Request, legal_tps

MOST_DEVICES = 1024  # that are tried
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The request that answers a question, and its best way."""

    request: Request
    option: Option


class Cost(NamedTuple):
    """Cost, in the currency of the price, of one prefill, token or step, of a whole video, and of a million tokens."""

    per_unit: float
    per_video: float | None
    per_million_tokens: float | None


def fewest_devices(request: Request, target_s: float | None = None) -> Answer | None:
    """The smallest number of such devices on which it fits, and takes at most so long by the estimate.

    Sizes of a node are tried one by one, numbers of nodes by doubling and then by halving the gap.
    """
    clusters = list(_inside(request.cluster))
    found = next((answer for cluster in clusters if (answer := _enough(request, cluster, target_s))), None)
    if found is not None:
        return found
    inside = clusters[-1].per_node
    low, high = 1, 2
    while high * inside <= MOST_DEVICES:
        found = _enough(request, Cluster(high, inside, request.cluster.device), target_s)
        if found is not None:
            break
        low, high = high, 2 * high
    while found is not None and high - low > 1:
        middle = (low + high) // 2
        better = _enough(request, Cluster(middle, inside, request.cluster.device), target_s)
        low, high, found = (low, middle, better) if better is not None else (middle, high, found)
    return found


def _enough(request: Request, cluster: Cluster, target_s: float | None) -> Answer | None:
    """The best way on a cluster, where it fits and is fast enough; times are worked out only where it fits."""
    try:
        asked = replace(request, cluster=cluster)
    except RingspanError:
        return None  # the tensor parallelism that was asked for does not divide so few devices
    setups, _ = list_setups(asked, [request.tp] if request.tp is not None else legal_tps(asked.model, cluster))
    if not any(count_memory(asked, setup).fits(cluster.device.memory_bytes) for setup in setups):
        return None
    answer = _answer(asked)
    is_enough = target_s is None or answer.option.prediction.total_s <= target_s
    return answer if answer.option.fits and is_enough else None


def longest_context(request: Request) -> Answer | None:
    """The most tokens that fit on the devices, in any way, and the fastest way to work on them."""
    options, _ = rank_options(request)
    lengths = [length for option in options if (length := longest(request, option.setup)) is not None]
    if not lengths:
        return None
    asked = replace(request, tokens=max(lengths))
    return _answer(asked)


def largest_batch(request: Request) -> Answer | None:
    """The largest batch that fits on the devices, in any way, and the fastest way to work on it."""
    room, sizes = request.cluster.device.memory_bytes, []
    for option in rank_options(replace(request, batch=request.cluster.num_devices))[0]:
        setup = option.setup

        def fits(parts: int, setup=setup) -> bool:  # type: ignore[no-untyped-def]
            return count_memory(replace(request, batch=parts * setup.copies), setup).fits(room)

        parts = last_that(fits, MOST_SEQUENCES // setup.copies)
        sizes.append(0 if parts is None else parts * setup.copies)
    return _answer(replace(request, batch=max(sizes))) if any(sizes) else None


def sweep(request: Request, lengths: Iterable[int], clusters: Iterable[Cluster]) -> Iterator[Answer]:
    """The best way for every length on every cluster."""
    lengths = list(lengths)
    for cluster in clusters:
        for tokens in lengths:
            asked = replace(request, tokens=tokens, cluster=cluster)
            yield _answer(asked)


def cost_of(request: Request, option: Option, price_per_hour: float) -> Cost:
    """The cost of the devices for the estimated time."""
    if not 0 < price_per_hour < 1e9:
        raise ShapeError(
            "use an amount above 0 and below 1e9, per device and hour", argument="price", value=price_per_hour
        )
    per_s = price_per_hour * request.cluster.num_devices / SECONDS_PER_HOUR
    seconds = option.prediction.total_s
    video = whole_video(request, seconds)
    tokens = request.batch * request.accumulate * (1 if request.phase == "decode" else request.tokens)
    return Cost(
        per_s * seconds,
        None if video is None else per_s * video.total_s,
        None if request.phase == "denoise" else per_s * seconds / tokens * 1e6,
    )


def _answer(request: Request) -> Answer:
    return Answer(request, rank_options(request)[0][0])


def _inside(like: Cluster) -> Iterator[Cluster]:
    """Numbers of devices in one node, ascending: all up to 8, then divisors of a larger node."""
    most = min(like.device.node_size, MOST_DEVICES)
    for size in range(1, most + 1):
        if size <= 8 or most % size == 0:
            yield Cluster(1, size, like.device)

"""From which length on, or up to which, is a way possible or better than another?"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ringspan.algorithms.choose import DEFAULT_ALGORITHM, KV_RING, Q_RING, RINGS
from ringspan.planner.accuracy import BETWEEN, is_tie
from ringspan.planner.plan.candidates import MANY_RANKS
from ringspan.planner.plan.memory import count_memory
from ringspan.planner.plan.passes import shown_window, timeline_of
from ringspan.planner.plan.predict import predict
from ringspan.planner.plan.request import MOST_TOKENS, Request, Setup
from ringspan.planner.timeline import is_quick


class BreakEven(NamedTuple):
    """Where pass-KV and pass-Q take the same time, the number of keys held: below `new_tokens`, pass-Q is faster.

    None where one of them, named by `always`, is as fast or faster throughout.
    """

    num_keys: int
    new_tokens: int | None
    always: str


def longest(request: Request, setup: Setup) -> int | None:
    """The most tokens that fit, cached ones as asked; None if not even one does."""

    def fits(tokens: int) -> bool:
        memory = count_memory(replace(request, tokens=tokens), setup)
        return memory.fits(request.cluster.device.memory_bytes)

    return last_that(fits, MOST_TOKENS - request.cached_tokens)


def last_that(holds: Callable[[int], bool], most: int) -> int | None:
    """The largest number for which it holds, if it holds up to some number and then no longer."""
    if not holds(1):
        return None
    low, high = 1, most
    if holds(high):
        return high
    while high - low > max(1, low // 2**20):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def break_even(request: Request, setup: Setup) -> int | None:
    """The length from which the best way is faster than the same group alone by more than their uncertainty."""
    if not 1 < setup.cp <= MANY_RANKS or request.phase == "decode" or not is_quick(setup.algorithm, setup.cp):
        return None
    alone = Setup(DEFAULT_ALGORITHM, "contiguous", setup.tp, 1, setup.copies)

    def is_unclear(tokens: int) -> bool:
        asked = replace(request, tokens=tokens, cached_tokens=0, chunk_tokens=None)
        ours, theirs = predict(asked, setup), predict(asked, alone)
        is_slower = ours.total_s >= theirs.total_s
        return is_slower or is_tie(ours.parts, theirs.parts, request.cluster.device)

    lengths = [1 << k for k in range(24, -1, -1)]
    last = next((length for length in lengths if is_unclear(length)), None)
    if last is None:
        return 1
    low, high = last, 2 * last
    while high - low > low // 16 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_unclear(middle) else (low, middle)
    return high


def crossing(request: Request, setup: Setup) -> BreakEven | None:
    """For the same number of keys, how many may be new for pass-Q to win."""
    if request.phase != "prefill" or not 1 < setup.cp <= MANY_RANKS:
        return None
    num_keys = request.tokens + request.cached_tokens
    window = shown_window(request.model)
    kv, q = (setup._replace(algorithm=name, layout="zigzag", inner=1) for name in RINGS)

    def q_wins(new: int) -> bool:
        asked = replace(request, tokens=new, cached_tokens=num_keys - new)
        q_s, kv_s = (timeline_of(asked, way, window=window).makespan_s for way in (q, kv))
        return q_s < (1 - BETWEEN) * kv_s

    least = min(setup.cp, num_keys)
    if q_wins(num_keys):
        return BreakEven(num_keys, None, Q_RING)
    if not q_wins(least):
        return BreakEven(num_keys, None, KV_RING)
    low, high = least, num_keys
    while high - low > low // 32 + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if q_wins(middle) else (low, middle)
    return BreakEven(num_keys, high, "")

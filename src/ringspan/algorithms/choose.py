"""Which side should travel round the ring, the keys and values or the queries, and why?

Numbers in, algorithm and reason out: the rules of arXiv 2411.01783 (equations 1, 2, 3 and 5, algorithms 1 and 5,
appendix D), as functions without state. T new tokens attend to all S = T + P keys, P of them cached. Every rank holds
1/N of both, so one ring step meets T/N queries with S/N keys, head dimension D:

    compute     4·T·S·D·NH / (N²·C)        two matrix products of 2 FLOPs per multiply-add, no causal discount
    KV message  2·S·D·NKV·e / (N·BW)       pass-KV, N - 1 times
    Q message   T·D·NH·e / (N·BW)          pass-Q, N - 1 times
    All2All     (N - 1)·T·D·NH·e / (N·BW)  pass-Q, once at the end: partial outputs go home (their lse left out)

A message shorter than the compute of its step is hidden. D cancels wherever two of these are compared, so no rule asks
for it. A causal mask halves the compute among new tokens; the rules leave that out, and so favour pass-KV a little
where most tokens are new. They compare times only: both algorithms are exact.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral, Real
from typing import NamedTuple

from ringspan.algorithms.hybrid import HYBRID
from ringspan.algorithms.pass_kv import PASS_KV
from ringspan.algorithms.pass_q import PASS_Q
from ringspan.algorithms.ulysses import ULYSSES
from ringspan.errors import ShapeError

KV_RING, Q_RING = PASS_KV.name, PASS_Q.name
RINGS = (KV_RING, Q_RING)  # what "auto" chooses between, and what a turn of a cache runs
DEFAULT_ALGORITHM = KV_RING  # where there is nothing to choose: a single rank sends nothing in any algorithm


@dataclass(frozen=True, slots=True)
class Workload:
    """One attention call over a cache: T new tokens, P cached tokens, NH heads over NKV KV heads, e bytes each."""

    new_tokens: int
    cached_tokens: int
    num_heads: int
    num_kv_heads: int
    bytes_per_element: float

    def __post_init__(self) -> None:
        _check_count("new_tokens", self.new_tokens, minimum=1)
        _check_count("cached_tokens", self.cached_tokens, minimum=0)
        _check_count("num_heads", self.num_heads, minimum=1)
        _check_count("num_kv_heads", self.num_kv_heads, minimum=1)
        _check_positive("bytes_per_element", self.bytes_per_element)
        if self.num_heads % self.num_kv_heads:
            raise ShapeError(
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}: every KV head serves the "
                "same number of query heads",
                remedy="make num_heads a multiple of num_kv_heads",
            )

    @property
    def num_keys(self) -> int:
        """S = T + P: what every new token may attend to."""
        return self.new_tokens + self.cached_tokens

    @property
    def miss_rate(self) -> float:
        """T / (T + P): the part of the keys that was not in the cache."""
        return self.new_tokens / self.num_keys


@dataclass(frozen=True, slots=True)
class Machine:
    """N ranks, each with C FLOP/s of compute and a link of BW bytes/s one way to the next rank."""

    world_size: int
    compute_flops_per_s: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_count("world_size", self.world_size, minimum=1)
        if self.world_size == 1:
            raise ShapeError(
                "a single rank sends nothing, so there is no choice",
                argument="world_size",
                value=1,
                remedy="use 2 ranks or more",
            )
        _check_positive("compute_flops_per_s", self.compute_flops_per_s)
        _check_positive("link_bytes_per_s", self.link_bytes_per_s)


class Choice(NamedTuple):
    """The algorithm, and one sentence with the numbers that decided."""

    algorithm: str  # one of RINGS
    reason: str


def equal_size_miss_rate(workload: Workload) -> float:
    """The miss rate 2·NKV/NH at which the Q and the KV message have the same size (above 1: Q is always smaller)."""
    return 2 * workload.num_kv_heads / workload.num_heads


def q_is_smaller(workload: Workload) -> bool:
    """Equation 1, Q message <= KV message: T·NH <= 2·S·NKV, that is T/(T+P) <= 2·NKV/NH."""
    return workload.new_tokens * workload.num_heads <= 2 * workload.num_keys * workload.num_kv_heads


def new_tokens_to_hide_kv(workload: Workload, machine: Machine) -> float:
    """The T from which KV hides: KV message <= compute gives N·C·NKV·e / (2·NH·BW), however long the cache."""
    return equal_size_miss_rate(workload) * keys_to_hide_q(workload, machine)


def kv_is_hidden(workload: Workload, machine: Machine) -> bool:
    """Equation 2: enough new tokens to hide the KV message behind the compute of its step."""
    return workload.new_tokens >= new_tokens_to_hide_kv(workload, machine)


def keys_to_hide_q(workload: Workload, machine: Machine) -> float:
    """The S from which Q hides: Q message <= compute gives N·C·e / (4·BW), however many tokens are new."""
    flops_per_byte = machine.compute_flops_per_s / machine.link_bytes_per_s
    return machine.world_size * flops_per_byte * workload.bytes_per_element / 4


def q_is_hidden(workload: Workload, machine: Machine) -> bool:
    """Equation 3: enough keys to hide the Q message behind the compute of its step."""
    return workload.num_keys >= keys_to_hide_q(workload, machine)


def all_to_all_miss_rate(workload: Workload, machine: Machine) -> float:
    """Equation 5: the miss rate 2·NKV/NH - 4·T·BW/(N·C·e) up to which pass-Q wins although its outputs must go home.

    With Q hidden and KV not, pass-Q wins iff All2All <= (N - 1)·(KV message - compute); divide by
    (N - 1)·S·D·NH·e / (N·BW). Where Q is not hidden either (equation 3), pass-Q pays for its messages too and wins only
    up to NKV/NH; the equation does not know that, and promises pass-Q too much there.
    """
    return equal_size_miss_rate(workload) - workload.new_tokens / keys_to_hide_q(workload, machine)


def choose_algorithm_1(workload: Workload, machine: Machine) -> Choice:
    """Algorithm 1: pass-KV if KV is hidden or no larger than Q, else pass-Q. The All2All of pass-Q is not counted."""
    if kv_is_hidden(workload, machine):
        return _kv_hidden(workload, machine)
    return _compare_miss_rate(
        workload, machine, equal_size_miss_rate(workload), "the {} at which the Q message is as large as the KV message"
    )


def choose_algorithm_5(workload: Workload, machine: Machine) -> Choice:
    """Algorithm 5: as algorithm 1, with the All2All of pass-Q counted (equation 5)."""
    if kv_is_hidden(workload, machine):
        return _kv_hidden(workload, machine)
    choice = _compare_miss_rate(
        workload,
        machine,
        all_to_all_miss_rate(workload, machine),
        "the {} at which sending the outputs of pass-Q home costs as much as the part of KV that compute does not hide",
    )
    if choice.algorithm == KV_RING or q_is_hidden(workload, machine):
        return choice
    needed = math.ceil(keys_to_hide_q(workload, machine))
    caveat = f"; Q is not hidden either (needs {needed:,} keys), which this rule does not count."
    return choice._replace(reason=choice.reason.removesuffix(".") + caveat)


def crossing_algorithm_1(workload: Workload, machine: Machine) -> float:
    """The miss rate from which algorithm 1 says pass-KV, for this number of keys: min(2·NKV/NH, T_hidden/S)."""
    hidden = new_tokens_to_hide_kv(workload, machine) / workload.num_keys
    return min(equal_size_miss_rate(workload), hidden)


def crossing_algorithm_5(workload: Workload, machine: Machine) -> float:
    """The miss rate from which algorithm 5 says pass-KV, for this number of keys.

    Equation 5 with T = m·S on both sides is m = 2·NKV/NH - m·S/S_q, where S_q hides Q; hence m below. Equation 2 adds
    nothing: at the T that hides KV the right side of equation 5 is already 0.
    """
    return equal_size_miss_rate(workload) / (1 + workload.num_keys / keys_to_hide_q(workload, machine))


def choose_fitted(workload: Workload, *, a: float, b: float, c: float) -> Choice:
    """Appendix D: pass-KV iff h = a·ln T + b·ln(T/(T+P)) + c > 0, with constants fitted to one's own measurements.

    The printed constants are no default: they describe one cluster, the text leaves the base of the logarithm and the
    sign of c open, and with the natural logarithm they contradict most rows of the paper's own table 4.
    """
    for name, value in (("a", a), ("b", b), ("c", c)):
        if not math.isfinite(value):
            raise ShapeError(
                "a fitted constant is a finite number",
                argument=name,
                value=value,
                remedy="fit it again or drop bad samples",
            )
    h = a * math.log(workload.new_tokens) + b * math.log(workload.miss_rate) + c
    algorithm = KV_RING if h > 0 else Q_RING
    return Choice(
        algorithm,
        f"{algorithm}: the fitted h is {h:.4g}, {'' if h > 0 else 'not '}above 0, for {workload.new_tokens:,} new "
        f"tokens, {_percent(workload.miss_rate)} of the {workload.num_keys:,} keys.",
    )


def ring_of_degrees(ulysses: int, ring: int) -> str:
    """The algorithm that other libraries describe by a Ulysses and a ring degree."""
    return KV_RING if ulysses == 1 else ULYSSES.name if ring == 1 else HYBRID.name


class RingWork(NamedTuple):
    """Work of the busiest rank, and bytes of a hop. Both are counted, so masks and uneven shards are included."""

    flops: float
    kv_bytes: int
    q_bytes: int
    out_bytes: int  # partial outputs and their lse, which pass-Q sends home


class RingMachine(NamedTuple):
    """Measured figures of this machine: each rank's compute rate and its link, with all ranks at work.

    `busy_s_per_byte` is what a byte on its way takes from computing, where the CPU that computes also moves it.
    """

    compute_flops_per_s: float
    link_bytes_per_s: float
    latency_s: float
    busy_s_per_byte: float = 0.0


@lru_cache(maxsize=1024)
def choose_by_time(work: RingWork, machine: RingMachine | None, world_size: int) -> Choice | None:
    """The algorithm that should take less time; None if that depends on a machine that is not known.

    The rules above with every term counted. One ring step computes c = flops/(N·C); messages take latency + bytes/BW
    and are hidden behind it as far as they are shorter, though their bytes may keep the CPU busy. With all N steps

        pass-KV   (N - 1)·max(c + busy·bytes, kv) + c
        pass-Q    max(c + …, q) + (N - 2)·max(c + …, q + out) + c + out     partial outputs go home one step later each

    (all messages of a step share the link). Where KV is no larger than Q and outputs together, pass-KV takes no longer
    on any machine.
    """
    if work.kv_bytes <= work.q_bytes + work.out_bytes:
        sizes = f"{work.q_bytes + work.out_bytes:,} of queries and their results"
        return Choice(KV_RING, f"pass_kv: a hop of K and V is {work.kv_bytes:,} bytes, no more than the {sizes}.")
    if machine is None:
        return None
    compute = work.flops / (world_size * machine.compute_flops_per_s)
    kv, q, out = (
        machine.latency_s + size / machine.link_bytes_per_s for size in (work.kv_bytes, work.q_bytes, work.out_bytes)
    )
    busy_kv, busy_q, busy_out = (machine.busy_s_per_byte * size for size in work[1:])
    pass_kv = (world_size - 1) * max(compute + busy_kv, kv) + compute
    pass_q = max(compute + busy_q, q) + (world_size - 2) * max(compute + busy_q + busy_out, q + out) + compute + out
    algorithm = KV_RING if pass_kv <= pass_q else Q_RING
    return Choice(
        algorithm,
        f"{algorithm}: pass_kv should take {1e3 * pass_kv:.4g} ms and pass_q {1e3 * pass_q:.4g} ms, as a ring step "
        f"computes {1e3 * compute:.4g} ms at {machine.compute_flops_per_s / 1e9:.4g} GFLOP/s, and K and V take "
        f"{1e3 * kv:.4g} ms, queries {1e3 * q:.4g} ms and results {1e3 * out:.4g} ms at "
        f"{machine.link_bytes_per_s / 1e6:.4g} MB/s.",
    )


def _kv_hidden(workload: Workload, machine: Machine) -> Choice:
    needed = math.ceil(new_tokens_to_hide_kv(workload, machine))
    return Choice(
        KV_RING,
        f"pass_kv: {workload.new_tokens:,} new tokens are enough to hide KV behind compute (needs {needed:,}).",
    )


def _compare_miss_rate(workload: Workload, machine: Machine, limit: float, what: str) -> Choice:
    """The second half of both algorithms, KV not hidden; a tie goes to pass-KV, as the paper has it."""
    new = f"{_percent(workload.miss_rate)} of the {workload.num_keys:,} keys are new"
    named_limit = what.format(_percent(limit))
    if workload.miss_rate >= limit:
        return Choice(KV_RING, f"pass_kv: {new}, not below {named_limit}.")
    needed = math.ceil(new_tokens_to_hide_kv(workload, machine))
    return Choice(
        Q_RING,
        f"pass_q: {new}, below {named_limit}, and the {workload.new_tokens:,} new tokens are too few to hide KV "
        f"behind compute (needs {needed:,}).",
    )


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.4g} %"


def _check_count(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, Integral) or value < minimum:
        raise ShapeError("must be a whole number", argument=name, value=value, remedy=f"use {minimum} or more")


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        raise ShapeError("must be a finite number above 0, in SI units", argument=name, value=value)

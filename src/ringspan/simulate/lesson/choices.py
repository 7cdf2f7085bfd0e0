"""Do the paper's rules choose pass-KV or pass-Q, from a warm cache to an empty one?

The sizes are those of a real prefill, because the small simulation has too little work for the rules.
"""

from dataclasses import dataclass

from ringspan.algorithms.choose import (
    Machine,
    Workload,
    all_to_all_miss_rate,
    choose_algorithm_1,
    choose_algorithm_5,
    crossing_algorithm_1,
    crossing_algorithm_5,
    new_tokens_to_hide_kv,
)

NUM_KEYS = 128_000  # new and cached tokens together
FLOPS_PER_BYTE = 18_000.0  # compute over link bandwidth of a rank
BYTES_PER_ELEMENT = 2
MISS_RATES_PERMILLE = (10, 25, 50, 100, 125, 150, 200, 300, 500, 750, 1000)


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """The choices of algorithms 1 and 5 at one miss rate; algorithm 5 counts the return of pass-Q's outputs."""

    miss_rate: float
    new_tokens: int
    cached_tokens: int
    miss_rate_limit: float  # equation 5: below it pass-Q wins
    algorithm_1: str
    reason_1: str
    algorithm_5: str
    reason_5: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices for all miss rates, and where they change."""

    num_keys: int
    world_size: int
    num_heads: int
    num_kv_heads: int
    bytes_per_element: int
    flops_per_byte: float
    new_tokens_to_hide_kv: float
    crossing_miss_rate_1: float  # from here on algorithm 1 chooses pass-KV; above 1: never
    crossing_miss_rate_5: float
    rows: tuple[ChoiceRow, ...]


def list_choices(world_size: int, num_heads: int, num_kv_heads: int) -> Choices | None:
    """Compute the table; None for a single rank, which has no choice."""
    if world_size == 1:
        return None
    machine = Machine(world_size, compute_flops_per_s=FLOPS_PER_BYTE, link_bytes_per_s=1.0)  # only the ratio counts

    def workload(permille: int) -> Workload:
        new_tokens = NUM_KEYS * permille // 1000
        return Workload(new_tokens, NUM_KEYS - new_tokens, num_heads, num_kv_heads, BYTES_PER_ELEMENT)

    any_rate = workload(MISS_RATES_PERMILLE[0])
    return Choices(
        num_keys=NUM_KEYS,
        world_size=world_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        bytes_per_element=BYTES_PER_ELEMENT,
        flops_per_byte=FLOPS_PER_BYTE,
        new_tokens_to_hide_kv=new_tokens_to_hide_kv(any_rate, machine),
        crossing_miss_rate_1=crossing_algorithm_1(any_rate, machine),
        crossing_miss_rate_5=crossing_algorithm_5(any_rate, machine),
        rows=tuple(_row(workload(permille), machine) for permille in MISS_RATES_PERMILLE),
    )


def _row(workload: Workload, machine: Machine) -> ChoiceRow:
    return ChoiceRow(
        workload.miss_rate,
        workload.new_tokens,
        workload.cached_tokens,
        all_to_all_miss_rate(workload, machine),
        *choose_algorithm_1(workload, machine),
        *choose_algorithm_5(workload, machine),
    )

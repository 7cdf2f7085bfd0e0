"""The record of an algorithm: it stands in the algorithm's own file, and every other room reads it.

The record says what builds the schedule, how reports name and explain it, what the planner's timeline follows and how
much memory its buffers take. `registry.py` finds records by name; `register` adds one from outside the package.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringspan.algorithms.loads import Load, RegularCall
from ringspan.schedule import Schedule


class BufferSizes(NamedTuple):
    """Bytes of one rank's blocks in one call, and how the ranks are arranged."""

    world_size: int
    inner: int  # Ulysses degree, or ranks in the inner ring; 1 without a mesh
    num_kv_heads: int
    q: float  # a shard's queries
    kv: float  # a shard's K and V, as they travel
    out: float  # a shard's output and lse in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to compute attention over ranks.

    Attributes:
        name: what `algorithm=` takes, such as "pass_kv": lower-case letters, digits and underscores.
        build: `build(visible, *, backward=None, **options) -> Schedule`, a pure function of hashable arguments.
            `backward` is None for the forward pass, or the side that travels in the backward pass, "kv" or "q".
        options: which of "direction", "mesh", "heads" and "route" `build` takes.
        label: the name in reports, such as "pass-KV".
        idea: one phrase that explains it, such as "queries stay, keys and values travel".
        loads: the steps of a regular sequence on any number of ranks, for `ringspan plan`. None: the plan builds and
            prices the real schedule, which it does for up to 128 ranks.
        buffer_bytes: bytes that a call takes on one rank beside its output and the result of one kernel call.
        moves_kv: whether K and V travel; if not, `wire=` is refused.
        most_ranks: the largest group for which `ringspan plan` considers it; None is any.
    """

    name: str
    build: Callable[..., Schedule]
    options: frozenset[str] = frozenset()
    label: str
    idea: str
    loads: Callable[[RegularCall], Iterator[Load]] | None = None
    buffer_bytes: Callable[[BufferSizes], float]
    moves_kv: bool = True
    most_ranks: int | None = None

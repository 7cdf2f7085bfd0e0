"""What does one step cost all ranks: seconds of compute by rank, and rounds of messages?

An algorithm's `loads` yields these records and the planner's timeline follows them. Seconds and bytes come from
`Costs`, which the planner implements, so that an algorithm can be priced without knowing a device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringspan.schedule import Kind

Seconds = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.intp]

END = -1  # the message is read when the schedule is over
EXCHANGE_ROUNDS = 4  # a step with at least as many rounds is an all-to-all exchange


class Round(NamedTuple):
    """At most one message from each rank and to each rank. `is_far[i]`: message i leaves its node."""

    src: Ranks
    dst: Ranks
    nbytes: float | Seconds
    is_far: npt.NDArray[np.bool_]
    reads_at: int = 0  # the step that reads the message; 0 is the next one, END the end
    is_exchange: bool = False
    names: Sequence[str] = ()

    def only(self, are_sent: npt.NDArray[np.bool_]) -> "Round":
        """Return the round with only some of its messages."""
        return self._replace(src=self.src[are_sent], dst=self.dst[are_sent], is_far=self.is_far[are_sent])


class Load(NamedTuple):
    """One step of all ranks."""

    attend_s: Seconds
    rounds: Sequence[Round] = ()
    names: Sequence[str] = ()


class Costs(Protocol):
    """What one layer's attention costs on one device of one rank."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""

    @property
    def joins_tiles(self) -> bool:
        """Whether blocks that arrived together, by an exchange of heads or a gather, are attended by one kernel."""

    @property
    def returns_after(self) -> bool:
        """Whether partial results of pass-Q go home in one exchange after the ring."""

    def tile_s(self, q_len: float, kv_len: float, *, is_causal: bool = False) -> float:
        """Seconds of a tile, forward or backward; a causal tile has q_len · (q_len + 1) / 2 pairs."""

    def merge_s(self, q_len: float) -> float:
        """Seconds to merge a partial result into q_len rows: of the output, or backward of dq."""

    def token_bytes(self, kind: Kind) -> float:
        """Bytes of one token of a block of this kind, as the block travels."""

    def with_heads(self, num_heads: int, num_kv_heads: int) -> "Costs":
        """The same for another number of heads."""

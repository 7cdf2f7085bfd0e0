"""Which points are measured, and who takes part in each?

No torch here: the parent of the ranks loads none.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

HEADS = 8
DTYPES = ("float32", "bfloat16")
HEAD_DIMS = (64, 128)

OURS, ONE_PROCESS = "ringspan", "one process"
WIDE = "ringspan, float32"  # the same numbers, to show the gain of a half dtype
IDEALS = ("ideal, SDPA", "ideal, our kernel")
BASELINES = (ONE_PROCESS, "all-gather", "blocking ring")
PEERS = (
    "ring-attention-pytorch",
    "axolotl-ringmaster, Ulysses",
    "axolotl-ringmaster, ring",
    "axolotl-ringmaster, zigzag",
)
GROWTH = {"1 rank": 1, "2 ranks": 2, "4 ranks": 4, "8 ranks": 8}

MODULES = {
    "comparison.ours": (OURS, WIDE, IDEALS[1], *GROWTH),
    "comparison.torch_only": (IDEALS[0], *BASELINES),
    "comparison.peers": PEERS,
}


@dataclass(frozen=True, slots=True)
class Point:
    """One size on some ranks: batch 1, causal with a zigzag layout, or full with a contiguous one."""

    section: str
    seq_len: int
    head_dim: int
    dtype: str
    is_causal: bool
    has_backward: bool
    world_size: int

    @property
    def name(self) -> str:
        """The name that `--only` matches."""
        mask = "causal" if self.is_causal else "full"
        return f"{self.section}/{self.dtype}/{mask}/{self.seq_len}x{self.head_dim}"

    @property
    def contenders(self) -> tuple[str, ...]:
        """The contenders without peers."""
        if self.section == "growth":
            return tuple(GROWTH)
        if self.section == "alone":
            return OURS, ONE_PROCESS
        return (OURS, *IDEALS, *BASELINES) if self.dtype == "float32" else (OURS, WIDE, *IDEALS, *BASELINES)

    @property
    def peers(self) -> tuple[str, ...]:
        """The libraries of others that take part; zigzag ones are for causal attention."""
        if self.section in ("alone", "growth"):
            return ()
        return PEERS if self.is_causal else PEERS[:-1]

    def num_rounds(self, pairs: int) -> int:
        """The number of rounds: short runs vary most and cost least."""
        return 4 * pairs if self.seq_len <= 4096 else pairs

    def every(self, contender: str) -> int:
        """Return in how many rounds a contender runs; slow and distant ones do not run in all."""
        if contender in PEERS:
            return 15
        if not self.peers or contender not in BASELINES:
            return 1
        return 6 if self.dtype == "float32" else 15  # some CPUs take twelve times as long with half dtypes

    def small(self) -> "Point":
        """The same point in a small size for a check."""
        return dataclasses.replace(self, seq_len=512)


def all_points() -> Iterator[Point]:
    """All points in the order of the tables."""
    for section, seq_len, has_backward in (
        ("forward16k", 16384, False),
        ("backward8k", 8192, True),
        ("forward4k", 4096, False),
    ):
        for dtype in DTYPES:
            for is_causal in (True, False):
                for head_dim in HEAD_DIMS:
                    yield Point(section, seq_len, head_dim, dtype, is_causal, has_backward, 2)
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for seq_len in (2048, 4096, 8192, 16384):
                yield Point("alone", seq_len, head_dim, dtype, True, False, 1)
    yield Point("growth", 16384, 64, "float32", True, False, max(GROWTH.values()))

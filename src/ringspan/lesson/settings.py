"""What is to be simulated, checked before anything large is made.

The limits keep the dense reference, which looks at every pair of tokens, within seconds and a few hundred megabytes.
"""

from dataclasses import dataclass
from typing import NamedTuple

from ringspan.algorithms import ALGORITHMS, Direction, Mesh
from ringspan.balance import balanced
from ringspan.errors import LayoutError, ShapeError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import Mask
from ringspan.tree import TILE

MAX_WORLD_SIZE = 64
MAX_SEQ_LEN = 8192
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_SCORES = 2**28  # heads · tokens²
MAX_ELEMENTS = 2**24  # heads · tokens · head_dim

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


class LayoutChoice(NamedTuple):
    """A layout by name, to be built for any sequence; `block` is how many tokens `striped` deals at a time."""

    name: str
    block: int = 1

    def build(self, mask: Mask, seq_len: int, world_size: int, *, align: int = 1, start: int = 0) -> Layout:
        """The layout of seq_len tokens from position `start` on, cut at multiples of `align` from there."""
        match self.name:
            case "contiguous":
                return contiguous(seq_len, world_size, align=align, start=start)
            case "zigzag":
                return zigzag(seq_len, world_size, align=align, start=start)
            case "striped":
                return striped(seq_len, world_size, block=self.block, align=align, start=start)
            case "balanced":
                return balanced(mask, seq_len, world_size, align=align, start=start)
        raise LayoutError(f"layout={self.name!r}: there is no such layout; use one of {', '.join(LAYOUTS)}")

    def __str__(self) -> str:
        return self.name if self.block == 1 else f"{self.name}:{self.block}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One simulation: sizes, who sees whom, who holds what, and the algorithms to run."""

    world_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask: Mask
    layout: LayoutChoice
    algorithms: tuple[str, ...]
    direction: Direction | None
    mesh: Mesh | None
    seed: int
    reproducible: bool = False

    def __post_init__(self) -> None:
        if self.reproducible and self.layout.name == "striped" and self.layout.block % TILE:
            nearest = max(1, round(self.layout.block / TILE)) * TILE
            raise LayoutError(
                f"layout {self.layout} in the reproducible mode: no tile of {TILE} tokens may be on two ranks; the "
                f"nearest such layout is striped:{nearest}"
            )
        if self.num_heads % self.num_kv_heads:
            divisors = [str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ShapeError(
                f"{self.num_heads} query heads over {self.num_kv_heads} KV heads: every KV head serves the same number "
                f"of query heads; use one of {', '.join(divisors)} KV heads"
            )
        sizes = f"{self.seq_len:,} tokens, {self.num_heads:,} heads of head_dim {self.head_dim:,}"
        scores = self.num_heads * self.seq_len**2
        if scores > MAX_SCORES:
            raise ShapeError(
                f"{sizes}: the dense reference would compute {scores:,} scores (heads × tokens²), more than "
                f"{MAX_SCORES:,}; use fewer tokens or heads"
            )
        elements = self.num_heads * self.seq_len * self.head_dim
        if elements > MAX_ELEMENTS:
            raise ShapeError(
                f"{sizes}: the queries would have {elements:,} elements, more than {MAX_ELEMENTS:,}; "
                "use fewer tokens, fewer heads or a smaller head_dim"
            )

    def build_layout(self, choice: LayoutChoice) -> Layout:
        """A layout of the sequence; in the reproducible mode on its grid."""
        return choice.build(self.mask, self.seq_len, self.world_size, align=TILE if self.reproducible else 1)

    def options(self, algorithm: str) -> dict[str, object]:
        """Of direction and mesh, what this algorithm takes."""
        given = {"direction": self.direction, "mesh": self.mesh}
        return {name: value for name, value in given.items() if name in ALGORITHMS[algorithm].options}

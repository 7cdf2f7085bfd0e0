"""What does `ringspan simulate` simulate? The settings are checked before large arrays are allocated.

The limits keep the dense reference, which computes every pair of tokens, within seconds and a few hundred megabytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringspan.algorithms import ALGORITHMS, Direction, Mesh
from ringspan.errors import LayoutError, ShapeError
from ringspan.layout import Layout, balanced, contiguous, striped, zigzag
from ringspan.mask import Mask
from ringspan.program.reproducible.tree import TILE

MAX_WORLD_SIZE = 64
MAX_SEQ_LEN = 8192
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_SCORES = 2**28  # heads · tokens²
MAX_ELEMENTS = 2**24  # heads · tokens · head_dim

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")


class LayoutChoice(NamedTuple):
    """A layout by name, for any sequence; `block` is the number of tokens that `striped` deals at a time."""

    name: str
    block: int = 1

    def build(self, mask: Mask, seq_len: int, world_size: int, *, align: int = 1, start: int = 0) -> Layout:
        """Build the layout of seq_len tokens from position `start` on, cut at `start` plus multiples of `align`."""
        match self.name:
            case "contiguous":
                return contiguous(seq_len, world_size, align=align, start=start)
            case "zigzag":
                return zigzag(seq_len, world_size, align=align, start=start)
            case "striped":
                return striped(seq_len, world_size, block=self.block, align=align, start=start)
            case "balanced":
                return balanced(mask, seq_len, world_size, align=align, start=start)
        raise LayoutError(
            "there is no such layout", argument="layout", value=self.name, remedy=f"use one of {', '.join(LAYOUTS)}"
        )

    def __str__(self) -> str:
        return self.name if self.block == 1 else f"{self.name}:{self.block}"


@dataclass(frozen=True, slots=True)
class LessonSettings:
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
        check_heads(self.num_heads, self.num_kv_heads)
        scores = self.num_heads * self.seq_len**2
        if scores > MAX_SCORES:
            raise ShapeError(
                f"with {self.num_heads} heads the dense reference would compute {scores:,} scores (heads × tokens²), "
                f"more than {MAX_SCORES:,}",
                argument="seq_len",
                value=self.seq_len,
                remedy=f"use {_either(self._smaller_sizes())}",
            )
        elements = self.num_heads * self.seq_len * self.head_dim
        if elements > MAX_ELEMENTS:
            head_dim = MAX_ELEMENTS // (self.num_heads * self.seq_len)
            raise ShapeError(
                f"with {self.num_heads} heads of {self.head_dim} the queries would have {elements:,} elements, more "
                f"than {MAX_ELEMENTS:,}",
                argument="seq_len",
                value=self.seq_len,
                remedy=f"use {_either([*self._smaller_sizes(), f'a head_dim of {head_dim}'])}",
            )

    def _smaller_sizes(self) -> list[str]:
        """Return sizes each of which alone brings the simulation within both limits."""
        heads = min(MAX_SCORES // self.seq_len**2, MAX_ELEMENTS // (self.seq_len * self.head_dim))
        heads -= heads % self.num_kv_heads
        tokens = min(math.isqrt(MAX_SCORES // self.num_heads), MAX_ELEMENTS // (self.num_heads * self.head_dim))
        return [*([f"{heads} heads"] if heads else []), f"{tokens} tokens"]

    def build_layout(self, choice: LayoutChoice) -> Layout:
        """Build a layout of the sequence, on the tile grid in reproducible mode."""
        return choice.build(self.mask, self.seq_len, self.world_size, align=TILE if self.reproducible else 1)

    def options(self, algorithm: str) -> dict[str, object]:
        """Return those of direction and mesh that this algorithm takes."""
        given = {"direction": self.direction, "mesh": self.mesh}
        return {name: value for name, value in given.items() if name in ALGORITHMS[algorithm].options}


def check_heads(num_heads: int, num_kv_heads: int) -> None:
    """Refuse a number of heads that is not a multiple of the number of KV heads."""
    if num_heads % num_kv_heads:
        legal = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise ShapeError(
            f"every KV head serves the same number of query heads, and there are {num_heads}",
            argument="num_kv_heads",
            value=num_kv_heads,
            remedy=f"use {_either(legal)}",
        )


def _either(choices: Sequence[str]) -> str:
    *others, last = choices
    return f"{', '.join(others)} or {last}" if others else last

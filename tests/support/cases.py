"""The one table of cases: every algorithm × layout × mask × world_size × heads × length, as plain values.

A case holds names, not arrays, so simulator, runtime and transports can all be driven by the same table. A new
algorithm is one row in ROWS, a layout one entry in LAYOUTS, a mask one in MASKS.

The whole product is some sixty thousand cases. `CASES` has one of them for each algorithm × world_size × layout × mask,
in which mesh, direction, heads, length and the side that travels backward are chosen so that, for each algorithm, every
pair of values of any two factors occurs; a test checks that it does. `product_cases()` gives all of them.
"""

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import ringspan as rs
from ringspan.algorithms import Direction, Side
from support import oracle
from support.oracle import MaskSpec

Array = npt.NDArray[np.floating]

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
LENGTHS = (24, 37)
SIDES: tuple[Side, ...] = ("kv", "q")
HEADS = (rs.Heads(8, 8), rs.Heads(8, 2), rs.Heads(8, 1))
HEAD_DIM = 4
V_HEAD_DIM = 3


class Row(NamedTuple):
    """An algorithm and its variations."""

    algorithm: str
    directions: tuple[Direction | None, ...] = (None,)
    has_mesh: bool = False
    splits_heads: bool = False


ROWS = (
    Row("pass_kv", directions=("forward", "reverse")),
    Row("pass_q", directions=("forward", "reverse")),
    Row("all_gather"),
    Row("ulysses", splits_heads=True),
    Row("hybrid", directions=("forward", "reverse"), has_mesh=True, splits_heads=True),
    Row("double_ring", has_mesh=True),
)

MASKS: dict[str, MaskSpec] = {
    "full": ("full",),
    "causal": ("causal",),
    "window": ("sliding_window", 5, 0),
    "ahead": ("sliding_window", -2, 9),  # no key at all for the last two queries
    "prefix": ("prefix", 9),
    "documents": ("documents", (7, 1, 12, 40)),
    "frame_causal": ("frame_causal", 4, 3),
    "causal documents": ("and", ("documents", (11, 6, 40)), ("causal",)),
    "chunks": ("and", ("chunks", 5, 2), ("causal",)),
    "images": ("or", ("causal",), ("blocks", ((2, 9), (9, 12), (20, 33)))),
    "window and sink": ("or", ("sliding_window", 3, 0), ("and", ("documents", (2, 58)), ("prefix", 2))),
}


def make_mask(spec: MaskSpec) -> rs.Mask:
    """Return the library's mask for the oracle's description."""
    match spec:
        case ("and", a, b):
            return make_mask(a) & make_mask(b)
        case ("or", a, b):
            return make_mask(a) | make_mask(b)
        case ("per_row", specs):
            return rs.per_row([make_mask(row) for row in specs])
        case (name, *arguments):
            builders: dict[str, Callable[..., rs.Mask]] = {
                "full": rs.full,
                "causal": rs.causal,
                "sliding_window": rs.sliding_window,
                "prefix": rs.prefix,
                "documents": rs.documents,
                "frame_causal": rs.frame_causal,
                "chunks": rs.chunks,
                "blocks": rs.blocks,
            }
            return builders[name](*arguments)
    raise ValueError(f"no such mask: {spec}")


def irregular(length: int, world_size: int) -> rs.Layout:
    """Uneven runs dealt crosswise with gaps between them, one strided, and no token for the second rank."""
    owners = [rank for rank in range(world_size) if rank != 1 or world_size == 1]
    spans: list[list[rs.Span]] = [[] for _ in range(world_size)]
    runs = zip(itertools.cycle((1, 5, 2, 4, 3)), itertools.cycle((0, 1, 0, 0, 2)), strict=False)
    start = 1
    for i, (size, gap) in enumerate(runs):
        if start >= length:
            break
        step = 2 if size == 4 else 1
        span = rs.Span(start, min(start + size * step, length), step)
        spans[owners[-i % len(owners)]].append(span)
        start += size * step + gap
    return rs.Layout(tuple(map(tuple, spans)))


def replicated(length: int, world_size: int) -> rs.Layout:
    """Zigzag chunks with five replicated positions."""
    copies = (rs.Span(0, 2), rs.Span(length // 2, length // 2 + 3))
    taken = {position for span in copies for position in span.positions().tolist()}
    rest = [
        [rs.Span(position, position + 1) for position in positions.tolist() if position not in taken]
        for positions in map(rs.zigzag(length, world_size).positions, range(world_size))
    ]
    return rs.Layout(tuple(map(tuple, rest)), replicated=copies)


LAYOUTS: dict[str, Callable[[int, int, rs.Mask], rs.Layout]] = {
    "contiguous": lambda length, world_size, _: rs.contiguous(length, world_size),
    "zigzag": lambda length, world_size, _: rs.zigzag(length, world_size),
    "striped 1": lambda length, world_size, _: rs.striped(length, world_size),
    "striped 4": lambda length, world_size, _: rs.striped(length, world_size, block=4),
    "balanced": lambda length, world_size, mask: rs.balanced(mask, length, world_size),
    "irregular": lambda length, world_size, _: irregular(length, world_size),
    "replicated": lambda length, world_size, _: replicated(length, world_size),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A calculation and its options; `length` counts positions from 0, some of which a layout may leave out."""

    algorithm: str
    world_size: int
    layout: str
    mask: str
    direction: Direction | None
    mesh: rs.Mesh | None
    heads: rs.Heads
    length: int
    backward: Side  # the side that travels in the backward pass

    def __str__(self) -> str:
        mesh = None if self.mesh is None else f"mesh {self.mesh.outer}x{self.mesh.inner}"
        heads = f"heads {self.heads.num_heads}/{self.heads.num_kv_heads}"
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)}"
        algorithm = (self.algorithm, self.direction, mesh, f"backward {self.backward}")
        parts = (*algorithm, ranks, self.layout, self.mask, heads, f"length {self.length}")
        return ", ".join(part for part in parts if part)

    @property
    def spec(self) -> MaskSpec:
        """The mask in the oracle's description."""
        return MASKS[self.mask]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that select the algorithm."""
        return {"algorithm": self.algorithm, "direction": self.direction, "mesh": self.mesh}

    def make_schedule(self, visible: rs.Visible, backward: Side | None = None) -> rs.Schedule:
        return rs.schedule.build_schedule(**self.options, visible=visible, heads=self.heads, backward=backward)

    def make_layout(self) -> rs.Layout:
        return LAYOUTS[self.layout](self.length, self.world_size, make_mask(self.spec))

    def make_arrays(self, dtype: npt.DTypeLike = np.float64) -> "Arrays":
        """Make random q, k, v and dout, equal for equal cases."""
        num_positions = self.make_layout().num_positions
        return make_arrays(str(self), self.heads, num_positions, num_positions, dtype=dtype)


class Arrays(NamedTuple):
    """Whole inputs (..., heads, seq, dim) of a forward and a backward pass."""

    q: Array
    k: Array
    v: Array
    dout: Array


class Expected(NamedTuple):
    """The oracle's results in float64."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


def make_arrays(
    seed: str,
    heads: rs.Heads,
    q_len: int,
    kv_len: int,
    *,
    batch: tuple[int, ...] = (),
    dtype: npt.DTypeLike = np.float64,
) -> Arrays:
    """Make random arrays; q and k have HEAD_DIM, v has V_HEAD_DIM."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    shapes = (
        (*batch, heads.num_heads, q_len, HEAD_DIM),
        (*batch, heads.num_kv_heads, kv_len, HEAD_DIM),
        (*batch, heads.num_kv_heads, kv_len, V_HEAD_DIM),
        (*batch, heads.num_heads, q_len, V_HEAD_DIM),
    )
    return Arrays(*(rng.standard_normal(shape).astype(dtype) for shape in shapes))


def expect(spec: MaskSpec, layout: rs.Layout, kv_layout: rs.Layout, arrays: Arrays) -> Expected:
    """Compute the oracle's results for arrays whose rows are the positions of the layouts."""
    allowed = oracle.dense_mask(spec, layout.all_positions(), kv_layout.all_positions())
    q, k, v, dout = arrays
    return Expected(*oracle.dense_attention(q, k, v, allowed), *oracle.dense_gradients(q, k, v, allowed, dout))


def product_cases() -> Iterator[Case]:
    """Yield every legal combination."""
    for row, world_size, layout, mask in itertools.product(ROWS, WORLD_SIZES, LAYOUTS, MASKS):
        yield from _variants(row, world_size, layout, mask)


def _variants(row: Row, world_size: int, layout: str, mask: str) -> Iterator[Case]:
    factors = itertools.product(meshes(row, world_size), row.directions, LENGTHS, SIDES)
    for mesh, direction, length, side in factors:
        degree = 1 if not row.splits_heads else world_size if mesh is None else mesh.inner
        for heads in legal_heads(degree):
            yield Case(row.algorithm, world_size, layout, mask, direction, mesh, heads, length, side)


def meshes(row: Row, world_size: int) -> list[rs.Mesh | None]:
    """Return all (outer, inner) with the right product, if the algorithm has a mesh."""
    sizes = [inner for inner in range(1, world_size + 1) if world_size % inner == 0]
    return [rs.Mesh(world_size // inner, inner) for inner in sizes] if row.has_mesh else [None]


def legal_heads(degree: int) -> tuple[rs.Heads, ...]:
    """Return head counts that `degree` ranks can split; 3 and 5 ranks do not divide 8 heads and get 15."""
    return HEADS if 8 % degree == 0 else (rs.Heads(15, 15), rs.Heads(15, degree), rs.Heads(15, 1))


def factor_pairs(case: Case) -> list[tuple[Any, ...]]:
    """Return every two factors of a case with their values."""
    values = [(field.name, getattr(case, field.name)) for field in fields(case)]
    return list(itertools.combinations(values, 2))


def _covering_cases() -> Iterator[Case]:
    """Choose one variant for each algorithm, world size, layout and mask: the values used least so far."""
    for row in ROWS:
        uses: Counter[tuple[Any, ...]] = Counter()
        for world_size, layout, mask in itertools.product(WORLD_SIZES, LAYOUTS, MASKS):
            variants = list(_variants(row, world_size, layout, mask))
            fixed: list[tuple[str, Any]] = [("world_size", world_size), ("layout", layout), ("mask", mask)]
            for name in ("mesh", "direction", "heads", "length", "backward"):
                rarity = {
                    value: sum(1 / (1 + uses[(name, value), other]) for other in fixed)
                    for value in dict.fromkeys(getattr(case, name) for case in variants)
                }
                choice = max(rarity, key=rarity.__getitem__)
                variants = [case for case in variants if getattr(case, name) == choice]
                uses.update(((name, choice), other) for other in fixed)
                fixed.append((name, choice))
            yield variants[0]


CASES = tuple(_covering_cases())


def select(cases: Iterable[Case] = CASES, **values: Any) -> list[Case]:
    """Return the cases with these values, such as select(algorithm="ulysses", world_size=4)."""
    return [case for case in cases if all(getattr(case, name) == value for name, value in values.items())]


def wide_from(first: int) -> list[Any]:
    """WORLD_SIZES as parameters of a test; `make test-fast` leaves out those from `first` on."""
    return [pytest.param(size, marks=[pytest.mark.wide] if size >= first else []) for size in WORLD_SIZES]

"""What is a target asked to compute? A table of small cases, generated for a number of ranks.

A case is a plain value and can be made again from its fields. It lists the features that it needs; a target declares
those that it has. Lengths are short, since mistakes in schedules, masks and merges show in a few dozen tokens.
"""

import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ringspan.arguments import FLAG, RANKS, WHOLE, Kind, check_arguments, list_of
from ringspan.errors import ShapeError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.verify.oracle import Question
from ringspan.verify.patterns import Numbers, Pattern, format_pattern, parts_of, visible

FEATURES = (
    *("causal", "full", "window", "documents", "prefix", "frames", "per_row", "longer_kv", "empty_rows"),
    *("gqa", "few_heads", "odd_length", "scale", "sinks", "softcap", "rope", "backward", "lse"),
    *("float64", "float32", "bfloat16", "float16"),
)
LAYOUTS = ("contiguous", "zigzag", "striped")
HEAD_DIM = 8


def _is_some_of(value: object, choices: tuple[str, ...]) -> bool:
    if not isinstance(value, list | tuple | set | frozenset) or not value:
        return False
    return all(isinstance(name, str) and name in choices for name in value)


_SIZES = list_of(RANKS)
_LAYOUT_NAMES = Kind(
    "names of layouts",
    f"give some of {LAYOUTS}",
    lambda value: _is_some_of(value, LAYOUTS),
)


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """One attention for a target. Queries are the last `length` of `length + past` positions."""

    world_size: int
    layout: str
    pattern: Pattern
    length: int
    num_heads: int = 4
    num_kv_heads: int = 4
    dtype: str = "float32"
    batch: int = 2
    past: int = 0
    scale: float | None = None
    has_sinks: bool = False
    softcap: float | None = None
    has_rope: bool = False
    has_backward: bool = True
    seed: int = 0

    @property
    def features(self) -> frozenset[str]:
        """The features that a target needs for this case."""
        kinds = {part[0] for part in parts_of(self.pattern)}
        asked = {
            "gqa": self.num_heads != self.num_kv_heads,
            "few_heads": bool(
                self.num_heads % self.world_size
                or (self.num_kv_heads % self.world_size and self.world_size % self.num_kv_heads)
            ),
            "odd_length": self.length % (2 * self.world_size) != 0,
            "scale": self.scale is not None,
            "sinks": self.has_sinks,
            "softcap": self.softcap is not None,
            "rope": self.has_rope,
            "backward": self.has_backward,
            "longer_kv": self.past > 0,
            "per_row": self.pattern[0] == "rows",
            "empty_rows": bool((self.counts().sum(-1) == 0).any()),
        }
        return frozenset(kinds | {self.dtype} | {name for name, is_asked in asked.items() if is_asked})

    def counts(self) -> Numbers:
        """The visible pairs: (n, m), or (batch, n, m)."""
        return visible(self.pattern, self.q_layout().all_positions(), self.kv_layout().all_positions())

    def q_layout(self) -> Layout:
        return make_layout(self.layout, self.length, self.world_size, start=self.past)

    def kv_layout(self) -> Layout:
        return make_layout(self.layout, self.length + self.past, self.world_size)

    def question(self) -> Question:
        """Whole inputs, rounded to the case's type, in float64; the same for the same case."""
        return _question(self)

    def __str__(self) -> str:
        extras = [
            f"{self.world_size} ranks",
            self.layout,
            format_pattern(self.pattern),
            f"{self.length} tokens" + (f" after {self.past}" if self.past else ""),
            f"heads {self.num_heads}/{self.num_kv_heads}",
            self.dtype,
            f"scale {self.scale:g}" if self.scale is not None else "",
            "sinks" if self.has_sinks else "",
            f"softcap {self.softcap:g}" if self.softcap is not None else "",
            "RoPE" if self.has_rope else "",
        ]
        return ", ".join(part for part in extras if part)


def make_layout(name: str, seq_len: int, world_size: int, *, start: int = 0) -> Layout:
    builders = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
    if name not in builders:
        raise ShapeError(f"a layout is one of {', '.join(builders)}", argument="layout", value=name)
    return builders[name](seq_len, world_size, start=start)


@functools.lru_cache(maxsize=256)
def _question(case: VerifyCase) -> Question:
    rng = np.random.default_rng(zlib.crc32(str(case).encode()) + case.seed)
    kv_len = case.length + case.past

    def draw(heads: int, length: int) -> Numbers:
        x: Numbers = rng.standard_normal((case.batch, heads, length, HEAD_DIM))
        return round_to(x, case.dtype)

    q, k = draw(case.num_heads, case.length), draw(case.num_kv_heads, kv_len)
    v, dout = draw(case.num_kv_heads, kv_len), draw(case.num_heads, case.length)
    group = case.num_heads // case.num_kv_heads
    positions = np.arange(kv_len, dtype=np.float64)
    return Question(
        *(q, k, v, dout, case.counts()),
        scale=HEAD_DIM**-0.5 if case.scale is None else case.scale,
        kv_of=tuple(head // group for head in range(case.num_heads)),
        sinks=round_to(rng.standard_normal(case.num_heads) + 1, case.dtype) if case.has_sinks else None,
        softcap=case.softcap,
        q_turns=positions[case.past :] if case.has_rope else None,
        kv_turns=positions if case.has_rope else None,
    )


def round_to(x: Numbers, dtype: str) -> Numbers:
    """The nearest numbers of a type, ties to even; bfloat16 keeps the upper 16 bits of a float32."""
    if dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(np.float64)
    return x.astype(dtype).astype(np.float64)


class RankSetting(NamedTuple):
    """The rank that holds each query and each key, in position order."""

    of_q: Numbers
    of_kv: Numbers


def ranks_of(case: VerifyCase) -> RankSetting:
    """The ranks of queries and keys, by position."""
    return RankSetting(_owners(case.q_layout()), _owners(case.kv_layout()))


def _owners(layout: Layout) -> Numbers:
    positions = layout.all_positions()
    owners = np.empty(len(positions))
    for rank in range(layout.world_size):
        owners[np.searchsorted(positions, layout.positions(rank))] = rank
    return owners


def _odd(world_size: int) -> int:
    """A length that leaves every rank a few tokens and none the same share."""
    return 6 * world_size + 5


def _base_cases(world_size: int) -> Iterator[VerifyCase]:
    odd, even = _odd(world_size), 6 * world_size
    case = VerifyCase(world_size, "contiguous", ("causal",), odd)
    documents = ("documents", (4, 1, odd // 2, odd))
    yield replace(case, num_kv_heads=2, dtype="float64")
    yield replace(case, layout="zigzag", num_kv_heads=1)
    yield replace(case, layout="striped", dtype="float64", num_kv_heads=2)
    yield replace(case, pattern=("full",), num_kv_heads=2, dtype="float64")
    yield replace(case, pattern=("full",), layout="zigzag", length=even)
    yield replace(case, length=even, num_heads=6, num_kv_heads=3)
    yield replace(case, length=even, dtype="float64", layout="zigzag", num_kv_heads=2)
    yield replace(case, length=even, pattern=("window", 4, 0), num_kv_heads=2)
    yield replace(case, length=even, pattern=("and", ("documents", (5, even)), ("causal",)), dtype="float64")
    yield replace(case, length=even, dtype="bfloat16")
    yield replace(case, pattern=("window", 4, 0), dtype="float64")
    yield replace(case, pattern=("window", 5, 2), layout="zigzag", num_kv_heads=2)
    yield replace(case, pattern=("and", documents, ("causal",)), dtype="float64")
    yield replace(case, pattern=documents, layout="zigzag")
    yield replace(case, pattern=("prefix", 7), num_kv_heads=2, dtype="float64")
    yield replace(case, pattern=("frames", 4, 3))
    yield replace(case, has_sinks=True, dtype="float64", num_kv_heads=2)
    yield replace(case, has_sinks=True, pattern=("window", 6, 0), layout="zigzag")
    yield replace(case, scale=0.6, dtype="float64", num_kv_heads=2)
    yield replace(case, past=world_size * 3 + 1, dtype="float64")
    yield replace(case, pattern=("window", -2, 9), dtype="float64")
    yield replace(case, pattern=("rows", (("causal",), ("window", 3, 0))), dtype="float64")
    yield replace(case, softcap=1.5, dtype="float64", num_kv_heads=2)
    yield replace(case, has_rope=True, dtype="float64", num_kv_heads=2)
    yield replace(case, dtype="bfloat16", num_kv_heads=2)
    yield replace(case, pattern=("full",), layout="zigzag", dtype="bfloat16")
    yield replace(case, layout="zigzag", dtype="float16", num_kv_heads=2)


def make_cases(
    world_sizes: Iterable[int] = (1, 2, 3, 4, 5),
    layouts: Iterable[str] = LAYOUTS,
    *,
    thorough: bool = False,
    seed: int = 0,
) -> list[VerifyCase]:
    """The table for some numbers of ranks.

    A layout that is not wanted is replaced by one that is. `thorough` adds every layout × mask × heads × dtype.
    """
    check_arguments(
        world_sizes=(_SIZES, world_sizes),
        layouts=(_LAYOUT_NAMES, layouts),
        thorough=(FLAG, thorough),
        seed=(WHOLE, seed),
    )
    wanted = tuple(layouts)
    cases: dict[VerifyCase, None] = {}
    for world_size in world_sizes:
        for i, case in enumerate(_base_cases(world_size)):
            layout = case.layout if case.layout in wanted else wanted[i % len(wanted)]
            cases[replace(case, layout=layout, seed=seed)] = None
        if thorough:
            cases |= dict.fromkeys(_all_cases(world_size, wanted, seed))
    return list(cases)


def _all_cases(world_size: int, layouts: tuple[str, ...], seed: int) -> Iterator[VerifyCase]:
    odd = _odd(world_size)
    patterns: tuple[Pattern, ...] = (
        *(("full",), ("causal",), ("window", 3, 0), ("window", 6, 3), ("window", -1, 8), ("prefix", 9)),
        *(("documents", (3, 9, odd)), ("and", ("documents", (odd - 4, 30)), ("causal",)), ("frames", 5, 2)),
        ("or", ("window", 3, 0), ("and", ("documents", (2, odd + 8)), ("prefix", 2))),
    )
    factors = itertools.product(patterns, layouts, ((4, 4), (4, 2), (4, 1)), ("float64", "float32", "bfloat16"))
    for i, (pattern, layout, (heads, kv_heads), dtype) in enumerate(factors):
        length = (odd, 6 * world_size, odd + 8)[i % 3]
        yield VerifyCase(
            *(world_size, layout, pattern, length, heads, kv_heads, dtype),
            has_sinks=i % 5 == 0,
            scale=(None, 0.4)[i % 7 == 0],
            seed=seed,
        )

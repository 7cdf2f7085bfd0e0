"""Which runs does the lesson have, and which command makes any other?

At most sixty runs keep the page small. The page offers every combination of ranks, layout, mask, algorithm and
direction; those it does not have name the command that makes them, or the library's reason for refusing them.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ringspan.algorithms import ALGORITHMS, Query, build_decode
from ringspan.algorithms.ulysses import check_heads
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import Mask, causal, documents, full, sliding_window
from ringspan.page.replay import ReplayInputs
from ringspan.schedule import Heads, visible_blocks
from ringspan.simulate import Simulation, simulate_attention
from ringspan.span import Span

SEQ_LEN, HEADS, HEAD_DIM = 32, Heads(8, 2), 16
MOST_RUNS = 60
SEED = 0


class PageChoice(NamedTuple):
    """One value of a control: its key, its label, a sentence about it, and its part of the command line."""

    key: str
    label: str
    about: str
    option: str = ""


RANKS = tuple(PageChoice(str(n), str(n), f"{n} ranks", f"--devices {n}") for n in (2, 3, 4, 8))

LAYOUTS = (
    PageChoice("contiguous", "contiguous", "Each rank owns one run of neighbouring tokens.", "--layout contiguous"),
    PageChoice(
        "zigzag",
        "zigzag",
        "Each rank owns one early and one late run, which balances a causal mask.",
        "--layout zigzag",
    ),
    PageChoice("striped", "striped", "Tokens are dealt to the ranks one by one.", "--layout striped"),
)

MASKS = (
    PageChoice("full", "full", "Every query sees every key.", "--mask full"),
    PageChoice("causal", "causal", "A query sees its own key and the keys before it.", "--mask causal"),
    PageChoice("window", "window of 8", "A query sees its own key and the 7 keys before it.", "--mask window:7"),
    PageChoice(
        "documents",
        "two documents",
        "Two documents of 12 and 20 tokens share the sequence; a query sees the earlier keys of its own document.",
        '--mask "causal & documents:12,20"',
    ),
)

DECODE_LABELS: dict[Query, str] = {"replicated": "decode, one sequence", "sharded": "decode, batch"}


def _algorithm(name: str, more: str) -> PageChoice:
    """An algorithm in the words of its record, and a sentence more."""
    record = ALGORITHMS[name]
    idea = f"{record.idea[0].upper()}{record.idea[1:]}"
    return PageChoice(name, record.label, f"{idea}. {more}", f"--algorithm {name.replace('_', '-')}")


ALGORITHM_CHOICES = (
    _algorithm(
        "pass_kv", "In each step a block moves one rank further, while every rank computes on the block that it holds."
    ),
    _algorithm("pass_q", "Each partial result is sent straight back to the owner of its queries and merged there."),
    _algorithm(
        "all_gather",
        "All keys and values arrive first; then every rank computes. So nothing hides these messages, and the memory "
        "of a rank grows with the whole sequence.",
    ),
    _algorithm("ulysses", "Each rank computes a few heads over the whole sequence."),
    _algorithm(
        "double_ring",
        "Blocks cross to the next node only once per phase, so the slow link has a whole phase to carry them.",
    ),
    PageChoice(
        "decode_replicated",
        DECODE_LABELS["replicated"],
        "All ranks hold the one new query. Each computes it against its part of the cache; one merge gives all "
        "ranks the "
        "result.",
    ),
    PageChoice(
        "decode_sharded",
        DECODE_LABELS["sharded"],
        "Each of four sequences has one new query, which one rank owns. The queries travel round the ring; the "
        "cache stays.",
    ),
)

DIRECTIONS = (
    PageChoice("forward", "forward", "Blocks move to the next rank: rank r holds block (r − t) mod P at step t.", ""),
    PageChoice(
        "reverse",
        "reverse",
        "Blocks move to the previous rank: rank r holds block (r + t) mod P at step t.",
        "--direction reverse",
    ),
)

BUILDERS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}
MASK_OF: dict[str, Mask] = {
    "full": full(),
    "causal": causal(),
    "window": sliding_window(7, 0),
    "documents": causal() & documents([12, 20]),
}
DECODES = ("decode_replicated", "decode_sharded")


class Combination(NamedTuple):
    """The keys of the five controls; `direction` is empty for algorithms that have none."""

    ranks: int
    layout: str
    mask: str
    algorithm: str
    direction: str = ""

    @property
    def key(self) -> str:
        """The name of the combination in the page and in permalinks."""
        return "|".join(map(str, self))


def list_combinations() -> Iterator[Combination]:
    """The runs of the lesson."""
    rings = [(name, way) for name in ("pass_kv", "pass_q") for way in ("forward", "reverse")]
    others = [("all_gather", ""), ("ulysses", ""), ("double_ring", "")]
    for layout in ("contiguous", "zigzag", "striped"):
        for algorithm, way in (*rings, *others):
            yield Combination(4, layout, "causal", algorithm, way)
    for algorithm, way in (*rings, *others):
        yield Combination(4, "contiguous", "full", algorithm, way)
    yield Combination(4, "zigzag", "full", "pass_kv", "forward")
    for algorithm, way in (*rings, ("all_gather", ""), ("ulysses", "")):
        yield Combination(4, "contiguous", "window", algorithm, way)
    for algorithm in ("pass_kv", "pass_q"):
        yield Combination(4, "zigzag", "window", algorithm, "forward")
        for layout in ("contiguous", "zigzag"):
            yield Combination(4, layout, "documents", algorithm, "forward")
            yield Combination(2, layout, "causal", algorithm, "forward")
        yield Combination(3, "zigzag", "causal", algorithm, "forward")
        yield Combination(8, "zigzag", "causal", algorithm, "forward")
    for ranks in (3, 8):
        yield Combination(ranks, "contiguous", "causal", "pass_kv", "forward")
    for algorithm in ("all_gather", "ulysses", "double_ring"):
        yield Combination(8, "zigzag", "causal", algorithm)
    yield Combination(8, "contiguous", "full", "pass_kv", "forward")
    for algorithm in DECODES:
        yield Combination(4, "zigzag", "causal", algorithm)


def run_combination(one: Combination) -> Simulation:
    """Simulate the combination in float64."""
    if one.algorithm in DECODES:
        return _run_decode(one)
    layout = BUILDERS[one.layout](SEQ_LEN, one.ranks)
    options = {
        "direction": one.direction or None,
        "mesh": (2, one.ranks // 2) if "mesh" in ALGORITHMS[one.algorithm].options else None,
    }
    inputs = random_inputs(SEQ_LEN, SEQ_LEN)
    return simulate_attention(*inputs, mask=MASK_OF[one.mask], layout=layout, algorithm=one.algorithm, **options)  # type: ignore[arg-type]


def _run_decode(one: Combination) -> Simulation:
    """The next token of one sequence, or of one sequence per rank, on a cache that lies as the layout says."""
    if one.algorithm == "decode_replicated":
        layout = Layout(((),) * one.ranks, replicated=(Span(SEQ_LEN - 1, SEQ_LEN),))
        kv_layout, mask = BUILDERS[one.layout](SEQ_LEN, one.ranks), MASK_OF[one.mask]
        schedule = build_decode(visible_blocks(mask, layout, kv_layout), query="replicated")
    else:
        length = SEQ_LEN // one.ranks
        spans: list[list[Span]] = [[] for _ in range(one.ranks)]
        for sequence in range(one.ranks):
            for rank, of_rank in enumerate(
                BUILDERS[one.layout](length, one.ranks, start=sequence * length).spans_by_rank
            ):
                spans[rank] += of_rank
        kv_layout, mask = Layout(tuple(map(tuple, spans))), causal() & documents([length] * one.ranks)
        lasts = [(sequence + 1) * length - 1 for sequence in range(one.ranks)]
        layout = Layout(tuple((Span(last, last + 1),) for last in lasts))
        schedule = build_decode(visible_blocks(mask, layout, kv_layout), query="sharded")
    inputs = random_inputs(layout.num_positions, SEQ_LEN)
    return simulate_attention(*inputs, mask=mask, layout=layout, kv_layout=kv_layout, algorithm=schedule)


@lru_cache(maxsize=8)
def random_inputs(num_queries: int, num_keys: int) -> ReplayInputs:
    """Standard normal values, the same in every run with as many tokens."""
    rng = np.random.default_rng(SEED)
    shapes = ((HEADS.num_heads, num_queries), (HEADS.num_kv_heads, num_keys), (HEADS.num_kv_heads, num_keys))
    return ReplayInputs(*(rng.standard_normal((*shape, HEAD_DIM)) for shape in shapes))


def list_refusals() -> dict[str, str]:
    """By "ranks|algorithm" or "mask|algorithm": why there is no such run with the lesson's heads and documents."""
    refused = {
        "documents|decode_replicated": "The second document ends with the last token, so it has no next token.",
        **dict.fromkeys(
            ("full|decode_sharded", "window|decode_sharded", "documents|decode_sharded"),
            "In the batch each new token sees all of its own sequence, and nothing else.",
        ),
    }
    for ranks in (2, 3, 4, 8):
        try:
            check_heads(HEADS, ranks)
        except UnsupportedError as error:
            refused[f"{ranks}|ulysses"] = str(error)
        if ranks < 4:
            refused[f"{ranks}|double_ring"] = f"{ranks} ranks make no ring of rings: a mesh needs at least 2 × 2 ranks."
    return refused

"""The eight answers of docs/page.md, computed without the page: by counting, by dense attention, by the planner."""

from collections.abc import Callable

import numpy as np
import pytest

from ringspan.layout import Layout, contiguous, zigzag
from ringspan.mask import Mask, causal, sliding_window
from ringspan.page.cases import HEAD_DIM, HEADS, SEQ_LEN, random_inputs
from ringspan.page.hiding import GIGABYTES_PER_S, LAYOUTS, TOKENS, build_loads, time_ring
from support.readings import list_readings

RANKS = 4
POSITIONS = np.arange(SEQ_LEN)
ITEMSIZE = 8  # float64


def owners_of(layout: Layout) -> np.ndarray:
    owners = np.empty(SEQ_LEN, int)
    for rank in range(RANKS):
        owners[layout.positions(rank)] = rank
    return owners


def pairs_of(mask: Mask, layout: Layout) -> np.ndarray:
    """[q rank][kv rank]: visible pairs."""
    allowed, owners = mask.allowed(POSITIONS, POSITIONS), owners_of(layout)
    ranks = range(RANKS)
    return np.array([[allowed[np.ix_(owners == q, owners == kv)].sum() for kv in ranks] for q in ranks])


def weights_of(allowed: np.ndarray) -> np.ndarray:
    """(heads, q, keys): the softmax over the keys that are allowed."""
    q, k, _ = random_inputs(SEQ_LEN, SEQ_LEN)
    keys = np.repeat(k, HEADS.num_heads // HEADS.num_kv_heads, axis=0)
    scores = np.where(allowed, q @ keys.swapaxes(-1, -2) / np.sqrt(HEAD_DIM), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def outputs_of(allowed: np.ndarray) -> np.ndarray:
    values = np.repeat(random_inputs(SEQ_LEN, SEQ_LEN).v, HEADS.num_heads // HEADS.num_kv_heads, axis=0)
    return np.asarray(weights_of(allowed) @ values)


def bytes_of_rank_3() -> str:
    block = 2 * HEADS.num_kv_heads * (SEQ_LEN // RANKS) * HEAD_DIM * ITEMSIZE
    return f"{3 * block:,}"


def idle_of_rank_0() -> str:
    pairs = pairs_of(causal(), contiguous(SEQ_LEN, RANKS))
    steps = [[pairs[rank, (rank - t) % RANKS] for rank in range(RANKS)] for t in range(RANKS)]
    return f"{100 * (1 - steps[0][0] / sum(map(max, steps))):.0f} %"


def keys_of_rank_2() -> str:
    return f"kv{(2 - 3) % RANKS}"


def share_of_query_29() -> str:
    owners = owners_of(zigzag(SEQ_LEN, RANKS))
    rank = owners[29]
    met = np.isin(owners, [rank, (rank - 1) % RANKS])
    return f"{int(100 * weights_of(causal().allowed(POSITIONS, POSITIONS))[0, 29, met].sum())} %"


def messages_of_a_window() -> str:
    """A block goes as far round the ring as a rank that needs it."""
    pairs = pairs_of(sliding_window(7, 0), contiguous(SEQ_LEN, RANKS))
    hops = [max(t for t in range(RANKS) if pairs[(kv + t) % RANKS, kv]) for kv in range(RANKS)]
    return str(sum(hops))


def error_without_the_last_hop() -> str:
    allowed, owners = causal().allowed(POSITIONS, POSITIONS), owners_of(zigzag(SEQ_LEN, RANKS))
    lost = owners[None, :] == (owners[:, None] - (RANKS - 1)) % RANKS
    return f"{np.abs(outputs_of(allowed & ~lost) - outputs_of(allowed)).max():.1f}"


def queries_that_are_wrong() -> str:
    """Rank 2 meets block 0 in place of block 1 and sends it on, so the queries of ranks 2, 3 and 0 lose block 1."""
    allowed, owners = causal().allowed(POSITIONS, POSITIONS), owners_of(zigzag(SEQ_LEN, RANKS))
    loses = np.isin(owners, [2, 3, 0])
    return f"{(loses & allowed[:, owners == 1].any(axis=1)).sum()} of {SEQ_LEN}"


def contiguous_over_zigzag() -> str:
    rate = GIGABYTES_PER_S[5]
    seconds = {name: time_ring(build_loads(name, TOKENS[5]), rate).makespan_s for name in LAYOUTS}
    assert (TOKENS[5], rate) == (2**14, 25)
    return f"{seconds['contiguous'] / seconds['zigzag']:.2f} times as long"


COMPUTED: list[tuple[str, Callable[[], str]]] = [
    ("bytes has rank 3 sent", bytes_of_rank_3),
    ("idle with a contiguous", idle_of_rank_0),
    ("does rank 2 compute on", keys_of_rank_2),
    ("softmax weight", share_of_query_29),
    ("every query sees 8 keys", messages_of_a_window),
    ("without the last hop", error_without_the_last_hop),
    ("one receive buffer", queries_that_are_wrong),
    ("contiguous take than zigzag", contiguous_over_zigzag),
]


def test_there_are_eight() -> None:
    assert len(list_readings()) == len(COMPUTED) == 8


@pytest.mark.parametrize(("words", "compute"), COMPUTED, ids=[words for words, _ in COMPUTED])
def test_what_was_read_is_right(words: str, compute: Callable[[], str]) -> None:
    (reading,) = (one for one in list_readings() if words in one.question)
    assert compute() == reading.answer

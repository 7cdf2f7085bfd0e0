"""Which rank idles under a causal mask? The same ring with three layouts, measured in pairs of queries and keys."""

from collections.abc import Mapping
from typing import Any

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.page.cases import LAYOUTS, Combination
from ringspan.page.runs import Json

WORLD_SIZE = 4


def describe_balance(runs: Mapping[str, Json]) -> dict[str, Any]:
    """Pairs by step and rank for every layout, and what the mask saves of the work and of the time."""
    charts = [_chart(layout.key, runs[_key(layout.key, "causal")]) for layout in LAYOUTS]
    unmasked = _chart("contiguous", runs[_key("contiguous", "full")])
    plain, even = charts[0], charts[1]
    work = 1 - _work(plain) / _work(unmasked)

    def saved(chart: Json) -> float:
        return 1 - float(chart["time"]) / float(unmasked["time"])

    return {
        "kind": "balance",
        "id": "zigzag",
        "nav": "Why zigzag",
        "title": "Why zigzag? Because a causal mask leaves ranks idle",
        "lead": [
            "Under a causal mask the first tokens see almost nothing, and the last ones almost everything. In a "
            "contiguous layout rank 0 owns the first tokens: no key of another rank is visible to them, so after "
            "step 0 it only waits. Rank 3 owns the last tokens and has a full tile in every later step.",
            f"The ring is as slow as its busiest rank. With the contiguous layout the mask removes {_percent(work)} of "
            f"the pairs, but only {_percent(saved(plain))} of the time. With zigzag it removes "
            f"{_percent(saved(even))} of both.",
            f"Zigzag cuts the sequence into 2P parts, here {2 * WORLD_SIZE}, and gives rank r the parts r and 2P − 1 − "
            "r. The early part sees few keys, the late part many; their sum is the same for every rank in every step. "
            "Striped deals the tokens one by one, which is almost as even.",
        ],
        "charts": charts,
        "caption": "Each step is as wide as its busiest rank needs. A number is the pairs that a rank computes in the "
        "step; dots are waiting.",
    }


def _key(layout: str, mask: str) -> str:
    return Combination(WORLD_SIZE, layout, mask, DEFAULT_ALGORITHM, "forward").key


def _chart(name: str, run: Json) -> Json:
    """Pairs by step and rank; the time is that of the busiest rank of each step."""
    pairs = [[sum(count for _, _, count in tiles) for _, tiles, _ in step] for step in run["steps"]]
    return {"name": name, "pairs": pairs, "time": sum(map(max, pairs)), "imbalance": run["imbalance"]}


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def _work(chart: Json) -> int:
    return sum(map(sum, chart["pairs"]))

"""Questions about ring attention whose answers stand on the page; each answer is taken from what the page shows."""

from collections.abc import Mapping
from typing import Any

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.page.runs import Json
from ringspan.page.units import format_tokens

RING = "4|zigzag|causal|pass_kv|forward"
PLAIN = "4|contiguous|causal|pass_kv|forward"
WINDOW = "4|contiguous|window|pass_kv|forward"
GATHER = "4|zigzag|causal|all_gather|"

MOST_ROUNDING = 1e-12  # in float64


def list_questions(runs: Mapping[str, Json], faults: list[Json], hiding: Json, memory: Json) -> list[Json]:
    """In the order of the page."""
    ring, plain, window = runs[RING], runs[PLAIN], runs[WINDOW]
    by_key = {fault["key"]: fault for fault in faults}
    return [
        _number(
            "How many steps does the ring need on 4 ranks?",
            ring["num_steps"],
            0,
            "Each rank computes on one of the 4 blocks per step. Its own block is there already, so there are 3 hops.",
            {"run": RING, "at": "ring"},
        ),
        _choice(
            "In step 3 of the forward ring on 4 ranks, whose keys and values does rank 2 compute on?",
            [f"those of rank {rank}" for rank in range(4)],
            int(ring["steps"][3][2][1][0][1].removeprefix("kv")),
            "Rank r holds block (r − t) mod P at step t: (2 − 3) mod 4 = 3.",
            {"run": RING, "step": 3, "at": "ring"},
        ),
        _number(
            "How many bytes has rank 3 sent by the end of step 2 (4 ranks, zigzag, causal, pass-KV)?",
            ring["sent"][2][3],
            0,
            "It sends one block of keys and values in each of the steps 0, 1 and 2.",
            {"run": RING, "step": 2, "at": "ring"},
            unit="bytes",
        ),
        _choice(
            "Which rank idles most under a causal mask with a contiguous layout?",
            [f"rank {rank}" for rank in range(4)],
            max(range(4), key=lambda rank: plain["idle"][-1][rank]),
            "Rank 0 owns the first tokens, which see no later ones: after step 0 it has nothing left to compute.",
            {"run": PLAIN, "step": plain["num_steps"], "at": "ring"},
        ),
        _number(
            "For what share of the time is that rank idle by the end?",
            round(100 * max(plain["idle"][-1])),
            1,
            "Zigzag gives every rank an early and a late part, so no rank is idle.",
            {"run": PLAIN, "step": plain["num_steps"], "at": "ring"},
            unit="%",
        ),
        _number(
            "How many times as long as a perfectly balanced run does the contiguous ring take under a causal mask?",
            plain["imbalance"],
            0.01,
            "In every step after the first, some rank has a full tile to compute, and the others wait for it.",
            {"run": PLAIN, "at": "zigzag"},
            unit="times",
        ),
        _number(
            "How many messages does the ring send when each query sees a window of 8 keys (contiguous, 4 ranks)?",
            sum(len(cell[2]) for step in window["steps"] for cell in step),
            0,
            "A window reaches only into the keys of the rank before, and a block that no query needs is not sent.",
            {"run": WINDOW, "step": 0, "at": "ring"},
        ),
        _choice(
            "Why can the outputs of two blocks not simply be added?",
            [
                "Each was divided by the sum of its own weights, so it must first be weighted by the share of "
                "that sum.",
                "Floating-point addition is not exact.",
                "The blocks arrive in a different order on each rank.",
            ],
            0,
            "The log-sum-exp keeps that sum; with it the merge is exact.",
            {"fault": "plain_sum", "at": "break"},
        ),
        _number(
            "How large is the largest error if the last hop is dropped?",
            by_key["last_hop"]["error"],
            0.02 * by_key["last_hop"]["error"],
            "Most outputs still look plausible, so looking at them does not find such a bug; a proof does.",
            {"fault": "last_hop", "at": "break"},
        ),
        _choice(
            "Is the result of the ring an approximation of attention?",
            [
                "no, only rounding is left",
                "yes, keys that are far away count less",
                "yes, blocks are merged with estimated weights",
            ],
            0 if ring["error"] < MOST_ROUNDING else 1,
            f"The largest error is {ring['error']}: that is rounding in float64.",
            {"run": RING, "step": ring["num_steps"], "at": "ring"},
        ),
        _choice(
            "The ring or an all-gather of keys and values: which sends fewer bytes (4 ranks, zigzag, causal)?",
            ["the ring", "the all-gather", "both send the same"],
            _fewer(ring["sent"][-1], runs[GATHER]["sent"][-1]),
            "Either way every block reaches every other rank once. But the ring holds few blocks at a time, and "
            "computes while they travel.",
            {"run": GATHER, "at": "ring"},
        ),
        _hides(hiding),
        _choice(
            "From 8 ranks to 32 ranks, what happens to the memory of one rank in the ring (pass-KV)?",
            ["it stays the same", "it falls to about a half", "it falls to about a quarter", "it grows"],
            _nearest_quotient(memory),
            "Everything that a rank holds is a share of the tokens, O(n / P). An all-gather keeps all keys and values.",
            {"memory": DEFAULT_ALGORITHM, "at": "memory"},
        ),
    ]


def _hides(hiding: Json) -> Json:
    """Does the ring hide its messages at one point of the table?"""
    i, j = 6, 5
    is_hidden = hiding["cells"][i][j]["zigzag"]["hidden"]
    tokens, rate = format_tokens(hiding["num_tokens"][i]), hiding["bandwidths"][j]
    return _choice(
        f"Does compute hide every message of the zigzag ring at {tokens} tokens and {rate:g} GB/s per link?",
        ["yes", "no"],
        0 if is_hidden else 1,
        "Computing grows with the square of the tokens, messages only linearly: long sequences hide them.",
        {"tokens": i, "rate": j, "at": "time"},
    )


def _fewer(ring: list[int], gather: list[int]) -> int:
    return 2 if sum(ring) == sum(gather) else int(sum(gather) < sum(ring))


def _nearest_quotient(memory: Json) -> int:
    ranks, by_ranks = memory["ranks"], memory["algorithms"][0]["bytes"]
    quotient = sum(by_ranks[ranks.index(32)]) / sum(by_ranks[ranks.index(8)])
    choices = (1.0, 0.5, 0.25, 2.0)
    return min(range(4), key=lambda i: abs(choices[i] - quotient))


def _number(text: str, answer: float, tolerance: float, because: str, look: Json, unit: str = "") -> dict[str, Any]:
    return {
        "text": text,
        "answer": answer,
        "tolerance": tolerance,
        "because": because,
        "look": look,
        "unit": unit,
    }


def _choice(text: str, choices: list[str], answer: int, because: str, look: Json) -> dict[str, Any]:
    return {"text": text, "choices": choices, "answer": answer, "because": because, "look": look}

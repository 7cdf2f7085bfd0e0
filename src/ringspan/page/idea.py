"""What is ring attention, for those who have never seen it? The idea, the words of the pictures, one merge by hand."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.page.report import Section, table

Array = npt.NDArray[np.float64]

LEAD = (
    "In attention, every token looks at other tokens of its sequence. A sequence of a million tokens does not fit into "
    "one device, so it is split over several devices, which are called ranks.",
    "In ring attention each rank keeps the queries of its own tokens, and the keys and values travel from rank "
    "to rank, "
    "round a ring, until every query has met every key that it may see. The result is exact: it is the same attention, "
    "computed in parts.",
    "Here you can step through it, break it, and see what it costs. The schedules on this page are those that Ringspan "
    "runs, and the numbers are those of its simulator.",
)

PARAGRAPHS = (
    "Every token has a query, a key and a value: three short lists of numbers. The output of a token is a weighted "
    "average of the values of the tokens that it may see. The score of such a token is the dot product of the query "
    "with its key, divided by the square root of their length. Its weight is the exponential of the score, divided by "
    "the sum of all these exponentials. This is the softmax.",
    "Now split the tokens over four ranks. Each rank has the queries, keys and values of its own tokens. But "
    "its queries "
    "also need the keys and values of the three other ranks.",
    "So the ranks form a ring. In every step each rank does two things at the same time: it computes its own queries "
    "against the block of keys and values that it holds, and it sends this block on to the next rank. With four ranks, "
    "after four steps every query has met every block, and each rank has the finished output of its own tokens.",
    "This has two advantages. No rank ever holds the whole sequence, so the memory of a rank shrinks when ranks are "
    "added. And a block travels while the rank computes on the block before it, so messages often cost no time.",
    "Two things need care. The results of the blocks must be merged with the right weights. And if a token may "
    "see only earlier tokens, which is called a causal mask, the tokens must be dealt out so that every rank "
    "has equally "
    "much to compute. Both are shown below.",
)

TERMS = (
    (
        "rank",
        "One device of the group. Ranks count from 0. Each has a colour and a pattern, the same in every picture.",
    ),
    ("q2, kv2", "Two blocks: the queries of the tokens that rank 2 owns, and the keys and values of these tokens."),
    ("q2×kv1", "A tile: the queries of rank 2 are computed against the keys and values of rank 1."),
    ("kv1→3", "The block kv1 is sent to rank 3."),
    ("step", "In a step every rank computes on what it holds, while messages travel. Steps count from 0."),
    ("mask", "Which keys a query may see. Causal: its own and the earlier ones. Full: all."),
    ("layout", "Which rank owns which tokens. Zigzag gives each rank an early and a late part of the sequence."),
    ("log-sum-exp (lse)", "The logarithm of the sum of exponentials that a query has met so far."),
    ("idle", "The share of the time in which a rank waits, if each step takes as long as its busiest rank."),
    ("error", "The largest difference from attention that is computed in one piece, in float64."),
)

# One query and three keys, in two blocks. The scores are the dot products of the query with the keys.
SCORES = (np.array([1.0, 0.0]), np.array([2.0]))
VALUES = (np.array([2.0, 4.0]), np.array([1.0]))


class MergedPart(NamedTuple):
    """Attention over some keys: the output, and the logarithm of the sum of exponentials."""

    out: float
    lse: float


def describe_idea() -> Section:
    """The idea in five paragraphs, and the words that the pictures use."""
    return {
        "kind": "text",
        "id": "idea",
        "nav": "The idea",
        "title": "The idea",
        "lead": [],
        "paragraphs": list(PARAGRAPHS),
        "code": "",
        "terms_title": "How to read the pictures",
        "terms": [list(term) for term in TERMS],
    }


def describe_merge() -> dict[str, Any]:
    """The merge of two blocks by hand: one query, three keys, values of one number."""
    parts = [attend(scores, values) for scores, values in zip(SCORES, VALUES, strict=True)]
    merged, whole = merge(*parts), attend(np.concatenate(SCORES), np.concatenate(VALUES))
    rows = [
        [
            name,
            _numbers(scores),
            _numbers(values),
            _cell(part.out),
            _cell(part.lse),
            _cell(np.exp(part.lse - whole.lse)),
        ]
        for name, scores, values, part in zip(("block 1", "block 2"), SCORES, VALUES, parts, strict=True)
    ]
    rows.append(["merged", "", "", _cell(merged.out), _cell(merged.lse), _cell(1.0)])
    rows.append(["in one piece", _numbers(*SCORES), _numbers(*VALUES), _cell(whole.out), _cell(whole.lse), _cell(1.0)])
    rows.append(["only added", "", "", _cell(sum(part.out for part in parts)), "", ""])
    columns = ["part", "scores", "values", ">output", ">lse", ">share of the weight"]
    first, second = parts
    return {
        **table("merge", "Why outputs can be merged, and how", columns, rows),
        "nav": "Merging",
        "is_fixed": True,
        "lead": [
            "A block's output is an average over the keys of this block only. To merge two outputs, a rank must "
            "know how "
            "much of the whole weight belongs to each. That is what the log-sum-exp keeps: one number per query.",
            f"Take one query and three keys in two blocks. The sums of exponentials are exp({first.lse:.3f}) and "
            f"exp({second.lse:.3f}). Together "
            f"they are exp({merged.lse:.3f}), so block 1 has the share exp({first.lse:.3f} − "
            f"{merged.lse:.3f}) = "
            f"{np.exp(first.lse - merged.lse):.3f}, and the merged output is {np.exp(first.lse - merged.lse):.3f} · "
            f"{first.out:.3f} + {np.exp(second.lse - merged.lse):.3f} · {second.out:.3f} = {merged.out:.3f}. This is "
            "exactly what attention gives in one piece.",
        ],
    }


def attend(scores: Array, values: Array) -> MergedPart:
    """Attention of one query over some keys."""
    weights = np.exp(scores)
    return MergedPart(float(weights @ values / weights.sum()), float(np.log(weights.sum())))


def merge(first: MergedPart, second: MergedPart) -> MergedPart:
    """Attention over the keys of both parts."""
    lse = float(np.logaddexp(first.lse, second.lse))
    shares = [np.exp(part.lse - lse) for part in (first, second)]
    return MergedPart(float(shares[0] * first.out + shares[1] * second.out), lse)


def _numbers(*arrays: Array) -> str:
    return ", ".join(f"{value:g}" for array in arrays for value in array)


def _cell(value: float) -> tuple[str, float]:
    return f"{value:.3f}", float(value)

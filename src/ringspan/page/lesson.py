"""The lesson: ring attention stepped through, broken, timed and asked about. What `ringspan page` writes."""

from typing import Any

from ringspan.algorithms import ALGORITHMS
from ringspan.page.balance import describe_balance
from ringspan.page.cases import (
    ALGORITHM_CHOICES,
    DIRECTIONS,
    LAYOUTS,
    MASKS,
    RANKS,
    SEQ_LEN,
    list_combinations,
    list_refusals,
    run_combination,
)
from ringspan.page.faults import describe_faults
from ringspan.page.hiding import HIDDEN, describe_hiding
from ringspan.page.html import assemble
from ringspan.page.idea import LEAD, describe_idea, describe_merge
from ringspan.page.memory import describe_memory
from ringspan.page.questions import PLAIN, RING, WINDOW, list_questions
from ringspan.page.runs import Json, describe_run, share_tables

FIRST_QUERY = 29
PRESETS = (
    (RING, "The ring", "Causal mask, zigzag layout: every rank is busy in every step."),
    (PLAIN, "Who idles?", "Causal mask, contiguous layout: rank 0 waits in three of four steps."),
    ("4|contiguous|full|pass_kv|forward", "No mask", "Every query sees every key; every block visits every rank once."),
    (WINDOW, "Sliding window", "A query sees 8 keys, so a block travels only to the next rank."),
    (
        "4|zigzag|causal|pass_q|forward",
        "Queries travel",
        "Pass-Q: keys and values stay, queries travel, partial results go home.",
    ),
    ("4|zigzag|causal|ulysses|", "Ulysses", "Each rank gets all tokens of a few heads, and sends the results back."),
    ("8|zigzag|causal|double_ring|", "Two nodes", "A fast ring inside each node, a slow ring between the two."),
    ("4|zigzag|causal|decode_replicated|", "Decode", "One new token reads a KV cache that is spread over the ranks."),
)


def build_lesson(command: str = "ringspan page") -> str:
    """The lesson as one HTML file."""
    return assemble(describe_lesson(command))


def describe_lesson(command: str = "ringspan page") -> dict[str, Any]:
    runs = {one.key: describe_run(run_combination(one)) for one in list_combinations()}
    faults, hiding, memory = describe_faults(), describe_hiding(), describe_memory()
    return {
        "title": "Ring attention, step by step",
        "lead": list(LEAD),
        "command": command,
        "foot": "This file loads nothing from the network. All numbers were computed when it was written, in float64, "
        f"for {SEQ_LEN} tokens, 8 query heads and 2 KV heads, unless a section says otherwise.",
        "sections": [
            describe_idea(),
            ring_section(runs),
            describe_merge(),
            describe_balance(runs),
            {
                "kind": "faults",
                "id": "break",
                "nav": "Break it",
                "title": "Break it",
                "lead": [
                    "Choose a mistake. The page shows the error of a real run with this mistake, on four ranks with a "
                    "causal mask and 32 tokens.",
                    "Below it stands what ringspan.schedule.validate says: the proof that every schedule must pass "
                    "before it runs. It follows, for every rank, which pairs of queries and keys are computed and what "
                    "is sent.",
                ],
                "faults": faults,
            },
            {
                "kind": "hiding",
                "id": "time",
                "nav": "Time",
                "title": "When does the ring hide its messages?",
                "lead": [
                    "While a rank computes on one block, the next block is on its way. Twice as many tokens are four "
                    "times as much to compute, but only twice as much to send. So from some length on, computing takes "
                    "longer than sending, and the messages cost no time.",
                    "Move the sliders and watch the timelines: solid bars are computing, striped bars are messages, "
                    "dots are waiting. Contiguous and zigzag are the two layouts; both have the same time axis.",
                    f"Predicted for {hiding['ranks']} GPUs ({hiding['device']}), one layer with {hiding['heads'][0]} "
                    f"query heads over {hiding['heads'][1]} KV heads of {hiding['head_dim']} elements, bfloat16, "
                    "causal mask. Messages count as hidden if no rank is blocked by them for "
                    f"{100 * HIDDEN:g}\N{NO-BREAK SPACE}% of the time.",
                ],
                **hiding,
            },
            {
                "kind": "memory",
                "id": "memory",
                "nav": "Memory",
                "title": "What must one rank hold?",
                "lead": [
                    "In the ring a rank holds its own tokens and the blocks that travel, which are as large as its "
                    "own. From 4 ranks on, twice as many ranks mean half as much memory for each; a rank alone needs "
                    "no buffers for messages. An all-gather instead collects all keys and values on every rank: "
                    "choose it and compare.",
                    f"Attention of one layer over {memory['tokens']} tokens ({2**20:,}), {memory['heads'][0]} heads of "
                    f"{memory['head_dim']} elements, bfloat16.",
                ],
                **memory,
            },
            {
                "kind": "questions",
                "id": "questions",
                "nav": "Questions",
                "title": "Questions",
                "lead": [
                    'Every answer stands on this page. Your answer is checked at once; "Show me" leads to the place.'
                ],
                "questions": list_questions(runs, faults, hiding, memory),
            },
        ],
    }


def ring_section(runs: dict[str, Json]) -> dict[str, Any]:
    """All runs of the lesson with their controls."""
    abouts = {choice.key: choice.about for choice in ALGORITHM_CHOICES}
    tables: Json = {}
    shared = share_tables(runs.values(), tables)
    return {
        "kind": "ring",
        "id": "ring",
        "nav": "Step through",
        "title": "The ring, step by step",
        "lead": [
            "Choose an example and press ▶, or go step by step with › or the arrow keys.",
            "The first picture shows the ranks, what they compute, and which blocks travel. The second has a row for "
            "every query and a column for every key; each step fills the tiles that it computes, until every pair that "
            "the mask allows is filled, once.",
        ],
        "runs": [
            {"key": key, "about": abouts[key.split("|")[3]], **run} for key, run in zip(runs, shared, strict=True)
        ],
        "tables": tables,
        "first": RING,
        "first_query": FIRST_QUERY,
        "tokens": SEQ_LEN,
        "presets": [{"key": key, "label": label, "about": about} for key, label, about in PRESETS],
        "choices": {
            name: [choice._asdict() for choice in choices]
            for name, choices in (
                ("ranks", RANKS),
                ("layout", LAYOUTS),
                ("mask", MASKS),
                ("algorithm", ALGORITHM_CHOICES),
                ("direction", DIRECTIONS),
            )
        },
        "directed": _takers("direction"),
        "meshed": _takers("mesh"),
        "refusals": list_refusals(),
    }


def _takers(option: str) -> list[str]:
    return [name for name, algorithm in ALGORITHMS.items() if option in algorithm.options]

"""The lesson: ring attention stepped through, broken, timed and asked about. What `ringspan page` writes."""

from typing import Any

from ringspan.algorithms import ALGORITHMS
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
from ringspan.page.hiding import describe_hiding
from ringspan.page.html import assemble
from ringspan.page.memory import describe_memory
from ringspan.page.questions import PLAIN, RING, WINDOW, list_questions
from ringspan.page.runs import Json, describe_run, share_tables

FIRST_QUERY = 29
PRESETS = (
    (RING, "The ring", "Causal mask, zigzag layout: every rank busy in every step."),
    (PLAIN, "Who idles?", "Causal mask, contiguous layout: rank 0 waits for three steps."),
    ("4|contiguous|full|pass_kv|forward", "No mask", "Every block visits every rank once."),
    (WINDOW, "Sliding window", "Blocks stop travelling when nobody needs them."),
    ("4|zigzag|causal|pass_q|forward", "Queries travel", "Pass-Q: keys rest, partial results go home."),
    ("4|zigzag|causal|ulysses|", "Ulysses", "Tokens are exchanged for heads, and back."),
    ("8|zigzag|causal|double_ring|", "Two nodes", "A ring in each node, a slower ring between them."),
    ("4|zigzag|causal|decode_replicated|", "Decode", "One new token against a cache spread over ranks."),
)


def build_lesson(command: str = "ringspan page") -> str:
    """The lesson as one HTML file."""
    return assemble(describe_lesson(command))


def describe_lesson(command: str = "ringspan page") -> dict[str, Any]:
    """The payload of the lesson."""
    runs = {one.key: describe_run(run_combination(one)) for one in list_combinations()}
    faults, hiding, memory = describe_faults(), describe_hiding(), describe_memory()
    return {
        "title": "Ring attention, step by step",
        "lead": [
            "A sequence too long for one device is spread over several ranks. Each keeps its own queries, and blocks "
            "of keys and values travel round a ring until every query has met every key it may see. The result is "
            "exact.",
            "Everything here is computed by the library: the schedules are those it runs, the numbers those of its "
            "simulator. Step through it, break it, and see what it costs.",
        ],
        "command": command,
        "foot": "This file loads nothing from the network. All numbers were computed when it was written, in float64, "
        f"for {SEQ_LEN} tokens, 8 query heads and 2 KV heads, unless a section says otherwise.",
        "sections": [
            ring_section(runs),
            {
                "kind": "faults",
                "id": "break",
                "nav": "Break it",
                "title": "Break it",
                "lead": [
                    "Choose what goes wrong. The error is that of a real run; the verdict is that of the proof every "
                    "schedule must pass before Ringspan runs it. Four ranks, causal mask, 32 tokens."
                ],
                "faults": faults,
            },
            {
                "kind": "hiding",
                "id": "time",
                "nav": "Time",
                "title": "When does the ring hide its messages?",
                "lead": [
                    "While a rank computes on one block, the next one is on its way. Compute grows with the square of "
                    "the tokens, messages only linearly, so from some length on the messages cost nothing.",
                    f"Predicted for {hiding['ranks']} × {hiding['device']}, one layer with {hiding['heads'][0]} query "
                    f"heads over {hiding['heads'][1]} KV heads of {hiding['head_dim']} elements, bfloat16, "
                    "causal mask.",
                ],
                **hiding,
            },
            {
                "kind": "memory",
                "id": "memory",
                "nav": "Memory",
                "title": "What must one rank hold?",
                "lead": [
                    f"Attention of one layer over {memory['tokens']} tokens, {memory['heads'][0]} heads of "
                    f"{memory['head_dim']} elements, bfloat16. In the ring everything is a share of the tokens, "
                    "so memory falls as 1 / P; an "
                    "all-gather keeps all keys and values on every rank."
                ],
                **memory,
            },
            {
                "kind": "questions",
                "id": "questions",
                "nav": "Questions",
                "title": "Questions",
                "lead": ["Each answer can be read off this page. An answer is checked at once."],
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
        "title": "The ring, stepped through",
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

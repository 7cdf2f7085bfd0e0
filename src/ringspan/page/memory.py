"""What must one rank hold? Bytes of one layer's attention, by number of ranks and algorithm."""

from typing import Any

from ringspan.algorithms.all_gather import ALL_GATHER
from ringspan.algorithms.pass_kv import PASS_KV
from ringspan.algorithms.pass_q import PASS_Q
from ringspan.algorithms.ulysses import ULYSSES
from ringspan.page.units import format_tokens
from ringspan.planner.cost import Shard
from ringspan.planner.plan.memory import attention_buffers
from ringspan.planner.software import RINGSPAN

TOKENS = 2**20
NUM_RANKS = (1, 2, 4, 8, 16, 32)
SHOWN = (PASS_KV, PASS_Q, ALL_GATHER, ULYSSES)
SHARD = Shard.dense(1, 32, 32, 128, 2, RINGSPAN)


def describe_memory() -> dict[str, Any]:
    """Per algorithm and number of ranks: the bytes of the rank's own tokens, and those of the buffers."""
    return {
        "tokens": format_tokens(TOKENS),
        "heads": [SHARD.num_heads, SHARD.num_kv_heads],
        "head_dim": SHARD.head_dim,
        "ranks": list(NUM_RANKS),
        "algorithms": [
            {"key": one.name, "label": one.label, "bytes": [count_bytes(one.name, ranks) for ranks in NUM_RANKS]}
            for one in SHOWN
        ],
    }


def count_bytes(algorithm: str, ranks: int) -> list[int]:
    """Q of the rank's tokens, k and v of them, and what a call takes above its inputs (output and messages)."""
    tokens = -(-TOKENS // ranks)
    buffers = attention_buffers(algorithm, ranks, ranks, tokens, tokens, SHARD)
    return [int(tokens * SHARD.q_bytes), int(tokens * SHARD.kv_bytes), int(buffers)]

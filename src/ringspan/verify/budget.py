"""How large may the rounding error of a correct attention be?

The bound follows the computation. Let u be the unit roundoff of the accumulator (2^-53 for float64, 2^-24 otherwise)
and h that of the tensors themselves (2^-8 for bfloat16, 2^-11 for float16). For one query with n visible keys:

- A score is a dot product of `dim` terms: its error is at most (dim + 2) · u · scale · sum|q_i k_i|, called s.
- A weight exp(score - max) / sum carries twice that, since the sum carries it too, and the sum of n terms adds n · u.
- Each of P - 1 merges rescales and adds: 8 · u per merge.
- The weighted sum of n values adds n · u, relative to sum_j p_j |v_j|, which the oracle supplies.

So |error of out| <= (2 s + (2 n + 8 P + 16) u) · sum_j p_j |v_j|. Gradients are sums with the same weights; their bound
has the same factor with magnitudes of their own, doubled because delta carries the error of out.

In half types kernels round the weights and every partial result to the type: (P + 4) · h is added to the factor.
Everything is doubled once more: bounds of this kind hold to first order only.
"""

from typing import NamedTuple

import numpy as np

from ringspan.verify.oracle import OracleAnswer, Question, operands, per_head, products, sum_heads
from ringspan.verify.patterns import Numbers

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


class Budget(NamedTuple):
    """The largest error allowed for each number, in the shapes of the answer."""

    out: Numbers
    lse: Numbers
    dq: Numbers
    dk: Numbers
    dv: Numbers
    dsinks: Numbers | None


def budget(question: Question, right: OracleAnswer, dtype: str, world_size: int) -> Budget:
    """The error budget of one case."""
    q, k, v = operands(question)
    accumulator = ROUNDOFF["float64" if dtype == "float64" else "float32"]
    half = ROUNDOFF[dtype] if dtype in ("bfloat16", "float16") else 0.0
    num_keys = q.shape[-2] + k.shape[-2]  # of the longer of the two sums, in out and in dk
    score_size = abs(question.scale) * (abs(q) @ abs(k).swapaxes(-1, -2)) * (per_head(question.counts) > 0)
    score_error = (q.shape[-1] + 2) * accumulator * score_size.max(-1, initial=0.0)[..., None]
    steps = (2 * num_keys + 8 * world_size + 16) * accumulator + (world_size + 4) * half
    factor = 2 * (2 * score_error + steps)  # (batch, heads, n, 1)

    size_v, size_dout = abs(v), abs(question.dout)
    out = factor * (right.weights @ size_v) + accumulator
    with np.errstate(invalid="ignore"):
        lse_size = np.where(np.isfinite(right.lse), abs(right.lse), 0.0)
    lse = factor[..., 0] * (1 + lse_size)
    dprobs_size = size_dout @ size_v.swapaxes(-1, -2)
    dscores_size = right.weights * (dprobs_size + (right.weights * dprobs_size).sum(-1, keepdims=True))
    # Each query brings its own factor into the sums over queries that dk and dv are.
    dq, dk, _ = products(_unturned(question), abs(q), abs(k), factor * dscores_size, right.weights)
    dv = (factor * right.weights).swapaxes(-1, -2) @ size_dout
    dsinks = None
    if question.sinks is not None:
        share = np.exp(question.sinks[:, None] - right.lse)
        by_row = share * (size_dout * (right.weights @ size_v)).sum(-1)
        dsinks = 4 * (factor[..., 0] * by_row).sum((0, 2)) + accumulator
    return Budget(
        out,
        lse,
        4 * abs(dq) + accumulator,
        4 * abs(sum_heads(question, dk)) + accumulator,
        2 * sum_heads(question, dv) + accumulator,
        dsinks,
    )


def _unturned(question: Question) -> Question:
    """Turning by RoPE mixes two components; for magnitudes the sum of both is bounded by twice the larger."""
    if question.q_turns is None:
        return question
    return Question(
        question.q, question.k, question.v, abs(question.dout), question.counts, 2 * question.scale, question.kv_of
    )

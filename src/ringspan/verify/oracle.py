"""What is the right answer? Dense attention in float64, with all gradients, by the textbook formulas.

Nothing here uses the library's kernels. The whole matrix of weights is kept. A question carries more freedom than
correct attention needs: `counts` says how often each key counts for each query, `kv_of` which KV head serves which
query head, `q_turns` and `kv_turns` by which positions RoPE turns the rows. The diagnosis asks what a mistake would
give by changing these fields.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringspan.verify.patterns import Numbers


@dataclass(frozen=True, slots=True)
class Question:
    """One attention: q (batch, heads, n, dim), k and v (batch, KV heads, m, ...), dout as the output."""

    q: Numbers
    k: Numbers
    v: Numbers
    dout: Numbers
    counts: Numbers  # (n, m) or (batch, n, m): 1 for a visible pair, 0 for a hidden one
    scale: float
    kv_of: tuple[int, ...]
    sinks: Numbers | None = None
    softcap: float | None = None
    q_turns: Numbers | None = None
    kv_turns: Numbers | None = None


class OracleAnswer(NamedTuple):
    """Outputs and gradients of a question, and what the error budget and the diagnosis need of the way there."""

    out: Numbers
    lse: Numbers
    dq: Numbers
    dk: Numbers
    dv: Numbers
    dsinks: Numbers | None
    weights: Numbers  # (batch, heads, n, m)
    scores: Numbers  # the same shape, before masking


def answer(question: Question) -> OracleAnswer:
    """Solve a question. A row that counts no key has out = 0 and lse = -inf, or the sink's logit."""
    q, k, v = operands(question)
    scores, slope = score_slopes(question, q, k)
    weights, lse = softmax(question, scores)
    out = weights @ v
    dsinks = None
    if question.sinks is not None:
        with np.errstate(invalid="ignore"):
            sink_share = np.exp(question.sinks[:, None] - lse)
        dsinks = -(sink_share * (question.dout * out).sum(-1)).sum((0, 2))
    dprobs = question.dout @ v.swapaxes(-1, -2)
    delta = (question.dout * out).sum(-1, keepdims=True)
    dscores = weights * (dprobs - delta) * slope
    dq, dk_heads, dv_heads = products(question, q, k, dscores, weights)
    return OracleAnswer(
        out, lse, dq, sum_heads(question, dk_heads), sum_heads(question, dv_heads), dsinks, weights, scores
    )


def forward(question: Question) -> tuple[Numbers, Numbers]:
    """Only out and lse."""
    q, k, v = operands(question)
    weights, lse = softmax(question, score_slopes(question, q, k)[0])
    return weights @ v, lse


def operands(question: Question) -> tuple[Numbers, Numbers, Numbers]:
    """q, k and v with one entry per query head, turned by RoPE if the question has positions."""
    heads = list(question.kv_of)
    q, k, v = question.q, question.k[:, heads], question.v[:, heads]
    if question.q_turns is not None and question.kv_turns is not None:
        q, k = turn(q, question.q_turns), turn(k, question.kv_turns)
    return q, k, v


def turn(x: Numbers, positions: Numbers, *, back: bool = False) -> Numbers:
    """RoPE: the pair (i, i + dim/2) of a row at position p turns by the angle p · 10000^(-2i/dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles) * (-1 if back else 1)
    first, second = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]], -1)


def score_slopes(question: Question, q: Numbers, k: Numbers) -> tuple[Numbers, Numbers]:
    """Scores, and the derivative of the soft cap at each of them (1 without one)."""
    raw = q @ k.swapaxes(-1, -2) * question.scale
    if question.softcap is None:
        return raw, np.ones_like(raw)
    squashed = np.tanh(raw / question.softcap)
    return question.softcap * squashed, 1 - squashed**2


def softmax(question: Question, scores: Numbers) -> tuple[Numbers, Numbers]:
    """Weights (batch, heads, n, m), 0 where a key does not count, and the log-sum-exp with the sinks in it."""
    counts = per_head(question.counts)
    logits = np.where(counts > 0, scores, -np.inf)
    peak = logits.max(-1, keepdims=True, initial=-np.inf)
    if question.sinks is not None:
        peak = np.maximum(peak, question.sinks[:, None, None])
    peak = np.where(np.isneginf(peak), 0.0, peak)
    parts = counts * np.exp(logits - peak)
    total = parts.sum(-1, keepdims=True)
    if question.sinks is not None:
        total = total + np.exp(question.sinks[:, None, None] - peak)
    with np.errstate(divide="ignore"):
        lse = (peak + np.log(total))[..., 0]
    return parts / np.where(total == 0, 1.0, total), lse


def per_head(counts: Numbers) -> Numbers:
    """Counts with axes for batch and heads."""
    return counts[:, None] if counts.ndim == 3 else counts[None, None]


def products(
    question: Question, q: Numbers, k: Numbers, dscores: Numbers, weights: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """dq, and dk and dv with one entry per query head, from the gradients of the scores."""
    dq = dscores @ k * question.scale
    dk = dscores.swapaxes(-1, -2) @ q * question.scale
    dv = weights.swapaxes(-1, -2) @ question.dout
    if question.q_turns is not None and question.kv_turns is not None:
        dq, dk = turn(dq, question.q_turns, back=True), turn(dk, question.kv_turns, back=True)
    return dq, dk, dv


def sum_heads(question: Question, by_head: Numbers) -> Numbers:
    """The gradients of the KV heads: each collects what the query heads that it serves sent back."""
    total = np.zeros((by_head.shape[0], question.k.shape[1], *by_head.shape[2:]))
    for head, kv_head in enumerate(question.kv_of):
        total[:, kv_head] += by_head[:, head]
    return total


class BlockParts(NamedTuple):
    """Attention to the keys of each rank by itself: (ranks, batch, heads, n, ...)."""

    out: Numbers
    lse: Numbers
    peak: Numbers


def block_parts(question: Question, owner: Numbers, num_blocks: int) -> BlockParts:
    """The normalised partial results that a ring would merge, without sinks."""
    q, k, v = operands(question)
    scores, _ = score_slopes(question, q, k)
    outs, lses, peaks = [], [], []
    for block in range(num_blocks):
        keys = owner == block
        logits = np.where(per_head(question.counts)[..., keys] > 0, scores[..., keys], -np.inf)
        peak = logits.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(peak), 0.0, peak)
        parts = np.exp(logits - base[..., None])
        total = parts.sum(-1)
        with np.errstate(divide="ignore"):
            lses.append(base + np.log(total))
        outs.append(parts @ v[..., keys, :] / np.where(total == 0, 1.0, total)[..., None])
        peaks.append(peak)
    return BlockParts(np.stack(outs), np.stack(lses), np.stack(peaks))

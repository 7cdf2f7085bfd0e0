"""Mistakes in the softmax and in merging partial results: weights, log-sum-exps, scales, sinks and soft caps."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.oracle import BlockParts, block_parts, operands, per_head, softmax
from ringspan.verify.patterns import Numbers

LOG2 = math.log(2)


def guess_merges(setting: Setting) -> Iterator[Guess]:
    """All guesses about merging, scaling, sinks and normalising."""
    yield from _scales(setting)
    yield from _sinks(setting)
    yield from _softcaps(setting)
    if setting.case.world_size > 1:
        parts = block_parts(setting.question, setting.kv_rank, setting.case.world_size)
        yield from _at_once(setting, parts)
        yield from _one_by_one(setting, parts)
        yield from _running(setting, parts)
    yield from _normalising(setting)
    yield from _only_lse(setting)


def _scales(setting: Setting) -> Iterator[Guess]:
    dim = setting.question.q.shape[-1]
    usual = dim**-0.5
    heads = setting.case.num_heads
    scales = (
        ("scale left out", "1", 1.0),
        ("scale applied twice", "its square", setting.question.scale**2),
        ("given scale ignored", "1/sqrt(head_dim)", usual),
        ("wrong scale", "1/head_dim", 1 / dim),
        ("wrong scale", "1/sqrt(heads * head_dim)", (heads * dim) ** -0.5),
        ("wrong scale", "1/sqrt(head_dim / 2)", (dim / 2) ** -0.5),
        ("wrong scale", "1/sqrt(2 * head_dim)", (dim * 2) ** -0.5),
        ("exponent in base 2", "2^s for e^s", setting.question.scale * LOG2),
        ("exponent in base 2", "log2(e) twice", setting.question.scale / LOG2),
    )
    for mistake, detail, scale in scales:
        if not math.isclose(scale, setting.question.scale):
            yield from setting.out_and_lse(mistake, f"scale {detail}", scale=scale)


def _sinks(setting: Setting) -> Iterator[Guess]:
    sinks = setting.question.sinks
    if sinks is None:
        return
    yield from setting.out_and_lse("sink ignored", sinks=None)
    for times in {2, setting.case.world_size} - {1}:
        yield from setting.out_and_lse("sink counted more than once", f"{times} times", sinks=sinks + math.log(times))
    yield from setting.out_and_lse("sink of another head", "the next one", sinks=np.roll(sinks, -1))
    yield from setting.out_and_lse("sink of another head", "the one before", sinks=np.roll(sinks, 1))
    yield from setting.out_and_lse("sink of another head", "in reverse", sinks=sinks[::-1])
    yield from setting.out_and_lse("sink scaled like a score", sinks=sinks * setting.question.scale)
    # A sink in a block of its own is one more key with value 0; only the lse can be wrong.
    without, lse = setting.out_and_lse("sink ignored", sinks=None)
    yield Guess("sink missing in the log-sum-exp", "lse", lse.values)
    share = np.exp(sinks[:, None] - setting.right.lse)
    yield Guess("sink added to the output", "out", setting.right.out + share[..., None])
    yield Guess("sink ignored", "out", without.values * (1 - share[..., None]) ** 2, "its share is taken twice")


def _softcaps(setting: Setting) -> Iterator[Guess]:
    question, cap = setting.question, setting.question.softcap
    if cap is None:
        return
    yield from setting.out_and_lse("softcap ignored", softcap=None)
    yield from setting.out_and_lse("softcap before the scale", "the scale after it", softcap=cap * question.scale)
    yield from setting.out_and_lse(
        "softcap before the scale", "of scores without a scale", softcap=cap / question.scale
    )
    q, k, v = operands(question)
    raw = q @ k.swapaxes(-1, -2) * question.scale
    squashed = {
        "not multiplied again": np.tanh(raw / cap),
        "not divided before": cap * np.tanh(raw),
        "clipped": np.clip(raw, -cap, cap),
        "applied twice": cap * np.tanh(np.tanh(raw / cap)),
    }
    for detail, scores in squashed.items():
        weights, lse = softmax(question, scores)
        yield Guess("wrong softcap", "out", weights @ v, detail)
        yield Guess("wrong softcap", "lse", lse, detail)


def _weighted(parts: BlockParts, weights: Numbers) -> Numbers:
    """The mean of the partial outputs with weights (ranks, batch, heads, n)."""
    total = weights.sum(0)
    out: Numbers = (weights[..., None] * parts.out).sum(0) / np.where(total == 0, 1, total)[..., None]
    return out


def _at_once(setting: Setting, parts: BlockParts) -> Iterator[Guess]:
    """Wrong weights for all partial results alike."""
    has_keys = np.isfinite(parts.lse).astype(float)
    yield Guess("partials added", "out", parts.out.sum(0))
    yield Guess("partials averaged", "out", parts.out.mean(0), "over all blocks")
    yield Guess("partials averaged", "out", _weighted(parts, has_keys), "over the blocks that are seen")
    with np.errstate(over="ignore", invalid="ignore"):
        lse = parts.lse - setting.right.lse
        yield Guess("log-sum-exp in base 2", "out", _weighted(parts, np.exp(lse * LOG2)), "2^lse for e^lse")
        yield Guess("log-sum-exp in base 2", "out", _weighted(parts, np.exp(lse / LOG2)), "log2 of the sum")
        base = np.where(np.isneginf(parts.peak), 0.0, parts.peak)
        yield Guess(
            "running maximum ignored", "out", _weighted(parts, np.exp(parts.lse - base)), "sums added as they are"
        )
        peaks = np.exp(parts.peak - parts.peak.max(0))
        yield Guess("running maximum ignored", "out", _weighted(parts, np.nan_to_num(peaks)), "maxima for weights")
        yield Guess("weights not normalised", "out", (np.exp(parts.lse)[..., None] * parts.out).sum(0))
        yield Guess("merge weights swapped", "out", _weighted(parts, np.nan_to_num(np.exp(-lse), posinf=0.0)))
    if not np.isfinite(parts.lse).all():
        is_short = np.isneginf(parts.lse.min(0)[..., None]) & np.isfinite(setting.right.lse)[..., None]
        for detail, value in (("is left at zero", 0.0), ("is NaN", np.nan)):
            spoilt = np.where(is_short, value, setting.right.out)
            yield Guess("empty block spoils its rows", "out", spoilt, f"a row that sees no key of some block {detail}")
        finite = np.where(np.isneginf(parts.lse), 0.0, parts.lse)
        total = np.logaddexp.reduce(finite, axis=0)
        out = (np.exp(finite - total)[..., None] * parts.out).sum(0)
        yield from with_sinks(setting, "empty block weighted", "log-sum-exp 0 for a block without a key", out, total)


def _share(a: Numbers, b: Numbers) -> Numbers:
    """exp(a) / (exp(a) + exp(b)), 0 where both are -inf."""
    with np.errstate(invalid="ignore", over="ignore"):
        share: Numbers = np.nan_to_num(np.exp(a - np.logaddexp(a, b)), nan=0.0)[..., None]
    return share


class _Partials(NamedTuple):
    """The accumulated result, and the result of the next block."""

    out: Numbers
    lse: Numbers
    new: Numbers
    new_lse: Numbers


def _added(x: _Partials, weight: float | Numbers, new_weight: float | Numbers) -> Numbers:
    out: Numbers = x.out * weight + x.new * new_weight
    return out


_OUTS: tuple[tuple[str, str, Callable[[_Partials], Numbers]], ...] = (
    ("", "", lambda x: _added(x, _share(x.lse, x.new_lse), _share(x.new_lse, x.lse))),
    (
        *("merge weights swapped", "the old result gets the new one's weight"),
        lambda x: _added(x, _share(x.new_lse, x.lse), _share(x.lse, x.new_lse)),
    ),
    (
        *("log-sum-exp in base 2", "log2 taken for ln"),
        lambda x: _added(x, _share(x.lse / LOG2, x.new_lse / LOG2), _share(x.new_lse / LOG2, x.lse / LOG2)),
    ),
    ("partials not rescaled", "the accumulated one", lambda x: _added(x, 1, _share(x.new_lse, x.lse))),
    ("partials not rescaled", "the new one", lambda x: _added(x, _share(x.lse, x.new_lse), 1)),
    (
        *("partials averaged", "two at a time"),
        lambda x: np.where(np.isneginf(x.lse)[..., None], x.new, (x.out + x.new) / 2),
    ),
    ("larger partial wins", "", lambda x: np.where((x.new_lse > x.lse)[..., None], x.new, x.out)),
    ("last partial wins", "", lambda x: x.new),
    (
        *("last partial wins", "of the blocks that are seen"),
        lambda x: np.where(np.isneginf(x.new_lse)[..., None], x.out, x.new),
    ),
)
_LSES: tuple[tuple[str, Callable[[_Partials], Numbers]], ...] = (
    ("", lambda x: np.logaddexp(x.lse, x.new_lse)),
    ("that of the first block stays", lambda x: np.where(np.isneginf(x.lse), x.new_lse, x.lse)),
    ("that of the latest block replaces it", lambda x: x.new_lse),
    ("that of the latest block that is seen stays", lambda x: np.where(np.isneginf(x.new_lse), x.lse, x.new_lse)),
    ("the larger one stays", lambda x: np.maximum(x.lse, x.new_lse)),
    (
        "log-sum-exps added",
        lambda x: np.where(np.isneginf(x.lse), 0, x.lse) + np.where(np.isneginf(x.new_lse), 0, x.new_lse),
    ),
)


def _weighted_by(merge_lse: Callable[[_Partials], Numbers], x: _Partials) -> tuple[Numbers, Numbers]:
    """Both results weighted with exp(lse - merged lse): normalised only if the merged lse is right."""
    merged = merge_lse(x)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = (np.nan_to_num(np.exp(lse - merged))[..., None] for lse in (x.lse, x.new_lse))
        return _added(x, *weights), merged


def _wrong_merges() -> Iterator[tuple[str, str, Callable[[_Partials], tuple[Numbers, Numbers]]]]:
    """Every way to merge outputs with every way to merge log-sum-exps, but for the right one."""
    for mistake, detail, merge_out in _OUTS:
        for which, merge_lse in _LSES:
            if mistake or which:
                what = ", ".join(filter(None, (detail, which)))
                yield mistake or "log-sum-exp not updated", what, partial(_merged, merge_out, merge_lse)
    for which, merge_lse in _LSES:
        if which:
            yield "log-sum-exp not updated", f"{which}, and the weights follow it", partial(_weighted_by, merge_lse)


def _merged(
    merge_out: Callable[[_Partials], Numbers], merge_lse: Callable[[_Partials], Numbers], x: _Partials
) -> tuple[Numbers, Numbers]:
    return merge_out(x), merge_lse(x)


def _one_by_one(setting: Setting, parts: BlockParts) -> Iterator[Guess]:
    """Wrong merges of one block after the other, in the orders in which rings and gathers visit them."""
    for order, blocks_of in _orders(setting.case.world_size).items():
        for mistake, detail, merge in _wrong_merges():
            out, lse = np.zeros_like(setting.right.out), np.full_like(setting.right.lse, -np.inf)
            for rank in setting.ranks:
                rows = setting.q_rank == rank
                own_out, own_lse = out[:, :, rows], lse[:, :, rows]
                for block in blocks_of(rank):
                    new = parts.out[block][:, :, rows], parts.lse[block][:, :, rows]
                    own_out, own_lse = merge(_Partials(own_out, own_lse, *new))
                out[:, :, rows], lse[:, :, rows] = own_out, own_lse
            yield from with_sinks(setting, mistake, f"{detail}, {order}".lstrip(", "), out, lse)


def _orders(world_size: int) -> dict[str, Callable[[int], Sequence[int]]]:
    """The orders in which a rank visits the blocks."""
    return {
        "forward ring": lambda rank: [(rank - step) % world_size for step in range(world_size)],
        "reverse ring": lambda rank: [(rank + step) % world_size for step in range(world_size)],
        "rank order": lambda _: range(world_size),
    }


def _running(setting: Setting, parts: BlockParts) -> Iterator[Guess]:
    """Sums that are carried with a running maximum m: every sum must be rescaled from its own maximum to the new m."""
    with np.errstate(invalid="ignore"):
        sums = np.nan_to_num(np.exp(parts.lse - parts.peak))
    values = parts.out * sums[..., None]
    names = ("the accumulated output", "the accumulated sum", "the new output", "the new sum")
    for order, blocks_of in _orders(setting.case.world_size).items():
        for is_scaled in itertools.product((True, False), repeat=4):
            if all(is_scaled):
                continue
            out, lse = np.zeros_like(setting.right.out), np.full_like(setting.right.lse, -np.inf)
            for rank in setting.ranks:
                rows = setting.q_rank == rank
                blocks = [
                    (values[i][:, :, rows], sums[i][:, :, rows], parts.peak[i][:, :, rows]) for i in blocks_of(rank)
                ]
                out[:, :, rows], lse[:, :, rows] = _carried(blocks, is_scaled)
            what = ", ".join(name for name, is_right in zip(names, is_scaled, strict=True) if not is_right)
            yield from with_sinks(setting, "partials not rescaled", f"{what}, {order}", out, lse)


def _carried(
    blocks: Sequence[tuple[Numbers, Numbers, Numbers]], is_scaled: tuple[bool, ...]
) -> tuple[Numbers, Numbers]:
    """Out and lse of blocks (weighted values, sum, maximum), of which some sums are not rescaled."""
    out, total, peak = blocks[0]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for new, new_total, new_peak in blocks[1:]:
            highest = np.maximum(peak, new_peak)
            old_factor, new_factor = (np.nan_to_num(np.exp(x - highest)) for x in (peak, new_peak))
            factors = (old_factor, old_factor, new_factor, new_factor)
            a, b, c, d = (x if scaled else np.ones_like(x) for x, scaled in zip(factors, is_scaled, strict=True))
            out, total, peak = out * a[..., None] + new * c[..., None], total * b + new_total * d, highest
        return out / np.where(total == 0, 1.0, total)[..., None], np.where(total > 0, peak + np.log(total), -np.inf)


def with_sinks(setting: Setting, mistake: str, detail: str, out: Numbers, lse: Numbers) -> list[Guess]:
    """A result without sinks, which then join it correctly."""
    if setting.question.sinks is not None:
        with np.errstate(invalid="ignore", over="ignore"):
            total = np.logaddexp(lse, setting.question.sinks[:, None])
            out, lse = out * np.exp(lse - total)[..., None], total
    return [Guess(mistake, "out", out, detail), Guess(mistake, "lse", lse, detail)]


def _normalising(setting: Setting) -> Iterator[Guess]:
    right = setting.right
    peak = np.where(right.weights > 0, right.scores, -np.inf).max(-1, initial=-np.inf)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.nan_to_num(np.exp(right.lse - peak), nan=1.0)[..., None]
        yield Guess("weights not normalised", "out", right.out * total, "the sum was never divided by")
        yield Guess("weights not normalised", "out", right.out / total, "divided by the sum twice")
    yield from _over_queries(setting)
    for factor in (2, 0.5, setting.case.world_size, 1 / setting.case.world_size):
        if factor != 1:
            yield Guess("output scaled", "out", right.out * factor, f"by {factor:g}")
    yield Guess("output left at zero", "out", np.zeros_like(right.out))
    yield Guess("NaN", "out", np.full_like(right.out, np.nan))
    yield Guess("output negated", "out", -right.out)


def _over_queries(setting: Setting) -> Iterator[Guess]:
    """A softmax along the wrong axis: for each key over the queries, of one rank or of all."""
    v = operands(setting.question)[2]
    logits = np.where(per_head(setting.question.counts) > 0, setting.right.scores, -np.inf)
    for detail, of_q in (("of each rank", setting.q_rank), ("of all ranks", np.zeros_like(setting.q_rank))):
        weights = np.zeros_like(logits)
        for rank in np.unique(of_q):
            rows = of_q == rank
            own = logits[:, :, rows]
            peak = own.max(2, keepdims=True)
            parts = np.exp(own - np.where(np.isneginf(peak), 0.0, peak))
            total = parts.sum(2, keepdims=True)
            weights[:, :, rows] = parts / np.where(total == 0, 1.0, total)
        yield Guess("softmax over queries", "out", weights @ v, detail)


def _only_lse(setting: Setting) -> Iterator[Guess]:
    right, question = setting.right, setting.question
    with np.errstate(invalid="ignore", divide="ignore"):
        yield Guess("log-sum-exp in base 2", "lse", right.lse / LOG2, "returned as log2")
        yield Guess("log-sum-exp in base 2", "lse", right.lse * LOG2, "taken for log2 and converted")
        peak = np.where(right.weights > 0, right.scores, -np.inf).max(-1, initial=-np.inf)
        yield Guess("maximum missing in the log-sum-exp", "lse", right.lse - peak)
        yield Guess("only the maximum in the log-sum-exp", "lse", peak)
        yield Guess("sum without a logarithm", "lse", np.exp(right.lse))
        yield Guess("log-sum-exp negated", "lse", -right.lse)
        yield Guess("log-sum-exp left at zero", "lse", np.zeros_like(right.lse))
        for scale in (question.scale, 1 / question.scale):
            yield Guess("scale in the log-sum-exp", "lse", right.lse * scale)
    if setting.case.world_size > 1:
        parts = block_parts(question, setting.kv_rank, setting.case.world_size)
        size, rows = setting.case.world_size, np.arange(len(setting.q_rank))
        for step in range(size):
            blocks = (setting.q_rank.astype(int) - step) % size
            own = np.moveaxis(parts.lse[blocks, :, :, rows], 0, -1)
            yield Guess("log-sum-exp of one block", "lse", own, f"that of step {step}" if step else "the rank's own")
        yield Guess("log-sum-exp of one block", "lse", parts.lse.max(0), "the largest")
        finite = np.where(np.isneginf(parts.lse), 0, parts.lse)
        yield Guess("log-sum-exps added", "lse", finite.sum(0))

"""Mistakes in the backward pass, where the forward pass is right."""

from collections.abc import Callable, Iterator

import numpy as np

from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.oracle import block_parts, operands, per_head, products, score_slopes, sum_heads, turn
from ringspan.verify.patterns import Numbers

NAMES = ("dq", "dk", "dv")


def guess_gradients(setting: Setting) -> Iterator[Guess]:
    """All guesses about gradients."""
    yield from _recomputed(setting)
    if setting.case.world_size > 1:
        yield from _contributions(setting)
        yield from _local_softmax(setting)
    yield from _groups(setting)
    yield from _factors(setting)
    yield from _sinks(setting)


def _gradients(setting: Setting, dscores: Numbers, weights: Numbers) -> dict[str, Numbers]:
    q, k, _ = operands(setting.question)
    dq, dk, dv = products(setting.question, q, k, dscores, weights)
    return {"dq": dq, "dk": sum_heads(setting.question, dk), "dv": sum_heads(setting.question, dv)}


def _guesses(mistake: str, detail: str, grads: dict[str, Numbers]) -> Iterator[Guess]:
    for name, values in grads.items():
        yield Guess(mistake, name, values, detail)


def _steps(setting: Setting) -> tuple[Numbers, Numbers, Numbers]:
    """dP, delta and the slope of the soft cap."""
    q, k, v = operands(setting.question)
    dprobs = setting.question.dout @ v.swapaxes(-1, -2)
    delta = (setting.question.dout * setting.right.out).sum(-1, keepdims=True)
    return dprobs, delta, score_slopes(setting.question, q, k)[1]


def _recomputed(setting: Setting) -> Iterator[Guess]:
    dprobs, delta, slope = _steps(setting)
    weights = setting.right.weights
    yield from _guesses("delta left out", "", _gradients(setting, weights * dprobs * slope, weights))
    yield from _guesses(
        "delta left out", "with the wrong sign", _gradients(setting, weights * (dprobs + delta) * slope, weights)
    )
    dscores = weights * (dprobs - delta)
    if setting.question.softcap is not None:
        yield from _guesses("softcap missing in the backward pass", "", _gradients(setting, dscores, weights))
        yield from _guesses(
            "softcap missing in the backward pass", "twice", _gradients(setting, dscores * slope**2, weights)
        )
    with np.errstate(invalid="ignore", over="ignore"):
        unmasked = np.nan_to_num(np.exp(setting.right.scores - setting.right.lse[..., None]), posinf=0.0)
    if (setting.question.counts == 0).any():
        mistake = "mask ignored in the backward pass"
        yield from _guesses(mistake, "", _gradients(setting, unmasked * (dprobs - delta) * slope, unmasked))
        own = setting.hops() == 0
        elsewhere = np.where(own, weights, unmasked)
        detail = "in the blocks of other ranks"
        yield from _guesses(mistake, detail, _gradients(setting, elsewhere * (dprobs - delta) * slope, elsewhere))
        within = np.where(own, unmasked, weights)
        detail = "in the rank's own block"
        yield from _guesses(mistake, detail, _gradients(setting, within * (dprobs - delta) * slope, within))


def _local_softmax(setting: Setting) -> Iterator[Guess]:
    """Each block normalised by its own log-sum-exp, not by that of all."""
    dprobs, delta, slope = _steps(setting)
    parts = block_parts(setting.question, setting.kv_rank, setting.case.world_size)
    keys = setting.kv_rank.astype(int)
    lse = np.moveaxis(parts.lse[keys], 0, -1)  # (batch, heads, n, m)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(np.where(per_head(setting.question.counts) > 0, setting.right.scores - lse, -np.inf))
    local_delta = (setting.question.dout[None] * parts.out).sum(-1)
    deltas = {"": delta, "and delta too": np.moveaxis(local_delta[keys], 0, -1)}
    for detail, own_delta in deltas.items():
        grads = _gradients(setting, weights * (dprobs - own_delta) * slope, weights)
        yield from _guesses("local softmax in the backward pass", detail, grads)
    right = setting.right.weights
    grads = _gradients(setting, right * (dprobs - deltas["and delta too"]) * slope, right)
    yield from _guesses("delta of one block", "each block has its own", grads)


def _contributions(setting: Setting) -> Iterator[Guess]:
    """Gradients as sums over ranks, of which some parts are missing, twice or in the wrong place."""
    dprobs, delta, slope = _steps(setting)
    weights, hops, size = setting.right.weights, setting.hops(), setting.case.world_size
    dscores = weights * (dprobs - delta) * slope

    def part(kept: Numbers) -> dict[str, Numbers]:
        return _gradients(setting, dscores * kept, weights * kept)

    local = part(hops == 0)
    yield from _guesses("gradient not summed over ranks", "each rank's own share only", local)
    for hop in range(size):
        own = part(hops == hop)
        whole = {name: getattr(setting.right, name) for name in NAMES}
        missing = {name: whole[name] - own[name] for name in NAMES}
        twice = {name: whole[name] + own[name] for name in NAMES}
        yield from _guesses("gradient of a block missing", f"that of step {hop}", missing)
        yield from _guesses("gradient of a block counted twice", f"that of step {hop}", twice)
        if hop:
            yield from _guesses("gradient overwritten", f"only that of step {hop} is left", own)
    for rank in setting.ranks:
        yield from _of_one_rank(setting, part, rank)
    rows_of = [np.flatnonzero(setting.kv_rank == rank) for rank in setting.ranks]
    for shift in (1, -1):
        for name in ("dk", "dv"):
            moved = getattr(setting.right, name).copy()
            for rank, rows in enumerate(rows_of):
                source = np.resize(rows_of[(rank + shift) % size], len(rows))
                moved[:, :, rows] = getattr(setting.right, name)[:, :, source]
            yield Guess("gradient on the wrong rank", name, moved, f"that of rank {shift:+}")


def _of_one_rank(setting: Setting, part: Callable[[Numbers], dict[str, Numbers]], rank: int) -> Iterator[Guess]:
    from_rank = part((setting.q_rank == rank)[:, None] & np.ones_like(setting.hops(), np.bool_))
    for name in ("dk", "dv"):
        whole = getattr(setting.right, name)
        yield Guess("gradient of a block missing", name, whole - from_rank[name], f"from rank {rank}'s queries")
        yield Guess("gradient of a block counted twice", name, whole + from_rank[name], f"from rank {rank}'s queries")


def _groups(setting: Setting) -> Iterator[Guess]:
    heads, kv_heads = setting.case.num_heads, setting.case.num_kv_heads
    if heads == kv_heads:
        return
    dprobs, delta, slope = _steps(setting)
    q, k, _ = operands(setting.question)
    dscores = setting.right.weights * (dprobs - delta) * slope
    _, dk, dv = products(setting.question, q, k, dscores, setting.right.weights)
    group = heads // kv_heads
    for name, by_head in (("dk", dk), ("dv", dv)):
        grouped = by_head.reshape(by_head.shape[0], kv_heads, group, *by_head.shape[2:])
        yield Guess("GQA group not summed", name, grouped[:, :, 0], "only its first head")
        yield Guess("GQA group not summed", name, grouped[:, :, -1], "only its last head")
        yield Guess("GQA group not summed", name, grouped.mean(2), "averaged")
        if kv_heads > 1:
            dealt = by_head.reshape(by_head.shape[0], group, kv_heads, *by_head.shape[2:]).sum(1)
            yield Guess("GQA repeat order in the backward pass", name, dealt, "head i adds to KV head i mod n")


def _factors(setting: Setting) -> Iterator[Guess]:
    right, size, scale = setting.right, setting.case.world_size, setting.question.scale
    for name in NAMES:
        x = getattr(right, name)
        if name != "dv":
            yield Guess("scale missing in the backward pass", name, x / scale, "")
            yield Guess("scale missing in the backward pass", name, x * scale, "applied twice")
            usual = setting.question.q.shape[-1] ** -0.5
            if scale != usual:
                yield Guess("scale missing in the backward pass", name, x / scale * usual, "1/sqrt(head_dim)")
        yield Guess("gradient missing", name, np.zeros_like(x))
        yield Guess("gradient negated", name, -x)
        for factor in sorted({2, size} - {1}):
            yield Guess("gradient summed more than once", name, x * factor, f"{factor} times")
            yield Guess("gradient averaged over ranks", name, x / factor, f"divided by {factor}")
        yield Guess("gradient on the wrong row", name, np.roll(x, 1, 2), "off by 1")
        yield Guess("gradient on the wrong row", name, np.roll(x, -1, 2), "off by -1")
        yield Guess("NaN in gradients", name, np.full_like(x, np.nan))
        heads = np.roll(x, 1, 1)
        yield Guess("gradient on the wrong head", name, heads, "off by 1")
        if setting.case.batch > 1:
            yield Guess("gradient on the wrong batch row", name, x[::-1], "in reverse")
    if right.dk.shape == right.dv.shape:
        yield Guess("dk and dv swapped", "dk", right.dv)
        yield Guess("dk and dv swapped", "dv", right.dk)
        for name, other in (("dk", right.dv), ("dv", right.dk)):
            x = getattr(right, name)
            half = x.shape[-1] // 2
            yield Guess("dk and dv swapped", name, np.concatenate([x[..., :half], other[..., :half]], -1), "halves")
            yield Guess("dk and dv swapped", name, np.concatenate([other[..., half:], x[..., half:]], -1), "halves")
            yield Guess("dk and dv swapped", name, np.concatenate([other[..., :half], x[..., half:]], -1), "halves")
            yield Guess("dk and dv swapped", name, np.concatenate([x[..., :half], other[..., half:]], -1), "halves")
        yield Guess("dk and dv swapped", "dk", right.dk + right.dv, "added to each other")
        yield Guess("dk and dv swapped", "dv", right.dk + right.dv, "added to each other")
    if setting.question.q_turns is not None and setting.question.kv_turns is not None:
        yield Guess("RoPE missing in the backward pass", "dq", turn(right.dq, setting.question.q_turns))
        yield Guess("RoPE missing in the backward pass", "dk", turn(right.dk, setting.question.kv_turns))


def _sinks(setting: Setting) -> Iterator[Guess]:
    dsinks = setting.right.dsinks
    if dsinks is None:
        return
    yield Guess("gradient missing", "dsinks", np.zeros_like(dsinks))
    yield Guess("gradient negated", "dsinks", -dsinks)
    for factor in sorted({2, setting.case.world_size, setting.case.batch} - {1}):
        yield Guess("gradient summed more than once", "dsinks", dsinks * factor, f"{factor} times")
        yield Guess("gradient averaged over ranks", "dsinks", dsinks / factor, f"divided by {factor}")
    delta = (setting.question.dout * setting.right.out).sum(-1)
    assert setting.question.sinks is not None
    by_row = -np.exp(setting.question.sinks[:, None] - setting.right.lse) * delta
    for rank in setting.ranks:
        detail = f"rank {rank}'s queries only"
        share = by_row[:, :, setting.q_rank == rank].sum((0, 2))
        yield Guess("gradient not summed over ranks", "dsinks", share, detail)

"""Mistakes about who sees whom: masks left out, shifted, or applied to the wrong positions."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from ringspan.verify.cases import LAYOUTS, make_layout
from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.patterns import Numbers, Pattern, parts_of, replace_part, visible


def guess_masks(setting: Setting) -> Iterator[Guess]:
    """All guesses about the mask."""
    counts = setting.question.counts
    if counts.ndim == 3:
        for row in range(len(counts)):
            yield from setting.out_and_lse("mask of another batch row", f"row {row}'s for all", counts=counts[row])
    for mistake, detail, pattern in _changed_patterns(setting.case.pattern):
        counts = visible(pattern, setting.case.q_layout().all_positions(), setting.case.kv_layout().all_positions())
        yield from setting.out_and_lse(mistake, detail, counts=counts)
    yield from _anchored(setting)
    yield from _elsewhere(setting)
    yield from _turned(setting)
    yield from _in_some_blocks(setting)
    yield from _empty_rows(setting)


def _changed_patterns(pattern: Pattern) -> Iterator[tuple[str, str, Pattern]]:
    kinds = {part[0] for part in parts_of(pattern)}
    everything: Pattern = ("full",)
    if kinds != {"full"}:
        yield "mask ignored", "every query sees every key", everything
    if "causal" in kinds:
        for shift in (-1, 1):
            yield (
                "diagonal off by one",
                f"by {shift:+}",
                replace_part(pattern, "causal", ("window", None, shift)),
            )
        yield (
            "mask transposed",
            "queries see later keys",
            replace_part(pattern, "causal", ("window", 0, None)),
        )
    if kinds == {"full"}:
        yield "causal mask on full attention", "", ("causal",)
    for part in parts_of(pattern):
        if part[0] == "window":
            yield from _changed_windows(pattern, part)
        if part[0] == "documents":
            yield from _changed_documents(pattern, kinds)
        if part[0] in ("prefix", "frames"):
            yield f"{part[0]} ignored", "plain causal instead", replace_part(pattern, part[0], ("causal",))
            for shift in (-1, 1):
                yield (
                    f"{part[0]} off by one",
                    f"by {shift:+}",
                    replace_part(pattern, part[0], (part[0], part[1] + shift, *part[2:])),
                )


def _changed_windows(pattern: Pattern, window: Pattern) -> Iterator[tuple[str, str, Pattern]]:
    left, right = window[1:]
    options: list[tuple[str, str, Pattern]] = [
        ("window ignored", "plain causal instead", ("window", None, right)),
        ("window ignored", "left without a bound", ("window", None, max(right, 0))),
        ("window ignored", "right without a bound", ("window", left, None)),
        ("causal part ignored", "window on both sides", ("window", left, abs(left))),
        ("window sides swapped", "", ("window", right, left)),
    ]
    options += [("window off by one", f"left by {shift:+}", ("window", left + shift, right)) for shift in (-1, 1)]
    options += [("window off by one", f"right by {shift:+}", ("window", left, right + shift)) for shift in (-1, 1)]
    for mistake, detail, changed in options:
        yield mistake, detail, replace_part(pattern, "window", changed)


def _changed_documents(pattern: Pattern, kinds: set[str]) -> Iterator[tuple[str, str, Pattern]]:
    yield "documents leak", "", replace_part(pattern, "documents", ("full",))
    if "causal" not in kinds:
        yield "causal mask on full attention", "", ("and", pattern, ("causal",))
    else:
        yield "causal part ignored", "within documents", replace_part(pattern, "causal", ("full",))

    def shifted(part: Pattern, shift: int) -> Pattern:
        first, *rest = part[1]
        return ("documents", (first + shift, *rest[:-1], rest[-1] + abs(shift)))

    for shift in (-1, 1):
        yield (
            "document boundaries off by one",
            f"by {shift:+}",
            replace_part(pattern, "documents", partial(shifted, shift=shift)),
        )


def _anchored(setting: Setting) -> Iterator[Guess]:
    """Masks aligned at the wrong corner, where keys are longer than queries."""
    case = setting.case
    if case.past:
        counts = visible(case.pattern, np.arange(case.length), np.arange(case.length + case.past))
        yield from setting.out_and_lse("causal aligned at the top left", counts=counts)


def _elsewhere(setting: Setting) -> Iterator[Guess]:
    """Masks and RoPE by positions that are not those of the rows."""
    case = setting.case
    q_local, kv_local = _local(setting.q_rank), _local(setting.kv_rank)
    if case.pattern != ("full",) and case.world_size > 1:
        yield from _by_positions(setting, "mask in local positions", "", q_local, kv_local)
        kv_global = case.kv_layout().all_positions().astype(float)
        yield from _by_positions(setting, "mask in local positions", "of queries only", q_local, kv_global)
        q_global = case.q_layout().all_positions().astype(float)
        yield from _by_positions(setting, "mask in local positions", "of keys only", q_global, kv_local)
        for rank in setting.ranks:
            of_rank = _positions_of(setting, rank)
            yield from _by_positions(setting, "mask of another rank", f"rank {rank}'s on all", of_rank, kv_global)
        own = setting.hops() == 0
        local = np.broadcast_to(visible(case.pattern, q_local, kv_local), setting.question.counts.shape)
        lagging = np.where(own, setting.question.counts, 0.0)
        yield from setting.out_and_lse("no exchange", "each rank attends to its own keys only", counts=lagging)
        by_block = setting.q_rank[:, None] > setting.kv_rank[None, :]
        yield from setting.out_and_lse(
            *("positions of another layout", "whole blocks of lower ranks are seen, none of higher ones"),
            counts=np.where(own, local, by_block.astype(float)) * np.ones_like(setting.question.counts),
        )
    for name in LAYOUTS:
        if name == case.layout:
            continue
        q_other = _other_positions(name, case.layout, case.length, case.world_size, case.past)
        kv_other = _other_positions(name, case.layout, case.length + case.past, case.world_size, 0)
        if q_other is not None and kv_other is not None:
            yield from _by_positions(setting, "positions of another layout", f"those of {name}", q_other, kv_other)


def _in_some_blocks(setting: Setting) -> Iterator[Guess]:
    """Mistakes about the mask in some blocks, where the others are right."""
    case, counts, hops = setting.case, setting.question.counts, setting.hops()
    q, kv = case.q_layout().all_positions(), case.kv_layout().all_positions()
    q_local, kv_local = _local(setting.q_rank).astype(int), _local(setting.kv_rank).astype(int)
    changed = [
        (mistake, detail, visible(pattern, q, kv)) for mistake, detail, pattern in _changed_patterns(case.pattern)
    ]
    if case.pattern != ("full",):
        changed.append(("mask in local positions", "", visible(case.pattern, q_local, kv_local)))
    for part in parts_of(case.pattern):
        if part[0] == "prefix":
            at_head = (kv_local < part[1]) | (kv[None, :] <= q[:, None])
            changed.append(("mask in local positions", "the prefix of every shard", at_head.astype(float)))
            yield from setting.out_and_lse(*changed[-1][:2], counts=at_head.astype(float))
    for scope, steps in setting.scopes():
        here = np.isin(hops, steps)
        for mistake, detail, table in changed:
            wrong = np.where(here, table, counts)
            if not np.array_equal(wrong, counts):
                yield from setting.out_and_lse(mistake, f"{detail}, {scope}".lstrip(", "), counts=wrong)


def _turned(setting: Setting) -> Iterator[Guess]:
    """RoPE by wrong positions, or of one side only."""
    q, kv = setting.question.q_turns, setting.question.kv_turns
    if q is None or kv is None:
        return
    q_local, kv_local = _local(setting.q_rank), _local(setting.kv_rank)
    turns: tuple[tuple[str, str, Numbers | None, Numbers], ...] = (
        ("RoPE offset", "positions begin at 0 on every rank", q_local, kv_local),
        ("RoPE offset", "queries begin at 0 on every rank", q_local, kv),
        ("RoPE offset", "keys begin at 0 on every rank", q, kv_local),
        *(("RoPE offset", f"keys are off by {n}", q, kv + n) for n in range(-8, 9) if n),
        *(
            ("RoPE offset", f"{which} of rank {rank} are off by {n}", of_q, of_kv)
            for rank in setting.ranks
            for n in range(-4, 5)
            for which, of_q, of_kv in (
                ("keys", q, kv + n * (setting.kv_rank == rank)),
                ("queries", q + n * (setting.q_rank == rank), kv),
                ("queries and keys", q + n * (setting.q_rank == rank), kv + n * (setting.kv_rank == rank)),
            )
            if n
        ),
        ("RoPE left out", "", None, kv),
        ("RoPE left out", "of queries", 0 * q, kv),
        ("RoPE left out", "of keys", q, 0 * kv),
        ("RoPE turned the wrong way", "", -q, -kv),
        ("RoPE turned the wrong way", "queries only", -q, kv),
        ("RoPE turned the wrong way", "keys only", q, -kv),
        ("RoPE applied twice", "", 2 * q, 2 * kv),
        ("RoPE applied twice", "to queries", 2 * q, kv),
        ("RoPE applied twice", "to keys", q, 2 * kv),
    )
    for mistake, detail, of_q, of_kv in turns:
        yield from setting.out_and_lse(mistake, detail, q_turns=of_q, kv_turns=of_kv)
    columns = np.arange(setting.question.q.shape[-1])
    paired = np.concatenate([columns[::2], columns[1::2]])
    of_pairs = {name: getattr(setting.question, name)[..., paired] for name in "qk"}
    yield from setting.out_and_lse(
        "RoPE turns other pairs", "neighbouring columns, not those half a head apart", **of_pairs
    )


def _local(ranks: Numbers) -> Numbers:
    """The offset of each row in its shard."""
    offsets = np.empty_like(ranks)
    for rank in set(ranks.tolist()):
        rows = ranks == rank
        offsets[rows] = np.arange(rows.sum())
    return offsets


def _positions_of(setting: Setting, rank: int) -> Numbers:
    """For every query the position that the same row has on one rank; short shards repeat."""
    positions = setting.case.q_layout().positions(rank).astype(float)
    moved = np.empty(len(setting.q_rank))
    for other in setting.ranks:
        rows = np.flatnonzero(setting.q_rank == other)
        moved[rows] = np.resize(positions, len(rows))
    return moved


def _other_positions(believed: str, real: str, length: int, world_size: int, start: int) -> Numbers | None:
    """For each row in position order, its position under another layout; None if shards differ in size."""
    positions = np.empty(length)
    layouts = [make_layout(name, length, world_size, start=start) for name in (real, believed)]
    for rank in range(world_size):
        rows, other = (layout.positions(rank) for layout in layouts)
        if len(rows) != len(other):
            return None
        positions[rows - start] = other
    return positions


def _by_positions(setting: Setting, mistake: str, detail: str, q: Numbers, kv: Numbers) -> Iterator[Guess]:
    counts = visible(setting.case.pattern, q.astype(int), kv.astype(int))
    yield from setting.out_and_lse(mistake, detail, counts=counts)
    if setting.question.q_turns is not None:
        yield from setting.out_and_lse(mistake, f"{detail}, RoPE too", counts=counts, q_turns=q, kv_turns=kv)


def _empty_rows(setting: Setting) -> Iterator[Guess]:
    """Rows that see no key."""
    question, right = setting.question, setting.right
    is_empty = (question.counts.sum(-1) == 0) & np.ones(right.out.shape[:1] + right.out.shape[2:3], np.bool_)
    if not is_empty.any() or question.sinks is not None:
        return
    here = is_empty[:, None, :, None]
    mean = question.v[:, list(question.kv_of)].mean(2, keepdims=True)
    yield Guess("NaN in rows without a key", "out", np.where(here, np.nan, right.out))
    yield Guess("NaN in rows without a key", "lse", np.where(here[..., 0], np.nan, right.lse))
    yield Guess("rows without a key attend to all", "out", np.where(here, mean, right.out), "the mean of all values")
    yield Guess("log-sum-exp of rows without a key", "lse", np.where(here[..., 0], 0.0, right.lse), "0, not -inf")
    counts = np.where(is_empty[..., None], 1.0, question.counts)
    yield from setting.out_and_lse("rows without a key attend to all", "as if nothing were masked", counts=counts)

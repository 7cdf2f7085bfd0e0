"""Mistakes in what travels: blocks missing, twice, stale or from the wrong side; heads, rows and batches mixed up."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ringspan.verify.cases import LAYOUTS, make_layout, round_to
from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.patterns import Numbers


def guess_schedules(setting: Setting) -> Iterator[Guess]:
    """All guesses about blocks, heads and rows."""
    yield from _heads(setting)
    yield from _orders(setting)
    yield from _tensors(setting)
    if setting.case.world_size > 1:
        yield from _counted_wrongly(setting)
        yield from _other_data(setting)
        yield from _reordered(setting)
        yield from _changed_data(setting)
        yield from _rounded(setting)


def _counted_wrongly(setting: Setting) -> Iterator[Guess]:
    """Blocks that are not attended, or twice."""
    hops, world_size, counts = setting.hops(), setting.case.world_size, setting.question.counts
    yield from setting.out_and_lse("no exchange", "each rank attends to its own keys only", counts=counts * (hops == 0))
    for hop in range(world_size):
        rest = counts * (hops != hop)
        if hop == world_size - 1:
            yield from setting.out_and_lse("last hop missing", f"that of step {hop}", counts=rest)
        if hop < world_size - 1 or world_size == 2:
            yield from setting.out_and_lse("block missing", f"that of step {hop}", counts=rest)
        yield from setting.out_and_lse(
            "block counted twice", f"that of step {hop}", counts=counts * (1 + (hops == hop))
        )
    for owner in range(world_size):
        keys = setting.kv_rank == owner
        yield from setting.out_and_lse("block missing", f"that of rank {owner}", counts=counts * ~keys)
        sent = keys & (hops > 0)
        yield from setting.out_and_lse("block missing", f"that of rank {owner}, elsewhere", counts=counts * ~sent)
        yield from setting.out_and_lse("block counted twice", f"that of rank {owner}", counts=counts * (1.0 + keys))
        yield from setting.out_and_lse("wrong keys of one rank", f"zeros of rank {owner}", **_zeroed(setting, keys))
    yield from _edges_counted_wrongly(setting)
    smallest = min((setting.kv_rank == owner).sum() for owner in range(world_size))
    beyond = np.zeros_like(setting.kv_rank, np.bool_)
    for owner in range(world_size):
        beyond[np.flatnonzero(setting.kv_rank == owner)[smallest:]] = True
    lengths = [int((setting.kv_rank == owner).sum()) for owner in range(world_size)]
    padding = sum(max(lengths) - length for length in lengths)
    if padding:
        lse = np.logaddexp(setting.right.lse, np.log(padding))
        share = np.exp(setting.right.lse - lse)[..., None]
        detail = f"{padding} zeros behind short shards count as keys"
        yield Guess("padding attended", "out", setting.right.out * share, detail)
        yield Guess("padding attended", "lse", lse, detail)
    if beyond.any():
        yield from setting.out_and_lse("uneven shards cut", "to the shortest", counts=counts * ~beyond)
    yield from _single_keys(setting)


def _edges_counted_wrongly(setting: Setting) -> Iterator[Guess]:
    """The first or last key of every block is not attended, or twice."""
    counts, hops = setting.question.counts, setting.hops()
    for which, place in (("last", -1), ("first", 0)):
        edges = np.zeros_like(setting.kv_rank, np.bool_)
        edges[[np.flatnonzero(setting.kv_rank == rank)[place] for rank in setting.ranks]] = True
        for detail, here in (
            ("", edges),
            ("of other ranks", edges & (hops > 0)),
            ("of the rank itself", edges & (hops == 0)),
        ):
            yield from setting.out_and_lse(f"{which} key of a block missing", detail, counts=counts * ~here)
            yield from setting.out_and_lse(
                f"{which} key of a block counted twice", detail, counts=counts * (1.0 + here)
            )


def _single_keys(setting: Setting) -> Iterator[Guess]:
    """One key of the whole sequence that is not attended, or twice."""
    counts = setting.question.counts
    positions = setting.case.kv_layout().all_positions()
    for key, position in enumerate(positions):
        here = np.arange(len(positions)) == key
        where = "the last of all" if key == len(positions) - 1 else f"position {position}"
        yield from setting.out_and_lse("key missing", where, counts=counts * ~here)
        yield from setting.out_and_lse("key counted twice", where, counts=counts * (1.0 + here))


def _zeroed(setting: Setting, keys: Numbers) -> dict[str, Numbers]:
    k, v = setting.question.k.copy(), setting.question.v.copy()
    k[:, :, keys] = v[:, :, keys] = 0
    return {"k": k, "v": v}


def _other_data(setting: Setting) -> Iterator[Guess]:
    """The right mask with the data of another block."""
    size = setting.case.world_size
    steps = range(size)
    sources: list[tuple[str, str, list[int]]] = [
        ("stale buffer", "every step attends to the block of the step before", [max(hop - 1, 0) for hop in steps]),
        ("no exchange", "the rank's own keys in every step", [0] * size),
    ]
    if size > 2:
        sources.append(("wrong direction", "blocks of the other neighbour", [-hop % size for hop in steps]))
        sources.append(("stale buffer", "the first block that arrived stays", [min(hop, 1) for hop in steps]))
        for stale in steps[1:]:
            detail = f"step {stale} attends to the block of step {stale - 1}"
            sources.append(("stale buffer", detail, [hop - (hop == stale) for hop in steps]))
    sources.append(("block of the next step", "blocks are one step ahead", [(hop + 1) % size for hop in steps]))
    for mistake, detail, source in sources:
        yield from setting.by_rank(mistake, _replaced(setting, source, ("k", "v")), detail)
        if mistake != "wrong direction":
            for name in "kv":
                apart = _replaced(setting, source, (name,))
                yield from setting.by_rank("keys and values of different blocks", apart, f"{name}: {detail}")


def _reordered(setting: Setting) -> Iterator[Guess]:
    """The blocks of two ranks taken for each other, or those of all ranks in reverse."""
    ranks = setting.ranks
    orders = {
        f"ranks {i} and {j} swapped": [{i: j, j: i}.get(rank, rank) for rank in ranks]
        for i, j in itertools.combinations(ranks, 2)
    }
    rows_of = [np.flatnonzero(setting.kv_rank == rank) for rank in ranks]
    for detail, order in {**orders, "rank P - 1 - i for rank i": [*reversed(ranks)]}.items():
        source = np.arange(len(setting.kv_rank))
        for rank, rows in enumerate(rows_of):
            source[rows] = np.resize(rows_of[order[rank]], len(rows))
        k, v = setting.question.k[:, :, source], setting.question.v[:, :, source]
        yield from setting.out_and_lse("blocks in another order", detail, k=k, v=v)


def _replaced(setting: Setting, source: list[int], names: tuple[str, ...]) -> Callable[[int], dict[str, Any]]:
    """For each rank, k and v with the data of step t replaced by that of step source[t]; short blocks repeat."""
    world_size = setting.case.world_size
    rows_of = [np.flatnonzero(setting.kv_rank == owner) for owner in setting.ranks]

    def change(rank: int) -> dict[str, Any]:
        changed = {name: getattr(setting.question, name).copy() for name in names}
        for hop in range(world_size):
            into, out_of = rows_of[(rank - hop) % world_size], rows_of[(rank - source[hop]) % world_size]
            for name in names:
                changed[name][:, :, into] = getattr(setting.question, name)[:, :, np.resize(out_of, len(into))]
        return changed

    return change


def _changed_data(setting: Setting) -> Iterator[Guess]:
    """Keys or values that changed on the way: the right block with wrong numbers."""
    changes: list[tuple[str, str, Callable[[Numbers], Numbers]]] = [
        ("keys or values left at zero", "", np.zeros_like),
        ("rows of a block in another order", "in reverse", lambda x: x[:, :, ::-1]),
        ("rows of a block in another order", "off by one", lambda x: np.roll(x, 1, 2)),
        ("rows of a block in another order", "off by one", lambda x: np.roll(x, -1, 2)),
    ]
    if setting.case.batch > 1:
        changes += [
            ("batch rows mixed up", "row 0 for all", lambda x: np.broadcast_to(x[:1], x.shape)),
            ("batch rows mixed up", "in reverse", lambda x: x[::-1]),
        ]
    if setting.case.num_kv_heads > 1:
        changes.append(("wrong KV head", "KV head 0 for all", lambda x: np.broadcast_to(x[:, :1], x.shape)))
        changes += [("wrong KV head", f"off by {n}", partial(np.roll, shift=n, axis=1)) for n in (1, -1)]
    everywhere = ("everywhere", tuple(setting.ranks))
    for scope, steps in (everywhere, *setting.scopes()):
        for mistake, detail, function in changes:
            for names in ("k", "v", "kv"):
                if scope == "everywhere" and function is np.zeros_like and names != "k":
                    continue  # the output is zero
                change = _in_steps(setting, steps, names, function)
                what = {"k": "keys", "v": "values", "kv": "keys and values"}[names]
                yield from setting.by_rank(mistake, change, ", ".join(filter(None, (f"{what} {scope}", detail))))


def _in_steps(
    setting: Setting, steps: tuple[int, ...], names: str, function: Callable[[Numbers], Numbers]
) -> Callable[[int], dict[str, Any]]:
    """For each rank, the blocks of some steps changed in k, v or both."""

    def change(rank: int) -> dict[str, Any]:
        changed = {name: getattr(setting.question, name).copy() for name in names}
        for step in steps:
            rows = np.flatnonzero(setting.kv_rank == (rank - step) % setting.case.world_size)
            for x in changed.values():
                x[:, :, rows] = function(x[:, :, rows])
        return changed

    return change


def _heads(setting: Setting) -> Iterator[Guess]:
    heads, kv_heads = setting.case.num_heads, setting.case.num_kv_heads
    if kv_heads not in (1, heads):
        interleaved = tuple(head % kv_heads for head in range(heads))
        yield from setting.out_and_lse("GQA repeat order", "head i uses KV head i mod n", kv_of=interleaved)
    if kv_heads > 1:
        for shift in {1, kv_heads - 1}:
            rolled = tuple((head + shift) % kv_heads for head in setting.question.kv_of)
            yield from setting.out_and_lse("wrong KV head", f"off by {shift}", kv_of=rolled)
        yield from setting.out_and_lse("wrong KV head", "KV head 0 for all", kv_of=(0,) * heads)
        reverse = tuple(kv_heads - 1 - head for head in setting.question.kv_of)
        yield from setting.out_and_lse("wrong KV head", "in reverse", kv_of=reverse)
    out, lse = setting.right.out, setting.right.lse
    orders = {"off by 1": np.roll(np.arange(heads), 1), "off by -1": np.roll(np.arange(heads), -1)}
    orders["in reverse"] = np.arange(heads)[::-1]
    for parts in {2, setting.case.world_size}:
        if parts < heads and heads % parts == 0:
            orders[f"dealt out {parts} at a time"] = np.arange(heads).reshape(parts, -1).T.reshape(-1)
            orders[f"dealt out by {parts}"] = np.arange(heads).reshape(-1, parts).T.reshape(-1)
    for detail, order in orders.items():
        yield Guess("heads in another order", "out", out[:, order], detail)
        yield Guess("heads in another order", "lse", lse[:, order], detail)


def _orders(setting: Setting) -> Iterator[Guess]:
    """Right rows in wrong places."""
    case, out, lse = setting.case, setting.right.out, setting.right.lse
    start = case.past
    names = [*LAYOUTS, "reverse"]
    real = np.concatenate([case.q_layout().positions(rank) for rank in setting.ranks]) - start
    for name in names:
        if name == case.layout:
            continue
        if name == "reverse":
            other = real[::-1]
        else:
            layout = make_layout(name, case.length, case.world_size, start=start)
            other = np.concatenate([layout.positions(rank) for rank in setting.ranks]) - start
        for detail, into, source in (("written", other, real), ("read", real, other)):
            moved_out, moved_lse = np.empty_like(out), np.empty_like(lse)
            moved_out[:, :, into], moved_lse[:, :, into] = out[:, :, source], lse[:, :, source]
            yield Guess("rows in another order", "out", moved_out, f"{detail} as {name}")
            yield Guess("rows in another order", "lse", moved_lse, f"{detail} as {name}")
    for shift in (1, -1):
        yield Guess("rows in another order", "out", np.roll(out, shift, 2), f"off by {shift}")
        yield from _neighbours_rows(setting, shift)
    yield from _together(setting)
    within = np.arange(case.length)
    for rank in setting.ranks:
        rows = np.flatnonzero(setting.q_rank == rank)
        within[rows] = rows[::-1]
    yield Guess("rows in another order", "out", out[:, :, within], "each shard in reverse")
    halves = np.arange(case.length)
    for rank in setting.ranks:
        rows = np.flatnonzero(setting.q_rank == rank)
        halves[rows] = np.roll(rows, -(len(rows) // 2))
    yield Guess("rows in another order", "out", out[:, :, halves], "the halves of each shard swapped")
    if case.batch > 1:
        yield Guess("batch rows mixed up", "out", out[::-1], "in reverse")
        yield Guess("batch rows mixed up", "out", np.broadcast_to(out[:1], out.shape), "row 0 for all")
    yield Guess("heads and tokens mixed up", "out", _mixed(setting))


def _neighbours_rows(setting: Setting, shift: int) -> Iterator[Guess]:
    rows_of = [np.flatnonzero(setting.q_rank == rank) for rank in setting.ranks]
    moved = setting.right.out.copy()
    for rank, rows in enumerate(rows_of):
        moved[:, :, rows] = setting.right.out[:, :, np.resize(rows_of[(rank + shift) % len(rows_of)], len(rows))]
    yield Guess("results on the wrong rank", "out", moved, f"those of rank {shift:+}")


def _together(setting: Setting) -> Iterator[Guess]:
    """The same row of all ranks added or averaged, as an all-reduce of outputs does."""
    rows_of = [np.flatnonzero(setting.q_rank == rank) for rank in setting.ranks]
    size = min(map(len, rows_of))
    total = sum(setting.right.out[:, :, rows[:size]] for rows in rows_of)
    for mistake, factor in (("outputs of ranks added", 1.0), ("outputs of ranks averaged", 1 / len(rows_of))):
        if len(rows_of) > 1:
            out = setting.right.out.copy()
            for rows in rows_of:
                out[:, :, rows[:size]] = total * factor
            yield Guess(mistake, "out", out)


def _mixed(setting: Setting) -> Numbers:
    """(batch, seq, heads, dim) read as (batch, heads, seq, dim) on every rank."""
    mixed = np.empty_like(setting.right.out)
    for rank in setting.ranks:
        rows = setting.q_rank == rank
        shard = setting.right.out[:, :, rows]
        mixed[:, :, rows] = shard.transpose(0, 2, 1, 3).reshape(shard.shape)
    return mixed


def _tensors(setting: Setting) -> Iterator[Guess]:
    question = setting.question
    yield from setting.out_and_lse("keys and values swapped", k=question.v, v=question.k)
    yield from setting.out_and_lse("keys for values", v=question.k)
    for name, x in (("q", question.q), ("v", question.v[:, list(question.kv_of)])):
        if x.shape == setting.right.out.shape:
            yield Guess("an input returned as the output", "out", x, name)
    if setting.case.batch > 1:
        yield from setting.out_and_lse(
            "batch rows mixed up", "of keys and values", k=question.k[::-1], v=question.v[::-1]
        )
    if setting.case.num_heads == setting.case.num_kv_heads and not setting.case.past:
        yield from setting.out_and_lse("queries and keys swapped", q=question.k, k=question.q)


def _rounded(setting: Setting) -> Iterator[Guess]:
    """Keys and values rounded on the wire; at home they are not."""
    if setting.case.dtype not in ("float64", "float32"):
        return
    question = setting.question
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype == setting.case.dtype:
            continue
        k, v = round_to(question.k, dtype), round_to(question.v, dtype)
        yield from setting.out_and_lse("precision lost", f"keys and values in {dtype}", k=k, v=v)
        yield Guess("precision lost", "out", round_to(setting.right.out, dtype), f"output in {dtype}")
        yield Guess("precision lost", "lse", round_to(setting.right.lse, dtype), f"log-sum-exp in {dtype}")

"""Random valid schedules with arrays to run them on, and the ways to break one: for tests of `validate`.

A sample is made from a random matrix of visible ranks: one document per query rank with that rank's queries and some
keys of every rank that it sees. So every matrix, full or sparse, comes from layouts and a mask, and a schedule for it
can be run and compared with the dense oracle.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import ringspan as rs
from ringspan.schedule import ALL, AllMerge, Attend, Block, Step, Transfer
from ringspan.simulate import bytes_sent
from support.cases import ROWS, Arrays, Expected, expect, make_arrays, meshes
from support.oracle import MaskSpec

TOLERANCE = 1e-11


class Sample(NamedTuple):
    """A valid schedule, and the inputs to run it or its mutants."""

    name: str
    schedule: rs.Schedule
    visible: rs.Visible
    spec: MaskSpec
    layout: rs.Layout
    kv_layout: rs.Layout
    heads: rs.Heads
    arrays: Arrays
    expected: Expected
    forward: rs.Simulation | None  # of a backward schedule
    nbytes: int


def make_samples(seed: int, count: int) -> Iterator[Sample]:
    rng = random.Random(seed)
    for _ in range(count):
        yield _make_sample(rng)


def _make_sample(rng: random.Random) -> Sample:
    world_size = rng.randint(2, 8)
    algorithm = rng.choice([*(row.algorithm for row in ROWS), "sharded decode", "replicated decode"])
    matrix = _random_matrix(rng, world_size, one_query=algorithm == "replicated decode")
    spec, layout, kv_layout = _place(rng, matrix, one_query=algorithm == "replicated decode")
    visible = rs.Visible.of(np.broadcast_to(matrix, (world_size, world_size + 1)))
    heads, forward, backward = _build(rng, algorithm, visible)
    arrays = make_arrays(str(rng.random()), heads, layout.num_positions, kv_layout.num_positions)
    expected = expect(spec, layout, kv_layout, arrays)
    is_backward = backward is not None and rng.random() < 0.6
    sample = Sample(
        f"{algorithm} {'backward' if is_backward else 'forward'}",
        (backward if is_backward else forward) or forward,
        visible,
        spec,
        layout,
        kv_layout,
        heads,
        arrays,
        expected,
        None,
        0,
    )
    if is_backward:
        sample = sample._replace(forward=_simulate(sample, forward))
    return sample._replace(nbytes=run(sample, sample.schedule)[1])


def _random_matrix(rng: random.Random, world_size: int, *, one_query: bool) -> np.ndarray:
    """Draw a matrix (P, P + 1), or (1, P + 1) for a replicated query, with at least one visible pair."""
    density = rng.choice([0.15, 0.4, 0.8, 1.0])
    rows = 1 if one_query else world_size
    matrix = np.array([[rng.random() < density for _ in range(world_size + 1)] for _ in range(rows)])
    if rng.random() < 0.6:
        matrix[:, -1] = False
    matrix[rng.randrange(rows), rng.randrange(world_size)] = True
    return matrix


def _place(rng: random.Random, matrix: np.ndarray, *, one_query: bool) -> tuple[MaskSpec, rs.Layout, rs.Layout]:
    """Return a documents mask and layouts of queries and keys that give exactly this matrix."""
    world_size = matrix.shape[1] - 1
    queries: list[list[rs.Span]] = [[] for _ in range(world_size + 1)]
    keys: list[list[rs.Span]] = [[] for _ in range(world_size + 1)]
    lengths, start = [], 0
    for rank, row in enumerate(matrix):
        first = start
        for holders, owner in [(queries, world_size if one_query else rank), *((keys, j) for j in np.flatnonzero(row))]:
            size = rng.randint(1, 2) + (holders is keys)  # with a single key dq would be 0 and hide errors
            holders[owner].append(rs.Span(start, start + size))
            start += size
        lengths.append(start - first)
    layouts = [rs.Layout(tuple(map(tuple, of[:-1])), replicated=tuple(of[-1])) for of in (queries, keys)]
    return ("documents", tuple(lengths)), *layouts


def _build(rng: random.Random, algorithm: str, visible: rs.Visible) -> tuple[rs.Heads, rs.Schedule, rs.Schedule | None]:
    """Return heads, the forward schedule, and a backward schedule if there is any."""
    if algorithm.endswith("decode"):
        return rs.Heads(4, 2), rs.schedule.build_decode(visible, query=algorithm.split()[0]), None
    row = next(row for row in ROWS if row.algorithm == algorithm)
    mesh = rng.choice(meshes(row, visible.world_size))
    degree = visible.world_size if mesh is None else mesh.inner
    heads = rng.choice(_small_heads(degree)) if row.splits_heads else rs.Heads(4, 2)
    options: dict[str, Any] = {"heads": heads, "mesh": mesh, "direction": rng.choice(row.directions)}
    forward = rs.schedule.build_schedule(algorithm, visible, **options)
    return heads, forward, rs.schedule.build_schedule(algorithm, visible, **options, backward=rng.choice(("kv", "q")))


def _small_heads(degree: int) -> list[rs.Heads]:
    """Return head counts that `degree` ranks can split: a KV head per rank, per several ranks, or per query head."""
    return [rs.Heads(2 * degree, degree), rs.Heads(2 * degree, 1), rs.Heads(2 * degree, 2 * degree)]


def _simulate(sample: Sample, schedule: rs.Schedule) -> rs.Simulation:
    q, k, v, _ = sample.arrays
    mask = rs.documents(sample.spec[1])
    return rs.simulate_attention(
        q, k, v, mask=mask, layout=sample.layout, kv_layout=sample.kv_layout, algorithm=schedule
    )


def run(sample: Sample, schedule: rs.Schedule) -> tuple[float, int]:
    """Return the largest error against the oracle, and the bytes sent."""
    if sample.forward is None:
        result = _simulate(sample, schedule)
        got, wanted, trace = (result.out, result.lse), sample.expected[:2], result.trace
        if sample.layout.replicated:  # every rank has the result, and the simulator returns that of rank 0
            got += tuple(of_rank.lse for of_rank in trace[-1])
            wanted += (sample.expected.lse,) * len(trace[-1])
    else:
        gradients = sample.forward.gradients(sample.arrays.dout, schedule=schedule)
        got, wanted, trace = gradients[:3], sample.expected[2:], gradients.trace
    return max(map(_error, got, wanted)), bytes_sent(trace)


def _error(got: np.ndarray, wanted: np.ndarray) -> float:
    difference = np.subtract(got, wanted, out=np.zeros(wanted.shape), where=got != wanted)
    return float(np.nan_to_num(np.abs(difference), nan=np.inf).max(initial=0.0))


def harm(sample: Sample, schedule: rs.Schedule) -> str | None:
    """Return the damage of running the schedule; None if there is none."""
    try:
        error, nbytes = run(sample, schedule)
    except Exception as problem:
        return f"raises {problem!r}"
    if not error < TOLERANCE:
        return f"result off by {error:.1e}"
    return f"sends {nbytes} bytes instead of {sample.nbytes}" if nbytes > sample.nbytes else None


class Draft:
    """A schedule in parts that can be changed."""

    def __init__(self, schedule: rs.Schedule) -> None:
        self.schedule = schedule
        self.attends = [[list(of_rank) for of_rank in step.attends] for step in schedule.steps]
        self.transfers = [list(step.transfers) for step in schedule.steps]
        self.merges = [list(step.merges) for step in schedule.steps]

    def freeze(self) -> rs.Schedule:
        steps = [Step(*parts) for parts in zip(self.attends, self.transfers, self.merges, strict=True)]
        return rs.Schedule.of_steps(self.schedule.world_size, self.schedule.heads, steps)

    def other_rank(self, rng: random.Random, *ranks: int) -> int | None:
        others = [rank for rank in range(self.schedule.world_size) if rank not in ranks]
        return rng.choice(others) if others else None

    def all_attends(self) -> list[tuple[list[Attend], int, int]]:
        """Return each attend as its list, its index there, and its step."""
        return [
            (attends, i, t)
            for t, of_step in enumerate(self.attends)
            for attends in of_step
            for i in range(len(attends))
        ]

    def all_transfers(self) -> list[tuple[list[Transfer], int, int]]:
        return [(transfers, i, t) for t, transfers in enumerate(self.transfers) for i in range(len(transfers))]

    def all_merges(self) -> list[tuple[list[AllMerge], int, int]]:
        return [(merges, i, t) for t, merges in enumerate(self.merges) for i in range(len(merges))]

    def slots(self) -> list["Slot"]:
        """Return every place where a block is named."""
        of_transfers = [Slot(transfers, i, None, 0) for transfers, i, _ in self.all_transfers()]
        of_attends = [
            Slot(attends, i, side, place)
            for attends, i, _ in self.all_attends()
            for side in (0, 1)
            for place in range(len(attends[i][side]))
        ]
        return of_transfers + of_attends


class Slot(NamedTuple):
    """The block of a transfer (side is None), or one of an attend's qs (0) or kvs (1)."""

    actions: list[Any]
    index: int
    side: int | None
    place: int

    @property
    def block(self) -> Block:
        action = self.actions[self.index]
        return action.block if self.side is None else action[self.side][self.place]

    def put(self, block: Block) -> None:
        action = self.actions[self.index]
        if self.side is None:
            self.actions[self.index] = action._replace(block=block)
            return
        blocks = list(action[self.side])
        blocks[self.place] = block
        self.actions[self.index] = action._replace(**{("qs", "kvs")[self.side]: tuple(blocks)})


Fault = Callable[[random.Random, Draft, rs.Heads], None]
"""Changes a draft at a random place, or leaves it as it is where it finds no such place."""


def drop_transfer(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    if places := [*draft.all_transfers(), *draft.all_merges()]:
        actions, i, _ = rng.choice(places)
        del actions[i]


def swap_blocks(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Swap two blocks of transfers, or of one side of attends."""
    side = rng.choice([None, 0, 1])
    slots = [slot for slot in draft.slots() if slot.side == side]
    if slots:
        first = rng.choice(slots)
        others = [slot for slot in slots if slot.block != first.block]
        if others:
            second = rng.choice(others)
            block = first.block
            first.put(second.block)
            second.put(block)


def attend_twice(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Repeat an attend in the same step or a later one, mostly on the same rank."""
    if places := draft.all_attends():
        attends, i, t = rng.choice(places)
        later = rng.randrange(t, draft.schedule.num_steps)
        rank = next(rank for rank, of_rank in enumerate(draft.attends[t]) if of_rank is attends)
        if rng.random() < 0.3:
            rank = rng.randrange(draft.schedule.world_size)
        draft.attends[later][rank].append(attends[i])


def skip_attend(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Remove an attend, or one of its blocks."""
    if places := draft.all_attends():
        attends, i, _ = rng.choice(places)
        side = rng.choice([0, 1])
        blocks = list(attends[i][side])
        if len(blocks) == 1:
            del attends[i]
        else:
            del blocks[rng.randrange(len(blocks))]
            attends[i] = attends[i]._replace(**{("qs", "kvs")[side]: tuple(blocks)})


def merge_twice(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Send a sum twice: again in some step, or to a second rank."""
    sums = [place for place in draft.all_transfers() if place[0][place[1]].block.is_sum]
    if not sums and not draft.all_merges():
        return
    actions, i, t = rng.choice([*sums, *draft.all_merges()])
    when = rng.choice([t, rng.randrange(draft.schedule.num_steps)])
    if isinstance(actions[i], AllMerge):
        draft.merges[when].append(actions[i])
        return
    transfer = actions[i]
    dst = rng.choice([transfer.dst, draft.other_rank(rng, transfer.src, transfer.dst)])
    draft.transfers[when].append(transfer if dst is None else transfer._replace(dst=dst))


def send_early(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Move a transfer, or an all-merge, to an earlier step."""
    places = [place for place in (*draft.all_transfers(), *draft.all_merges()) if place[2] > 0]
    if places:
        actions, i, t = rng.choice(places)
        earlier = rng.choice([t - 1, rng.randrange(t)])
        target: list[Any] = (draft.merges if isinstance(actions[i], AllMerge) else draft.transfers)[earlier]
        target.append(actions.pop(i))


def wrong_owner(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Replace the owner of a block, or an end of a transfer."""
    if rng.random() < 0.4 and draft.all_transfers():
        actions, i, _ = rng.choice(draft.all_transfers())
        block, src, dst = actions[i]
        other = draft.other_rank(rng, src, dst)
        if other is not None:
            actions[i] = Transfer(block, *rng.choice([(src, other), (other, dst)]))
    elif slots := draft.slots():
        slot = rng.choice(slots)
        owner = ALL if rng.random() < 0.1 else draft.other_rank(rng, slot.block.owner)
        slot.put(slot.block._replace(owner=owner))


def wrong_heads(rng: random.Random, draft: Draft, heads: rs.Heads) -> None:
    """Replace the heads of a block, or of a whole side of an attend, by all heads or by another range."""
    if slots := draft.slots():
        slot = rng.choice(slots)
        num_heads = heads.num_kv_heads if slot.block.kind in ("kv", "dkv") else heads.num_heads
        ranges = [range(start, stop) for start in range(num_heads) for stop in range(start + 1, num_heads + 1)]
        near = [r for r in ranges if slot.block.heads is None or r.start == slot.block.heads.start]
        choice = rng.choice([None, rng.choice(ranges), rng.choice(near)])
        whole_side = rng.random() < 0.3
        for other in slots if whole_side else [slot]:
            if other.actions is slot.actions and (other.index, other.side) == (slot.index, slot.side):
                other.put(other.block._replace(heads=choice))


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        drop_transfer,
        swap_blocks,
        attend_twice,
        skip_attend,
        merge_twice,
        send_early,
        wrong_owner,
        wrong_heads,
    )
}


def inject(fault: Fault, rng: random.Random, sample: Sample) -> rs.Schedule | None:
    """Return the sample's schedule with one fault; None if it has no place for it."""
    draft = Draft(sample.schedule)
    fault(rng, draft, sample.heads)
    mutant = draft.freeze()
    return None if mutant == sample.schedule else mutant

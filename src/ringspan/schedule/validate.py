"""Does a schedule compute attention: all of it, and nothing twice?

The proof follows, per rank and sum, the set of (q, kv, query head) that is in it, without a single number: attends add
to the set, merges must be unions of disjoint sets, and in the end every owner must hold all that is visible. On the way
it refuses whatever would change the result or waste bytes: reading or sending what is not held, an input received twice
or never read, parts of sums left behind.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NoReturn

from ringspan.errors import ScheduleError
from ringspan.schedule.actions import ALL, Attend, Block, Kind, Schedule, Step, Transfer
from ringspan.schedule.text import format_schedule
from ringspan.schedule.visible import Visible

_CONTEXT = 2  # steps shown around the one that fails

# A set of (other side's owner) bits for each segment of query heads.
_Part = dict[int, int]
_Name = tuple[str, int]  # kind and owner


def validate(schedule: Schedule, visible: Visible) -> None:
    """Raise ScheduleError, with the step at fault, unless the schedule computes exactly what is visible."""
    proof = _Proof(schedule, visible)
    for t, step in enumerate(schedule.steps):
        proof.follow(t, step)
    proof.conclude()


class _Proof:
    """Who holds what, as the steps go by."""

    def __init__(self, schedule: Schedule, visible: Visible) -> None:
        self.schedule = schedule
        self.visible = visible
        self.t = 0
        if schedule.world_size != visible.world_size:
            raise ScheduleError(
                f"the schedule is for {schedule.world_size} ranks and visible for {visible.world_size}; make both for "
                "the same group"
            )
        ranks = range(schedule.world_size)
        self.segments = _segments(schedule)
        self.all_segments = range(len(self.segments) - 1)
        self.received: list[dict[Block, int]] = [{} for _ in ranks]  # input -> the step it came in
        self.received_heads: list[defaultdict[_Name, int]] = [defaultdict(int) for _ in ranks]
        self.read: list[set[Block]] = [set() for _ in ranks]
        self.sums: list[dict[_Name, _Part]] = [{} for _ in ranks]
        self.q_kinds: set[_Name] = set()

    def follow(self, t: int, step: Step) -> None:
        """One step: sums leave and inputs are copied as they are at its start, attends run, then all arrives."""
        self.t = t
        self._check_ranks(step)
        moving = [(transfer, self._take(transfer)) for transfer in step.transfers if transfer.block.is_sum]
        inputs = [transfer for transfer in step.transfers if not transfer.block.is_sum]
        for transfer in inputs:
            self._read(transfer.src, transfer.block, "sends")
        for merge in step.merges:
            self._merge_all(merge.block)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                self._attend(rank, attend)
        for transfer in inputs:
            self._receive(transfer)
        for transfer, part in moving:
            self._add(transfer.dst, transfer.block, part, transfer)

    def conclude(self) -> None:
        """Everything visible is at home, nothing was received for nothing, no part is left elsewhere."""
        for rank, received in enumerate(self.received):
            for block, t in received.items():
                if block not in self.read[rank]:
                    self.t = t
                    self._fail(f"rank {rank} receives {block} in step {t} and never reads it; do not send it")
        self.t = self.schedule.num_steps - 1
        for rank, sums in enumerate(self.sums):
            for (kind, owner), part in sums.items():
                if owner not in (rank, ALL) and any(part.values()):
                    block = Block(kind, owner)  # type: ignore[arg-type]
                    self._fail(f"rank {rank} ends with a part of {block}; send it to rank {owner}")
        backward = any(kind == "q_grad" for kind, _ in self.q_kinds)
        if backward and any(kind == "q" for kind, _ in self.q_kinds):
            self._fail("some attends are forward (q) and some backward (q_grad); make two schedules")
        self._check_complete(["dq", "dkv"] if backward else ["out"])

    def _check_complete(self, kinds: Iterable[str]) -> None:
        replicated_query = any(owner == ALL for _, owner in self.q_kinds)
        for kind in kinds:
            for rank in range(self.schedule.world_size):
                owner = ALL if replicated_query else rank
                self._check_home(rank, Block(kind, owner), self.sums[rank].get((kind, owner), {}))  # type: ignore[arg-type]
        if "dkv" in kinds:
            # Each rank keeps its own part of dkv(ALL); their sum over the group is the gradient.
            union: _Part = defaultdict(int)
            for rank, sums in enumerate(self.sums):
                for segment, bits in sums.get(("dkv", ALL), {}).items():
                    if union[segment] & bits:
                        self._fail(f"rank {rank} adds to {Block('dkv', ALL)} what another rank has added already")
                    union[segment] |= bits
            self._check_home(0, Block("dkv", ALL), union)

    def _check_home(self, rank: int, block: Block, part: _Part) -> None:
        due = self.visible.seen_by(block)
        for segment in self.all_segments:
            if missing := due & ~part.get(segment, 0):
                names = self._names("q" if block.kind == "dkv" else "kv", missing)
                self._fail(f"after the last step {block} on rank {rank} lacks {names}{self._of_heads(segment)}")

    def _check_ranks(self, step: Step) -> None:
        world_size = self.schedule.world_size
        if len(step.attends) != world_size:
            self._fail(f"the step has attends for {len(step.attends)} ranks; there are {world_size}")
        for block, src, dst in step.transfers:
            for name, rank in (("src", src), ("dst", dst), ("owner", block.owner)):
                if not (0 <= rank < world_size or (name == "owner" and rank == ALL)):
                    self._fail(f"{block}→{dst} from rank {src}: {name} {rank} is not one of the {world_size} ranks")
            if src == dst:
                self._fail(f"rank {src} sends {block} to itself; it holds it already")

    def _read(self, rank: int, block: Block, verb: str) -> None:
        """Note that the rank reads an input, if it holds it."""
        if block.owner in (rank, ALL):
            return
        received = self.received[rank]
        for name in (block, block.whole):
            if received.get(name, self.t) < self.t:
                self.read[rank].add(name)
                return
        came = received.get(block)
        reason = "arrives only in this step" if came == self.t else "has not been received"
        self._fail(f"rank {rank} {verb} {block}, which {reason}")

    def _receive(self, transfer: Transfer) -> None:
        block, src, dst = transfer
        segments = self._bits_of(block)
        if block.owner in (dst, ALL) or self.received_heads[dst][block.kind, block.owner] & segments:
            self._fail(f"rank {dst} receives {block} from rank {src}, but it has it already; do not send it twice")
        self.received_heads[dst][block.kind, block.owner] |= segments
        self.received[dst][block] = self.t

    def _attend(self, rank: int, attend: Attend) -> None:
        self._check_attend(rank, attend)
        for block in (*attend.qs, *attend.kvs):
            self._read(rank, block, "attends")
        self.q_kinds.update((q.kind, q.owner) for q in attend.qs)
        segments = self._segments_of(attend.qs[0])
        for block, bits in self.visible.contributions(attend):
            self._add(rank, block, dict.fromkeys(segments, bits), attend)
        if (pruned := self.visible.prune(attend)) != attend:
            kept = () if pruned is None else (*pruned.qs, *pruned.kvs)
            idle = next(block for block in (*attend.qs, *attend.kvs) if block not in kept)
            self._fail(f"rank {rank} attends {attend}, but {idle} has nothing visible there; leave it out")

    def _check_attend(self, rank: int, attend: Attend) -> None:
        kinds = {q.kind for q in attend.qs}, {kv.kind for kv in attend.kvs}
        if kinds not in (({"q"}, {"kv"}), ({"q_grad"}, {"kv"})):
            self._fail(f"rank {rank} attends {attend}; an attend takes blocks q×kv or q_grad×kv")
        if len({q.heads for q in attend.qs}) > 1 or len({kv.heads for kv in attend.kvs}) > 1:
            self._fail(f"rank {rank} attends {attend}; the blocks of one side of an attend have the same heads")
        if len(set(attend.qs)) < len(attend.qs) or len(set(attend.kvs)) < len(attend.kvs):
            self._fail(f"rank {rank} attends {attend}; a block stands there twice")
        if self._bits_of(attend.qs[0]) & ~self._bits_of(attend.kvs[0]):
            self._fail(f"rank {rank} attends {attend}; the KV heads are not those of the query heads")

    def _take(self, transfer: Transfer) -> _Part:
        """The part of a sum that leaves its rank."""
        block, src, dst = transfer
        held = self.sums[src].get((block.kind, block.owner), {})
        part = {segment: held.pop(segment) for segment in self._segments_of(block) if segment in held}
        if not part:
            self._fail(f"rank {src} sends {block} to rank {dst}, but holds no part of it")
        if src == block.owner:
            self._fail(f"rank {src} sends its own {block} away to rank {dst}")
        return part

    def _merge_all(self, block: Block) -> None:
        if not block.is_sum or block.owner != ALL:
            self._fail(
                f"{block}↔all: only a sum that every rank holds, such as {Block('out', ALL)}, can be merged by all"
            )
        parts = [sums.pop((block.kind, block.owner), {}) for sums in self.sums]
        for rank, part in enumerate(parts):
            self._add(0, block, part, Transfer(block, rank, 0))
        merged = self.sums[0].get((block.kind, block.owner), {})
        for sums in self.sums:
            sums[block.kind, block.owner] = dict(merged)

    def _add(self, rank: int, block: Block, part: _Part, source: Attend | Transfer) -> None:
        held = self.sums[rank].setdefault((block.kind, block.owner), {})
        for segment, bits in part.items():
            before = held.get(segment, 0)
            if before & bits:
                self._fail_twice(rank, block, segment, before & bits, source)
            held[segment] = before | bits

    def _fail_twice(self, rank: int, block: Block, segment: int, bits: int, source: Attend | Transfer) -> NoReturn:
        how = f"attends {source}" if isinstance(source, Attend) else f"merges {block} from rank {source.src}"
        names = self._names("q" if block.kind == "dkv" else "kv", bits)
        self._fail(f"rank {rank} {how}, but {block} there has {names} already{self._of_heads(segment)}")

    def _names(self, kind: Kind, bits: int) -> str:
        return ", ".join(str(Block(kind, owner)) for owner in self.visible.owners(bits))

    def _segments_of(self, block: Block) -> range:
        """The segments of query heads a block stands for."""
        heads = self.schedule.heads
        if block.heads is None or heads is None:
            return self.all_segments
        width = heads.group if block.kind in ("kv", "dkv") else 1
        return range(self.segments[block.heads.start * width], self.segments[block.heads.stop * width])

    def _bits_of(self, block: Block) -> int:
        segments = self._segments_of(block)
        return (1 << segments.stop) - (1 << segments.start)

    def _of_heads(self, segment: int) -> str:
        if len(self.segments) == 2:
            return ""
        start, stop = list(self.segments)[segment : segment + 2]
        return f" for heads [{start}:{stop}]"

    def _fail(self, what: str) -> NoReturn:
        steps = range(max(0, self.t - _CONTEXT), min(self.schedule.num_steps, self.t + _CONTEXT + 1))
        grid = format_schedule(self.schedule, steps, marked=self.t)
        raise ScheduleError(f"step {self.t}: {what}\n{grid}")


def _segments(schedule: Schedule) -> dict[int, int]:
    """Query heads where some block begins or ends, ascending and numbered; segment i begins at number i."""
    if schedule.heads is None:
        return {0: 0, 1: 1}
    num_heads, num_kv_heads = schedule.heads
    cuts = {0, num_heads}
    ranges = {(block.kind in ("kv", "dkv"), block.heads) for step in schedule.steps for block in _blocks(step)}
    for is_kv, heads in ranges:
        if heads is not None:
            width = num_heads // num_kv_heads if is_kv else 1
            cuts |= {heads.start * width, heads.stop * width}
    ends = sorted(cuts)
    if ends[0] < 0 or ends[-1] > num_heads or not all(a < b for a, b in pairwise(ends)):
        raise ScheduleError(
            f"blocks have heads up to {ends[-1]}, but there are {num_heads}; stay within [0:{num_heads}]"
        )
    return {head: i for i, head in enumerate(ends)}


def _blocks(step: Step) -> Iterable[Block]:
    for attends in step.attends:
        for attend in attends:
            yield from attend.qs
            yield from attend.kvs
    yield from (transfer.block for transfer in step.transfers)
    yield from (merge.block for merge in step.merges)

"""Does a schedule compute attention completely, and nothing twice?

The proof follows, per rank and sum, the set of (q, kv, query head) that the sum contains. Attends add to the set,
merges must be unions of disjoint sets, and in the end every owner must hold every visible pair. The proof also rejects
everything else that would change the result or waste bytes: reading or sending a block that the rank does not hold, an
input that is received twice or never read, and a sum that is sent in several parts or left on another rank.

Blocks name query heads or KV heads, all of them or a range. To compare blocks, the query heads are cut into segments
wherever a block begins or ends, so every block is a set of segments. Without ranges of heads there is one segment.
"""

from collections import defaultdict
from typing import NoReturn

from ringspan.arguments import check_arguments
from ringspan.errors import ScheduleError
from ringspan.schedule.actions import A_SCHEDULE, ALL, SUMS, Attend, Block, Heads, Kind, Schedule, Step, Transfer
from ringspan.schedule.text import format_schedule
from ringspan.schedule.visible import A_VISIBLE, Visible

_CONTEXT = 2  # steps shown before and after the failing step

# The content of a part of a sum: for each segment of query heads, the set of owners of the other side, as bits. Blocks
# share parts, so a part is written to only on its owner's rank, where it belongs to one block.
_Part = dict[int, int]
_Name = tuple[str, int]  # kind and owner


def validate(schedule: Schedule, visible: Visible) -> None:
    """Check that a schedule computes every visible pair exactly once and sends nothing that is not used.

    Raises:
        ScheduleError: It does not; the message shows the failing step.
    """
    check_arguments(schedule=(A_SCHEDULE, schedule), visible=(A_VISIBLE, visible))
    if schedule.world_size != visible.world_size:
        raise ScheduleError(
            f"the schedule has {schedule.world_size} ranks and visible has {visible.world_size}",
            remedy="build both for the same group",
        )
    proof = _Proof(schedule, visible)
    for t, step in enumerate(schedule.steps):
        proof.follow(t, step)
    proof.conclude()


class _Proof:
    """The state of the proof: what every rank holds after each step."""

    def __init__(self, schedule: Schedule, visible: Visible) -> None:
        self.schedule = schedule
        self.visible = visible
        self.t = 0
        self.q_kind: Kind | None = None  # "q" in a forward schedule, "q_grad" in a backward one
        self.has_replicated_query = False
        self.segments = Segments(schedule)
        ranks = range(schedule.world_size)
        self.arriving: list[Transfer] = []  # inputs, in this step
        self.received_heads: list[defaultdict[_Name, int]] = [defaultdict(int) for _ in ranks]
        self.unread: list[dict[Block, int]] = [{} for _ in ranks]  # received inputs, with the heads not read so far
        self.sums: list[dict[Block, _Part]] = [{} for _ in ranks]  # on the owner's rank, keyed by the whole block
        self.sent_heads: list[defaultdict[_Name, int]] = [defaultdict(int) for _ in ranks]

    def follow(self, t: int, step: Step) -> None:
        """Apply one step: take the sums and inputs that are sent in their state at its start, attend, then deliver."""
        self.t = t
        self._check_names(step)
        moving: list[Transfer] = []
        self.arriving = []
        for transfer in step.transfers:
            (moving if transfer.block.kind in SUMS else self.arriving).append(transfer)
        parts = [self._take(transfer) for transfer in moving]
        for transfer in self.arriving:
            self._read(transfer.src, transfer.block, "sends")
        for merge in step.merges:
            self._merge_all(merge.block)
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                self._attend(rank, attend)
        for transfer in self.arriving:
            self._receive(transfer)
        for transfer, part in zip(moving, parts, strict=True):
            self._add(transfer.dst, transfer.block, part, transfer)

    def conclude(self) -> None:
        """Check that every received input was read, that no part is left behind, and that every sum is complete."""
        for rank, unread in enumerate(self.unread):
            for block, heads in unread.items():
                if heads:
                    self._fail_unread(rank, block, heads)
        self.t = max(0, self.schedule.num_steps - 1)
        for rank, sums in enumerate(self.sums):
            for block, part in sums.items():
                if block.owner not in (rank, ALL) and part:
                    self._fail(f"rank {rank} ends with a part of {block}; send it to rank {block.owner}")
        self._check_complete(["dq", "dkv"] if self.q_kind == "q_grad" else ["out"])

    def _fail_unread(self, rank: int, block: Block, heads: int) -> NoReturn:
        arrivals = ((t, transfer) for t, step in enumerate(self.schedule.steps) for transfer in step.transfers)
        self.t = next(t for t, transfer in arrivals if (transfer.block, transfer.dst) == (block, rank))
        what = "it" if heads == self.segments.bits_of(block) else "some heads of it"
        self._fail(f"rank {rank} receives {block} in step {self.t} and never reads {what}; do not send it")

    def _check_complete(self, kinds: list[Kind]) -> None:
        for kind in kinds:
            for rank, sums in enumerate(self.sums):
                block = Block(kind, ALL if self.has_replicated_query else rank)
                self._check_home(rank, block, sums.get(block, {}))
        if "dkv" not in kinds:
            return
        # Each rank keeps its own part of dkv(ALL); the sum of the parts over the group is the gradient.
        replicated = Block("dkv", ALL)
        union: _Part = defaultdict(int)
        for rank, sums in enumerate(self.sums):
            for segment, bits in sums.get(replicated, {}).items():
                if union[segment] & bits:
                    self._fail(f"rank {rank} adds pairs to {replicated} that another rank has added already")
                union[segment] |= bits
        self._check_home(0, replicated, union)

    def _check_home(self, rank: int, block: Block, part: _Part) -> None:
        due = self.visible.seen_by(block)
        for segment in self.segments.all:
            if missing := due & ~part.get(segment, 0):
                names = self._names("q" if block.kind == "dkv" else "kv", missing)
                self._fail(f"after the last step {block} on rank {rank} lacks {names}{self.segments.text_of(segment)}")

    def _check_names(self, step: Step) -> None:
        world_size = self.schedule.world_size
        if len(step.attends) != world_size:
            self._fail(f"the step has attends for {len(step.attends)} ranks; the schedule has {world_size}")
        for transfer in step.transfers:
            block, src, dst = transfer
            if not (0 <= src < world_size and 0 <= dst < world_size and ALL <= block.owner < world_size):
                self._fail_rank(transfer)
            if src == dst:
                self._fail(f"rank {src} sends {block} to itself; remove the transfer")
            if not self.segments.is_known_legal:
                self._check_heads(src, block)

    def _fail_rank(self, transfer: Transfer) -> NoReturn:
        block, src, dst = transfer
        ranks = range(self.schedule.world_size)
        named = {"src": src, "dst": dst, "owner": block.owner}
        name = next(name for name, rank in named.items() if rank not in ranks)
        self._fail(f"{transfer} from rank {src}: {name} {named[name]} is not one of the {len(ranks)} ranks")

    def _check_heads(self, rank: int, block: Block) -> None:
        if (wrong := self.segments.refuses(block)) is not None:
            self._fail(f"rank {rank} names {block}: {wrong}")

    def _read(self, rank: int, block: Block, verb: str) -> None:
        """Note that the rank reads an input; fail if the rank does not hold it."""
        if block.owner in (rank, ALL):
            return
        unread = self.unread[rank]
        if block in unread:
            unread[block] = 0
            return
        if block.whole in unread:
            unread[block.whole] &= ~self.segments.bits_of(block)
            return
        is_arriving = any(dst == rank and name in (block, block.whole) for name, _, dst in self.arriving)
        reason = "arrives only in this step" if is_arriving else "has not been received"
        self._fail(f"rank {rank} {verb} {block}, which {reason}")

    def _receive(self, transfer: Transfer) -> None:
        block, src, dst = transfer
        heads = self.segments.bits_of(block)
        if block.owner in (dst, ALL) or self.received_heads[dst][block.kind, block.owner] & heads:
            self._fail(f"rank {dst} receives {block} from rank {src}, but holds it already; send it once")
        self.received_heads[dst][block.kind, block.owner] |= heads
        self.unread[dst][block] = heads

    def _attend(self, rank: int, attend: Attend) -> None:
        self._check_attend(rank, attend)
        for block in (*attend.qs, *attend.kvs):
            self._read(rank, block, "attends")
        segments = self.segments.of(attend.qs[0])
        parts: dict[int, _Part] = {}
        for block, bits in self.visible.contributions(attend):
            if bits not in parts:
                parts[bits] = dict.fromkeys(segments, bits)
            self._add(rank, block, parts[bits], attend)
        if (pruned := self.visible.prune(attend)) != attend:
            kept = () if pruned is None else (*pruned.qs, *pruned.kvs)
            idle = next(block for block in (*attend.qs, *attend.kvs) if block not in kept)
            self._fail(f"rank {rank} attends {attend}, but {idle} has no visible pair there; leave it out")

    def _check_attend(self, rank: int, attend: Attend) -> None:
        kinds = {q.kind for q in attend.qs}, {kv.kind for kv in attend.kvs}
        if kinds not in (({"q"}, {"kv"}), ({"q_grad"}, {"kv"})):
            self._fail(f"rank {rank} attends {attend}; an attend takes blocks q×kv or q_grad×kv")
        if len({q.heads for q in attend.qs}) > 1 or len({kv.heads for kv in attend.kvs}) > 1:
            self._fail(f"rank {rank} attends {attend}; the blocks of one side of an attend have the same heads")
        if len(set(attend.qs)) < len(attend.qs) or len(set(attend.kvs)) < len(attend.kvs):
            self._fail(f"rank {rank} attends {attend}; a block appears twice")
        self._check_heads(rank, attend.qs[0])
        self._check_heads(rank, attend.kvs[0])
        if not self.segments.are_paired(attend.qs[0], attend.kvs[0]):
            self._fail(f"rank {rank} attends {attend}; the KV heads do not belong to the query heads")
        is_replicated = {q.owner == ALL for q in attend.qs}
        self.has_replicated_query = attend.qs[0].owner == ALL if self.q_kind is None else self.has_replicated_query
        if is_replicated != {self.has_replicated_query}:
            self._fail(f"rank {rank} attends {attend}; queries are blocks of ranks or q*, not both")
        if attend.qs[0] == Block("q_grad", ALL, attend.qs[0].heads):
            self._fail(f"rank {rank} attends {attend}; gradients of replicated queries (q*) are not supported")
        self.q_kind = self.q_kind or attend.qs[0].kind
        if attend.qs[0].kind != self.q_kind:
            self._fail(
                f"rank {rank} attends {attend}, others attend {self.q_kind}; make one schedule forward and one backward"
            )

    def _take(self, transfer: Transfer) -> _Part:
        """Remove and return the part of a sum that leaves its rank."""
        block, src, dst = transfer
        if src == block.owner:
            self._fail(f"rank {src} sends its own {block} away to rank {dst}")
        if block.owner == ALL:
            self._fail(f"rank {src} sends {block} to rank {dst}, but every rank keeps its own part; use an AllMerge")
        heads = self.segments.bits_of(block)
        part = self.sums[src].pop(block, {})
        if not part:
            self._fail(f"rank {src} sends {block} to rank {dst}, but holds no part of it")
        if self.sent_heads[src][block.kind, block.owner] & heads:
            self._fail(f"rank {src} sends {block} to rank {dst}, but has sent a part of it before; send the part once")
        self.sent_heads[src][block.kind, block.owner] |= heads
        return part

    def _merge_all(self, block: Block) -> None:
        if not block.is_sum or block != Block(block.kind, ALL):
            self._fail(f"{block}↔all: an AllMerge takes a sum that every rank holds, such as {Block('out', ALL)}")
        parts = [sums.pop(block, {}) for sums in self.sums]
        if not any(parts):
            self._fail(f"{block}↔all: no rank holds a part of it yet")
        for rank, part in enumerate(parts):
            self._add(0, block, part, Transfer(block, rank, 0))
        for sums in self.sums:
            sums[block] = dict(self.sums[0][block])

    def _add(self, rank: int, block: Block, part: _Part, source: Attend | Transfer) -> None:
        sums = self.sums[rank]
        if block.owner in (rank, ALL):
            held = sums.setdefault(block.whole, {})
        elif block in sums:
            held = sums[block] = dict(sums[block])
        else:
            sums[block] = part
            return
        for segment, bits in part.items():
            before = held.get(segment, 0)
            if before & bits:
                self._fail_twice(rank, block, segment, before & bits, source)
            held[segment] = before | bits

    def _fail_twice(self, rank: int, block: Block, segment: int, bits: int, source: Attend | Transfer) -> NoReturn:
        how = f"attends {source}" if isinstance(source, Attend) else f"merges {block} from rank {source.src}"
        names = self._names("q" if block.kind == "dkv" else "kv", bits)
        self._fail(f"rank {rank} {how}, but {block} there has {names} already{self.segments.text_of(segment)}")

    def _names(self, kind: Kind, bits: int) -> str:
        return ", ".join(str(Block(kind, owner)) for owner in self.visible.owners(bits))

    def _fail(self, what: str) -> NoReturn:
        steps = range(max(0, self.t - _CONTEXT), min(self.schedule.num_steps, self.t + _CONTEXT + 1))
        grid = format_schedule(self.schedule, steps, marked=self.t)
        raise ScheduleError(f"step {self.t}: {what}\n{grid}")


class Segments:
    """The segments of one schedule. A block is a range of segments, or a set of segments as bits of an int."""

    def __init__(self, schedule: Schedule) -> None:
        self.heads: Heads | None = schedule.heads
        cuts = {0, 1}
        self.is_known_legal = False  # whether every block is known to name existing heads
        if schedule.heads is not None:
            cuts = {0, schedule.heads.num_heads}
            ranges = {(block.kind, block.heads) for step in schedule.steps for block in step.blocks()}
            self.is_known_legal = all(self.refuses(Block(kind, ALL, heads)) is None for kind, heads in ranges)
            for kind, heads in ranges:
                if heads is not None:
                    width = schedule.heads.group if kind in ("kv", "dkv") else 1
                    cuts |= {heads.start * width, heads.stop * width}
        self._number = {head: i for i, head in enumerate(sorted(cuts))}
        self.all = range(len(cuts) - 1)
        self._bits: dict[tuple[str, range | None], int] = {}

    def refuses(self, block: Block) -> str | None:
        """Return the rule that a block's heads break, or None."""
        if block.heads is None:
            return None
        if self.heads is None:
            return "a range of heads needs a schedule with heads; pass heads="
        count = self.heads.num_kv_heads if block.kind in ("kv", "dkv") else self.heads.num_heads
        if block.heads.step != 1 or not 0 <= block.heads.start < block.heads.stop <= count:
            return f"a range of heads is not empty and lies within [0:{count}]"
        return None

    def of(self, block: Block) -> range:
        """Return the segments that a block covers."""
        if block.heads is None or self.heads is None:
            return self.all
        width = self.heads.group if block.kind in ("kv", "dkv") else 1
        return range(self._number[block.heads.start * width], self._number[block.heads.stop * width])

    def bits_of(self, block: Block) -> int:
        """Return the segments that a block covers as a set."""
        key = (block.kind, block.heads)
        bits = self._bits.get(key)
        if bits is None:
            segments = self.of(block)
            bits = self._bits[key] = (1 << segments.stop) - (1 << segments.start)
        return bits

    def are_paired(self, q: Block, kv: Block) -> bool:
        """Whether the KV heads belong to the query heads: whole groups of query heads, or a part of one group."""
        if self.heads is None:
            return True
        q_heads = q.heads or range(self.heads.num_heads)
        kv_heads = kv.heads or range(self.heads.num_kv_heads)
        served = range(kv_heads.start * self.heads.group, kv_heads.stop * self.heads.group)
        if len(kv_heads) == 1:
            return served.start <= q_heads.start and q_heads.stop <= served.stop
        return q_heads == served

    def text_of(self, segment: int) -> str:
        """Return the heads of a segment for a message, or nothing if there is only one segment."""
        if len(self.all) == 1:
            return ""
        start, stop = list(self._number)[segment : segment + 2]
        return f" for heads [{start}:{stop}]"

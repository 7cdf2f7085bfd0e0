"""What does one rank do, in which order, and where does it wait?

A schedule says what happens in a step. Running it also needs the future: when an arriving block is first read, when a
buffer is free, and after which reader a value may be dropped. `compile_rank` answers these questions once and returns a
flat program for an executor.

The rules:

- A rank waits for an input at its first reader.
- An arriving sum is merged before a transfer that takes it away, and otherwise before the receives of the step after
  next are posted. Sums are merged in schedule order, never in order of arrival, and at most two are pending.
- A forwarded block must have left before the receives are posted of the step in which its receiver first reads it. So
  two buffers are enough for a ring, and a transfer that is read late may take longer.
- A send of the rank's own block may take until the end.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from ringspan.arguments import WHOLE, check_arguments
from ringspan.errors import ShapeError
from ringspan.schedule.actions import A_SCHEDULE, Attend, Block, Schedule, Transfer


class Post(NamedTuple):
    """Start the sends and receives of a step."""

    step: int
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]


class Arrived(NamedTuple):
    """Wait for a receive; afterwards the rank holds the input, or has merged the sum into its own part."""

    step: int
    transfer: Transfer


class AllMerged(NamedTuple):
    """Wait for every other rank's part of a sum posted in `step` and merge all parts in rank order."""

    step: int
    block: Block


class Sent(NamedTuple):
    """Wait until a send has left its buffer."""

    step: int
    transfer: Transfer


class Do(NamedTuple):
    """Compute one attend of the schedule."""

    step: int
    attend: Attend


class Drop(NamedTuple):
    """Free a received input after its last reader."""

    block: Block


Instruction = Post | Arrived | AllMerged | Sent | Do | Drop
Program = tuple[Instruction, ...]


def compile_rank(schedule: Schedule, rank: int) -> Program:
    """Compile the program of one rank of a valid schedule."""
    check_arguments(schedule=(A_SCHEDULE, schedule), rank=(WHOLE, rank))
    if not 0 <= rank < schedule.world_size:
        remedy = f"use 0 to {schedule.world_size - 1}"
        raise ShapeError("the schedule has no such rank", argument="rank", value=rank, remedy=remedy)
    return _compile_rank(schedule, rank)


@lru_cache(maxsize=1024)
def _compile_rank(schedule: Schedule, rank: int) -> Program:
    return _Compiler(schedule, rank).program()


class _Compiler:
    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.code: list[Instruction] = []
        self.due: dict[Block, Arrived] = {}  # inputs in flight
        self.sums: list[Arrived | AllMerged] = []  # sums in flight, in schedule order
        self.sends: defaultdict[int, list[Sent]] = defaultdict(list)  # by the step before whose Post they must be done
        self.readers = _count_readers(schedule, rank)

    def program(self) -> Program:
        for t in range(self.schedule.num_steps):
            self._post(t)
            for attend in self.schedule.actions(self.rank, t).attends:
                for block in (*attend.qs, *attend.kvs):
                    self._need(block)
                self.code.append(Do(t, attend))
                for block in (*attend.qs, *attend.kvs):
                    self._done(block)
        self._settle_sums(lambda _: True)
        for t in sorted(self.sends):
            self._settle_sends(t)
        return tuple(self.code)

    def _post(self, t: int) -> None:
        _, sends, receives, merges = self.schedule.actions(self.rank, t)
        self._settle_sends(t)
        leaving = {transfer.block for transfer in sends if transfer.block.is_sum} | {merge.block for merge in merges}
        self._settle_sums(lambda wait: wait.step <= t - 2 or _sum_of(wait) in leaving)
        for transfer in sends:
            self._need(transfer.block)
        others = [peer for peer in range(self.schedule.world_size) if peer != self.rank]
        merge_sends = [Transfer(merge.block, self.rank, peer) for merge in merges for peer in others]
        merge_receives = [Transfer(merge.block, peer, self.rank) for merge in merges for peer in others]
        self.code.append(Post(t, (*sends, *merge_sends), (*receives, *merge_receives)))
        for transfer in (*sends, *merge_sends):
            self.sends[self._must_have_left(t, transfer)].append(Sent(t, transfer))
        for transfer in receives:
            if transfer.block.is_sum:
                self.sums.append(Arrived(t, transfer))
            else:
                self.due[transfer.block] = Arrived(t, transfer)
        self.sums += [AllMerged(t, merge.block) for merge in merges]

    def _must_have_left(self, t: int, transfer: Transfer) -> int:
        """Return the step before whose receives a send must be done; a range of heads is sent as a copy to be freed."""
        block = transfer.block
        if not block.is_sum and block.owner == self.rank and block.heads is None:
            return self.schedule.num_steps
        return first_reads(self.schedule).get((t, transfer), t + 1)

    def _need(self, block: Block) -> None:
        """Wait for an input unless the rank holds it already."""
        for name in (block, block.whole):
            if name in self.due:
                self.code.append(self.due.pop(name))

    def _settle_sums(self, is_due: Callable[[Arrived | AllMerged], bool]) -> None:
        self.code += [wait for wait in self.sums if is_due(wait)]
        self.sums = [wait for wait in self.sums if not is_due(wait)]

    def _settle_sends(self, t: int) -> None:
        for sent in self.sends.pop(t, []):
            self.code.append(sent)
            self._done(sent.transfer.block)

    def _done(self, block: Block) -> None:
        """Note that a reader is done; after the last one, drop the received input."""
        for name in (block, block.whole):
            if name in self.readers:
                self.readers[name] -= 1
                if not self.readers[name]:
                    self.code.append(Drop(name))
                return


def _sum_of(wait: Arrived | AllMerged) -> Block:
    return wait.transfer.block if isinstance(wait, Arrived) else wait.block


def _count_readers(schedule: Schedule, rank: int) -> dict[Block, int]:
    """Count the attends and sends that read each input that the rank receives."""
    counts: dict[Block, int] = {}
    for t in range(schedule.num_steps):
        attends, sends, receives, _ = schedule.actions(rank, t)
        reads = [block for attend in attends for block in (*attend.qs, *attend.kvs)]
        reads += [transfer.block for transfer in sends if not transfer.block.is_sum]
        for block in reads:
            name = block if block in counts else block.whole
            if name in counts:
                counts[name] += 1
        counts |= {transfer.block: 0 for transfer in receives if not transfer.block.is_sum}
    return counts


def first_reads(schedule: Schedule) -> dict[tuple[int, Transfer], int]:
    """Return, for each transfer of an input, the step in which its receiver first attends it or forwards it."""
    check_arguments(schedule=(A_SCHEDULE, schedule))
    return _first_reads(schedule)


@lru_cache(maxsize=64)
def _first_reads(schedule: Schedule) -> dict[tuple[int, Transfer], int]:
    waiting: dict[tuple[int, Block], tuple[int, Transfer]] = {}
    first: dict[tuple[int, Transfer], int] = {}
    for t, step in enumerate(schedule.steps):
        reads = [(transfer.src, transfer.block) for transfer in step.transfers]
        for rank, attends in enumerate(step.attends):
            reads += [(rank, block) for attend in attends for block in (*attend.qs, *attend.kvs)]
        for rank, block in reads:
            for name in (block, block.whole):
                if (rank, name) in waiting:
                    first[waiting.pop((rank, name))] = t
        for transfer in step.transfers:
            if not transfer.block.is_sum:
                waiting[transfer.dst, transfer.block] = (t, transfer)
    return first

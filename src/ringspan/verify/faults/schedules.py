"""Faults in the schedule and on the wire: which block arrives, how often, and what is in it."""

import numpy as np

from ringspan.verify.cases import VerifyCase, make_layout, round_to
from ringspan.verify.faults.record import fault
from ringspan.verify.faults.ring import FaultyRing, KeysValues, RankView, RingPart
from ringspan.verify.patterns import Numbers


@fault("last hop missing", "schedule", "last hop missing", "block missing", "no exchange")
class LastHopMissing(FaultyRing):
    """The ring stops one step early."""

    def steps(self, rank: int) -> list[int]:
        return super().steps(rank)[:-1]


@fault("own block missing", "schedule", "block missing", min_world_size=1)
class OwnBlockMissing(FaultyRing):
    """A rank does not attend to its own keys."""

    def steps(self, rank: int) -> list[int]:
        return super().steps(rank)[1:]


@fault("second hop missing", "schedule", "block missing", min_world_size=3)
class SecondHopMissing(FaultyRing):
    """Step 1 is skipped."""

    def steps(self, rank: int) -> list[int]:
        return [step for step in super().steps(rank) if step != 1]


@fault("one rank stops early", "schedule", "last hop missing", "block missing", "no exchange")
class OneRankStopsEarly(FaultyRing):
    """The last rank leaves out its last step."""

    def steps(self, rank: int) -> list[int]:
        steps = super().steps(rank)
        return steps[:-1] if rank == self.world_size - 1 else steps


@fault("no exchange", "schedule", "no exchange", "block missing", "last hop missing")
class NoExchange(FaultyRing):
    """Every rank attends to its own keys only."""

    def steps(self, rank: int) -> list[int]:
        return [0]


@fault("own block twice", "schedule", "block counted twice", min_world_size=1)
class OwnBlockTwice(FaultyRing):
    """The local block is attended before the ring and in it."""

    def steps(self, rank: int) -> list[int]:
        return [0, *super().steps(rank)]


@fault("last block twice", "schedule", "block counted twice")
class LastBlockTwice(FaultyRing):
    """The last step runs again."""

    def steps(self, rank: int) -> list[int]:
        return [*super().steps(rank), self.world_size - 1]


@fault("block of rank 0 missing", "wire", "block missing", "last hop missing")
class BlockOfRankZeroMissing(FaultyRing):
    """Rank 0's send is skipped, so no other rank attends to its keys."""

    def steps(self, rank: int) -> list[int]:
        return [step for step in super().steps(rank) if rank == 0 or self.owner_at(rank, step) != 0]


class _OtherBlock(FaultyRing):
    """The data of another step under the right mask."""

    def source(self, view: RankView) -> int:
        return view.owner

    def receive(self, view: RankView) -> KeysValues:
        return self.resized(self.block_of(self.source(view)), len(self.kv_rows(view.owner)))

    def resized(self, block: KeysValues, length: int) -> KeysValues:
        rows = np.resize(np.arange(block.k.shape[2]), length)
        return KeysValues(block.k[:, :, rows], block.v[:, :, rows])


@fault("stale buffer", "wire", "stale buffer", "no exchange")
class StaleBuffer(_OtherBlock):
    """A step attends before its receive is done, to the block of the step before."""

    def source(self, view: RankView) -> int:
        return self.owner_at(view.rank, max(view.step - 1, 0))


@fault("receive buffer never filled again", "wire", "stale buffer", min_world_size=3)
class OneReceiveOnly(_OtherBlock):
    """All later steps attend to the first block that arrived."""

    def source(self, view: RankView) -> int:
        return self.owner_at(view.rank, min(view.step, 1))


@fault("last receive not awaited", "wire", "stale buffer", "no exchange")
class LastReceiveNotAwaited(_OtherBlock):
    """Only the last step attends to a stale block."""

    def source(self, view: RankView) -> int:
        return self.owner_at(view.rank, view.step - (view.step == self.world_size - 1))


@fault("wrong direction", "schedule", min_world_size=3)
class WrongDirection(_OtherBlock):
    """Blocks come from the other neighbour than masks are made for."""

    def source(self, view: RankView) -> int:
        return (view.rank + view.step) % self.world_size


@fault("overwritten before it is sent", "wire", "block of the next step", "stale buffer", "wrong direction")
class OneStepAhead(_OtherBlock):
    """The receive lands in the buffer that is being attended to."""

    def source(self, view: RankView) -> int:
        return self.owner_at(view.rank, view.step + 1)


@fault("values lag behind", "wire", "keys and values of different blocks")
class ValuesLag(_OtherBlock):
    """Keys have arrived, values are those of the step before."""

    def receive(self, view: RankView) -> KeysValues:
        lagging = self.resized(
            self.block_of(self.owner_at(view.rank, max(view.step - 1, 0))), len(self.kv_rows(view.owner))
        )
        return KeysValues(self.block_of(view.owner).k, lagging.v)


@fault("keys lag behind", "wire", "keys and values of different blocks")
class KeysLag(_OtherBlock):
    """Values have arrived, keys are those of the step before."""

    def receive(self, view: RankView) -> KeysValues:
        lagging = self.resized(
            self.block_of(self.owner_at(view.rank, max(view.step - 1, 0))), len(self.kv_rows(view.owner))
        )
        return KeysValues(lagging.k, self.block_of(view.owner).v)


@fault("keys and values swapped", "wire", min_world_size=1)
class KeysValuesSwapped(FaultyRing):
    """The halves of a packed buffer are taken for each other."""

    def block_of(self, owner: int) -> KeysValues:
        block = super().block_of(owner)
        return KeysValues(block.v, block.k)


@fault("last key of a block lost", "wire", "last key of a block missing", min_world_size=1)
class LastKeyLost(FaultyRing):
    """A slice ends one short."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view).copy()
        seen[..., -1:] = 0
        return seen


@fault("uneven shards cut", "adapter")
class UnevenShardsCut(FaultyRing):
    """All shards are taken to be as long as the shortest."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view).copy()
        seen[..., min(len(self.kv_rows(rank)) for rank in range(self.world_size)) :] = 0
        return seen


@fault("other keys on one rank", "adapter", "wrong keys of one rank")
class OtherKeysOnOneRank(FaultyRing):
    """Rank 1 computed its keys and values from another batch."""

    def __init__(self, case: VerifyCase) -> None:
        super().__init__(case)
        rng = np.random.default_rng(1)
        for name in "kv":
            x = self.whole[name][:, :, self.kv_rows(1 % self.world_size)]
            self.whole[name][:, :, self.kv_rows(1 % self.world_size)] = rng.standard_normal(x.shape)


@fault("other queries on one rank", "adapter", "wrong queries of one rank")
class OtherQueriesOnOneRank(FaultyRing):
    """The last rank computed its queries from another batch."""

    def __init__(self, case: VerifyCase) -> None:
        super().__init__(case)
        rows = self.q_rows(self.world_size - 1)
        self.whole["q"][:, :, rows] = np.random.default_rng(2).standard_normal(self.whole["q"][:, :, rows].shape)


@fault("zeros from one rank", "wire", "wrong keys of one rank")
class ZerosFromOneRank(FaultyRing):
    """Rank 0's buffer is sent before it is filled."""

    def block_of(self, owner: int) -> KeysValues:
        block = super().block_of(owner)
        return KeysValues(block.k * 0, block.v * 0) if owner == 0 else block


@fault("wire in bfloat16", "wire", "precision lost")
class WireInBfloat16(FaultyRing):
    """Keys and values of other ranks are rounded."""

    def receive(self, view: RankView) -> KeysValues:
        block = super().receive(view)
        return block if view.step == 0 else KeysValues(*(round_to(x, "bfloat16").astype(x.dtype) for x in block))


@fault("wire in float16", "wire", "precision lost")
class WireInFloat16(FaultyRing):
    """Keys and values of other ranks are rounded."""

    def receive(self, view: RankView) -> KeysValues:
        block = super().receive(view)
        return block if view.step == 0 else KeysValues(*(round_to(x, "float16").astype(x.dtype) for x in block))


@fault("results on the wrong rank", "adapter")
class ResultsOnTheWrongRank(FaultyRing):
    """Every rank gets the rows of its neighbour."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        rows = np.resize(np.arange(len(self.q_rows((rank + 1) % self.world_size))), len(self.q_rows(rank)))
        other = self._parts[(rank + 1) % self.world_size]
        return RingPart(other.out[:, :, rows], other.lse[:, :, rows])

    def attend(self, rank: int) -> RingPart:
        part = super().attend(rank)
        self._parts: dict[int, RingPart] = getattr(self, "_parts", {}) | {rank: part}
        return part


@fault("gathered in the wrong order", "adapter", "rows in another order")
class GatheredInTheWrongOrder(FaultyRing):
    """Shards are concatenated as if they were contiguous; contiguous ones as if they were zigzag."""

    def out_rows(self, rank: int) -> Numbers:
        name = "zigzag" if self.case.layout == "contiguous" else "contiguous"
        layout = make_layout(name, self.case.length, self.world_size)
        order = np.concatenate([layout.positions(other) for other in range(self.world_size)])
        start = sum(len(self.q_rows(other)) for other in range(rank))
        rows: Numbers = order[start : start + len(self.q_rows(rank))]
        return rows

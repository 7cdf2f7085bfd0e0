"""Faults in single keys, heads, columns and positions, and in the numbers that a running softmax carries."""

import numpy as np

from ringspan.verify.cases import VerifyCase
from ringspan.verify.faults.record import fault
from ringspan.verify.faults.ring import FaultyRing, KeysValues, RankView, RingPart
from ringspan.verify.patterns import Numbers


@fault("last key of the sequence missing", "mask", "key missing", min_world_size=1)
class LastKeyMissing(FaultyRing):
    """A loop over keys stops one short."""

    def allowed(self, view: RankView) -> Numbers:
        last = self.kv_positions(view.owner) == self.kv_layout.all_positions().max()
        seen: Numbers = super().allowed(view) * ~last
        return seen


@fault("first key of received blocks missing", "wire", "first key of a block missing")
class FirstReceivedKeyMissing(FaultyRing):
    """A header of the message is taken off twice."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view).copy()
        seen[..., :1] *= view.step == 0
        return seen


@fault("blocks in reverse order of ranks", "wire", "blocks in another order", "block of the next step", "stale buffer")
class BlocksReversed(FaultyRing):
    """The block of rank P - 1 - i is taken for that of rank i."""

    def receive(self, view: RankView) -> KeysValues:
        found = self.block_of(self.world_size - 1 - view.owner)
        rows = np.resize(np.arange(found.k.shape[2]), len(self.kv_rows(view.owner)))
        return KeysValues(found.k[:, :, rows], found.v[:, :, rows])


@fault("two heads swapped", "heads", "heads in another order", min_world_size=1)
class TwoHeadsSwapped(FaultyRing):
    """Heads 0 and 1 of the output change places."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        order = [1, 0, *range(2, self.case.num_heads)]
        return RingPart(part.out[:, order], part.lse[:, order])


@fault("halves of a head swapped", "kernel", "columns of a head in another order", min_world_size=1)
class HalvesOfAHeadSwapped(FaultyRing):
    """The columns of the output are read in the wrong order."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=np.roll(part.out, part.out.shape[-1] // 2, -1))


@fault("halves of dv swapped", "backward", "columns of a head in another order", min_world_size=1)
class HalvesOfDvSwapped(FaultyRing):
    """dv is unpacked from a buffer in the wrong order."""

    def finish_gradients(self, grads: dict[str, Numbers]) -> dict[str, Numbers]:
        return grads | {"dv": np.roll(grads["dv"], grads["dv"].shape[-1] // 2, -1)}


@fault("RoPE of one rank off by one", "adapter", "RoPE offset")
class RopeOfOneRank(FaultyRing):
    """The last rank begins at the position after its first."""

    def rotate(self, x: Numbers, positions: Numbers, rank: int) -> Numbers:
        return super().rotate(x, positions + (rank == self.world_size - 1), rank)


@fault("RoPE of neighbouring columns", "adapter", "RoPE turns other pairs", min_world_size=1)
class RopeOfNeighbours(FaultyRing):
    """The pair (2 i, 2 i + 1) is turned, where the model pairs column i with i + dim / 2."""

    def rotate(self, x: Numbers, positions: Numbers, rank: int) -> Numbers:
        columns = np.concatenate([np.arange(0, x.shape[-1], 2), np.arange(1, x.shape[-1], 2)])
        return super().rotate(x[..., columns], positions, rank) if self.case.has_rope else x


@fault("scale after the softcap", "kernel", "softcap before the scale", min_world_size=1)
class ScaleAfterSoftcap(FaultyRing):
    """Scores are capped first and scaled then."""

    def scores(self, view: RankView, q: Numbers, k: Numbers) -> Numbers:
        if self.softcap is None:
            return super().scores(view, q, k)
        capped: Numbers = self.softcap * np.tanh(q @ k.swapaxes(-1, -2) / self.softcap) * self.scale
        return capped


@fault("rows without a key in some block at zero", "merge", "empty block spoils its rows")
class EmptyBlockZeroes(FaultyRing):
    """A block in which a row sees nothing makes it NaN, and NaN is replaced by 0."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        spoilt = part._replace(out=np.where(np.isneginf(part.lse)[..., None], np.nan, part.out))
        merged = super().merge(into, spoilt, view)
        return merged._replace(out=np.where(np.isnan(into.out), np.nan, merged.out))

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=np.nan_to_num(part.out))


@fault("output not rescaled to the new maximum", "kernel", "partials not rescaled")
class OutputNotRescaled(FaultyRing):
    """The running sum of weights is rescaled when the maximum grows, the running output is not."""

    def attend(self, rank: int) -> RingPart:
        self.peak = np.asarray(-np.inf)
        return super().attend(rank)

    def partial(self, view: RankView, scores: Numbers, seen: Numbers, v: Numbers) -> RingPart:
        self.new_peak = np.where(seen > 0, scores, -np.inf).max(-1, initial=-np.inf)
        return super().partial(view, scores, seen, v)

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        merged = super().merge(into, part, view)
        highest = np.maximum(self.peak, self.new_peak)
        growth = np.where(np.isneginf(self.peak), 0.0, highest - self.peak)
        kept = np.nan_to_num(np.exp(into.lse - merged.lse + growth), nan=0.0)
        new = np.nan_to_num(np.exp(part.lse - merged.lse), nan=0.0)
        self.peak = highest
        return merged._replace(out=into.out * kept[..., None] + part.out * new[..., None])


@fault("larger log-sum-exp kept", "merge", "log-sum-exp not updated")
class LargerLseKept(FaultyRing):
    """max for logaddexp, and the weights follow it."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        lse = np.maximum(into.lse, part.lse)
        with np.errstate(invalid="ignore"):
            a, b = (np.nan_to_num(np.exp(x.lse - lse), nan=0.0)[..., None] for x in (into, part))
        return RingPart(into.out * a + part.out * b, lse)


@fault("log-sum-exp of the last block returned", "merge", "log-sum-exp of one block", "log-sum-exp not updated")
class LastLseReturned(FaultyRing):
    """The output is merged, the log-sum-exp is that of the last step."""

    def __init__(self, case: VerifyCase) -> None:
        super().__init__(case)
        self.latest: dict[int, Numbers] = {}

    def partial(self, view: RankView, scores: Numbers, seen: Numbers, v: Numbers) -> RingPart:
        part = super().partial(view, scores, seen, v)
        self.latest[view.rank] = part.lse
        return part

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(lse=self.latest[rank])


@fault("queries returned", "adapter", "an input returned as the output", min_world_size=1)
class QueriesReturned(FaultyRing):
    """A stub is left in place."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=self.whole["q"][:, :, self.q_rows(rank)])

"""Faults in the kernel, in merging, in sinks and in the order of heads."""

import numpy as np

from ringspan.verify.cases import round_to
from ringspan.verify.faults.record import fault
from ringspan.verify.faults.ring import FaultyRing, RankView, RingPart
from ringspan.verify.patterns import Numbers


class _Weighted(FaultyRing):
    """A merge with weights of its own."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        raise NotImplementedError

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        with np.errstate(invalid="ignore", over="ignore"):
            shares = [np.nan_to_num(share, nan=0.0)[..., None] for share in self.shares(into.lse, part.lse)]
        return RingPart(into.out * shares[0] + part.out * shares[1], np.logaddexp(into.lse, part.lse))


@fault("partials added", "merge")
class PartialsAdded(_Weighted):
    """Normalised outputs are added."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        return np.ones_like(into), np.ones_like(part)


@fault("partials averaged", "merge")
class PartialsAveraged(FaultyRing):
    """The mean of all blocks."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        return RingPart(into.out + part.out / self.world_size, np.logaddexp(into.lse, part.lse))


@fault("base 2 taken for base e", "merge", "log-sum-exp in base 2")
class BaseTwo(_Weighted):
    """The kernel's log-sum-exp is log2, the merge takes it for ln."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        total = np.logaddexp(into, part)
        a, b = np.exp((into - total) / np.log(2)), np.exp((part - total) / np.log(2))
        return a / (a + b), b / (a + b)


@fault("merge in powers of 2", "merge", "log-sum-exp in base 2")
class PowersOfTwo(FaultyRing):
    """exp2(lse) for exp(lse)."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        with np.errstate(invalid="ignore"):
            lse = np.logaddexp2(into.lse, part.lse)
            a, b = (np.nan_to_num(np.exp2(x.lse - lse), nan=0.0)[..., None] for x in (into, part))
        return RingPart(into.out * a + part.out * b, lse)


@fault("merge weights swapped", "merge")
class WeightsSwapped(_Weighted):
    """Each result gets the other's share."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        total = np.logaddexp(into, part)
        return np.exp(part - total), np.exp(into - total)


@fault("accumulator not rescaled", "merge", "partials not rescaled")
class AccumulatorNotRescaled(_Weighted):
    """Only the new result is weighted."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        return np.ones_like(into), np.exp(part - np.logaddexp(into, part))


@fault("new partial not weighted", "merge", "partials not rescaled")
class PartNotWeighted(_Weighted):
    """Only the accumulated result is weighted."""

    def shares(self, into: Numbers, part: Numbers) -> tuple[Numbers, Numbers]:
        return np.exp(into - np.logaddexp(into, part)), np.ones_like(part)


@fault("log-sum-exp not updated", "merge", "log-sum-exp not updated", "log-sum-exp of one block")
class LseNotUpdated(FaultyRing):
    """The first block's log-sum-exp stays."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        merged = super().merge(into, part, view)
        return merged._replace(lse=np.where(np.isneginf(into.lse), part.lse, into.lse))


@fault("log-sum-exp overwritten", "merge", "log-sum-exp not updated", "log-sum-exp of one block")
class LseOverwritten(FaultyRing):
    """The latest block's log-sum-exp replaces that of all."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        return super().merge(into, part, view)._replace(lse=part.lse)


@fault("last partial wins", "merge", "last partial wins", "last hop missing", "block missing")
class LastPartialWins(FaultyRing):
    """The output is overwritten in every step."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        return part


@fault("running maximum ignored", "merge")
class RunningMaximumIgnored(FaultyRing):
    """Sums of exponentials are added although each is relative to a maximum of its own."""

    def partial(self, view: RankView, scores: Numbers, seen: Numbers, v: Numbers) -> RingPart:
        part = super().partial(view, scores, seen, v)
        peak = np.where(seen > 0, scores, -np.inf).max(-1, initial=-np.inf)
        return part._replace(lse=np.where(np.isneginf(peak), -np.inf, part.lse - np.where(np.isneginf(peak), 0, peak)))


@fault("scale left out", "kernel", min_world_size=1)
class ScaleLeftOut(FaultyRing):
    """Scores are not scaled."""

    def score_scale(self, view: RankView) -> float:
        return 1.0


@fault("scale applied twice", "kernel", min_world_size=1)
class ScaleTwice(FaultyRing):
    """Queries are scaled, and scores again."""

    def score_scale(self, view: RankView) -> float:
        return self.scale**2


@fault("given scale ignored", "adapter", min_world_size=1)
class GivenScaleIgnored(FaultyRing):
    """1/sqrt(head_dim) whatever is asked for."""

    def score_scale(self, view: RankView) -> float:
        return float(self.whole["q"].shape[-1] ** -0.5)


@fault("exponent in base 2", "kernel", min_world_size=1)
class ExponentInBaseTwo(FaultyRing):
    """exp2 without the factor log2(e)."""

    def score_scale(self, view: RankView) -> float:
        return float(self.scale * np.log(2))


@fault("weights not normalised", "kernel", min_world_size=1)
class NotNormalised(FaultyRing):
    """The sum is never divided by."""

    def finish(self, rank: int, part: RingPart) -> RingPart:
        part = super().finish(rank, part)
        return part._replace(out=part.out * np.where(np.isneginf(part.lse), 1, np.exp(part.lse))[..., None])


@fault("weights in bfloat16", "kernel", "precision lost", min_world_size=1)
class WeightsInBfloat16(FaultyRing):
    """Probabilities are rounded before they are multiplied by the values."""

    def weigh(self, view: RankView, weights: Numbers, v: Numbers) -> Numbers:
        return round_to(weights, "bfloat16").astype(weights.dtype) @ v


@fault("accumulator in bfloat16", "merge", "precision lost", min_world_size=1)
class AccumulatorInBfloat16(FaultyRing):
    """Outputs are rounded after every merge."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        merged = super().merge(into, part, view)
        return merged._replace(out=round_to(merged.out, "bfloat16").astype(merged.out.dtype))


@fault("log-sum-exp in bfloat16", "wire", "precision lost")
class LseInBfloat16(FaultyRing):
    """The log-sum-exp is sent in the type of the tensors."""

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        return super().merge(into, part._replace(lse=round_to(part.lse, "bfloat16").astype(part.lse.dtype)), view)


@fault("sink ignored", "adapter", min_world_size=1)
class SinkIgnored(FaultyRing):
    """s_aux is accepted and dropped."""

    def finish(self, rank: int, part: RingPart) -> RingPart:
        return part


@fault("sink in every block", "merge", "sink counted more than once")
class SinkInEveryBlock(FaultyRing):
    """Each step adds the sink to its own softmax."""

    def finish(self, rank: int, part: RingPart) -> RingPart:
        if self.sinks is None:
            return part
        lse = np.logaddexp(part.lse, self.sinks[:, None] + np.log(self.world_size))
        return RingPart(part.out * np.exp(part.lse - lse)[..., None], lse)


@fault("sink of another head", "adapter", min_world_size=1)
class SinkOfAnotherHead(FaultyRing):
    """Sinks are dealt to the wrong heads."""

    def finish(self, rank: int, part: RingPart) -> RingPart:
        if self.sinks is None:
            return part
        lse = np.logaddexp(part.lse, np.roll(self.sinks, 1)[:, None])
        return RingPart(part.out * np.exp(part.lse - lse)[..., None], lse)


@fault("sink missing in the log-sum-exp", "kernel", min_world_size=1)
class SinkMissingInLse(FaultyRing):
    """The output is right, the log-sum-exp leaves the sink out."""

    def attend(self, rank: int) -> RingPart:
        self._without = getattr(self, "_without", {})
        return super().attend(rank)

    def finish(self, rank: int, part: RingPart) -> RingPart:
        self._without[rank] = part.lse
        return super().finish(rank, part)

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(lse=self._without[rank])


@fault("log-sum-exp returned in base 2", "kernel", "log-sum-exp in base 2", min_world_size=1)
class LseReturnedInBaseTwo(FaultyRing):
    """The returned log-sum-exp is log2."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(lse=part.lse / np.log(2))


@fault(
    "log-sum-exp without the maximum",
    "kernel",
    "maximum missing in the log-sum-exp",
    "log-sum-exp of one block",
    min_world_size=1,
)
class LseWithoutMaximum(FaultyRing):
    """The returned log-sum-exp is the logarithm of the shifted sum."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        question = self.case.question()
        heads = [self.kv_head(head) for head in range(self.case.num_heads)]
        q, k = question.q[:, :, self.q_rows(rank)], question.k[:, heads]
        if self.case.has_rope or self.softcap is not None or self.sinks is not None:
            return part
        seen = visible_rows(self, rank)
        peak = np.where(seen, q @ k.swapaxes(-1, -2) * self.scale, -np.inf).max(-1)
        return part._replace(lse=np.where(np.isneginf(peak), part.lse, part.lse - np.where(np.isneginf(peak), 0, peak)))


def visible_rows(ring: FaultyRing, rank: int) -> Numbers:
    """The keys that a rank's queries see, with axes for batch and heads."""
    counts = ring.case.counts()[..., ring.q_rows(rank), :] > 0
    seen: Numbers = counts[:, None] if counts.ndim == 3 else counts
    return seen


@fault("log-sum-exp of the rank's own block", "kernel", "log-sum-exp of one block", "log-sum-exp not updated")
class LseOfOwnBlock(FaultyRing):
    """The output is merged, the log-sum-exp is that of step 0."""

    def attend(self, rank: int) -> RingPart:
        self._own: dict[int, Numbers] = getattr(self, "_own", {})
        return super().attend(rank)

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        if view.step == 0:
            self._own[view.rank] = part.lse
        return super().merge(into, part, view)

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(lse=self._own[rank])


@fault("output left at zero on one rank", "kernel", "output left at zero")
class ZeroOnOneRank(FaultyRing):
    """Rank 0 never writes its output."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=part.out * 0) if rank == 0 else part


@fault("output left at zero", "kernel", min_world_size=1)
class ZeroOutput(FaultyRing):
    """The output is never written."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=part.out * 0)


@fault("NaN from the first empty block", "merge", "empty block spoils its rows", "NaN", "NaN in rows without a key")
class NanFromEmptyBlock(FaultyRing):
    """A block in which a row sees nothing makes the row NaN."""

    def partial(self, view: RankView, scores: Numbers, seen: Numbers, v: Numbers) -> RingPart:
        part = super().partial(view, scores, seen, v)
        is_empty = np.isneginf(part.lse) & (view.step > 0)
        return part._replace(out=np.where(is_empty[..., None], np.nan, part.out))

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        return super().merge(into, part, view)


@fault("GQA repeat order", "heads", min_world_size=1)
class GqaRepeatOrder(FaultyRing):
    """repeat for repeat_interleave: query head i uses KV head i mod n."""

    def kv_head(self, head: int) -> int:
        return head % self.case.num_kv_heads


@fault("KV head 0 for all", "heads", "wrong KV head", min_world_size=1)
class KvHeadZero(FaultyRing):
    """Only the first KV head is used."""

    def kv_head(self, head: int) -> int:
        return 0


@fault("KV heads shifted", "heads", "wrong KV head", min_world_size=1)
class KvHeadsShifted(FaultyRing):
    """Each query head uses the next KV head."""

    def kv_head(self, head: int) -> int:
        return (super().kv_head(head) + 1) % self.case.num_kv_heads


@fault("heads in another order", "heads", min_world_size=1)
class HeadsReordered(FaultyRing):
    """An all-to-all that gives heads back in another order."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        order = np.arange(self.case.num_heads).reshape(2, -1).T.reshape(-1)
        return RingPart(part.out[:, order], part.lse[:, order])


@fault("heads and tokens mixed up", "adapter", min_world_size=1)
class HeadsAndTokensMixedUp(FaultyRing):
    """view where transpose is meant."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=part.out.transpose(0, 2, 1, 3).reshape(part.out.shape))


@fault("batch rows in reverse", "adapter", "batch rows mixed up", min_world_size=1)
class BatchRowsReversed(FaultyRing):
    """Rows of the batch change places."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        return part._replace(out=part.out[::-1])

"""Faults in the backward pass only: the output is right."""

import numpy as np

from ringspan.verify.cases import round_to
from ringspan.verify.faults.record import fault
from ringspan.verify.faults.ring import FaultyRing, RankView, RingPart
from ringspan.verify.patterns import Numbers

Grads = dict[str, Numbers]


@fault("dkv not sent home", "backward", "gradient not summed over ranks", "gradient of a block missing")
class DkvNotSentHome(FaultyRing):
    """Contributions of other ranks' queries are dropped."""

    def add(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return total + contribution if view.step == 0 else total


@fault("last contribution to dkv lost", "backward", "gradient of a block missing", "gradient not summed over ranks")
class LastContributionLost(FaultyRing):
    """The last hop of the backward ring is missing."""

    def add(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return total if view.step == self.world_size - 1 else total + contribution


@fault("own contribution to dkv twice", "backward", "gradient of a block counted twice", min_world_size=1)
class OwnContributionTwice(FaultyRing):
    """The accumulator starts with the local gradient and adds it again."""

    def add(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return super().add(total, contribution * (2 if view.step == 0 else 1), view)


@fault("dkv overwritten", "backward", "gradient overwritten", "gradient of a block missing")
class DkvOverwritten(FaultyRing):
    """The last contribution replaces the sum."""

    def add(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return contribution


@fault("dq of one block only", "backward", "gradient not summed over ranks", "gradient of a block missing")
class DqOfOneBlock(FaultyRing):
    """dq keeps the local block's share."""

    def add_dq(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return total + contribution if view.step == 0 else total


@fault("dq misses the last block", "backward", "gradient of a block missing", "gradient not summed over ranks")
class DqMissesLast(FaultyRing):
    """The last step adds nothing to dq."""

    def add_dq(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        return total if view.step == self.world_size - 1 else total + contribution


@fault("dkv to the neighbour", "backward", "gradient on the wrong rank")
class DkvToNeighbour(FaultyRing):
    """The accumulators stop one hop short of home."""

    def home(self, view: RankView) -> int:
        return (view.owner - 1) % self.world_size


@fault("gradient summed twice", "backward", "gradient summed more than once", min_world_size=1)
class SummedTwice(FaultyRing):
    """dk and dv are all-reduced after they were summed by the ring, by two ranks."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {name: grads[name] * 2 for name in ("dk", "dv")}


@fault("gradient averaged over ranks", "backward")
class Averaged(FaultyRing):
    """A mean where a sum is meant."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return {name: x / self.world_size for name, x in grads.items()}


@fault("delta left out", "backward", min_world_size=1)
class DeltaLeftOut(FaultyRing):
    """dS = P * dP."""

    def delta(self, dout: Numbers, part: RingPart) -> Numbers:
        return super().delta(dout, part) * 0


@fault("local softmax in the backward pass", "backward")
class LocalSoftmax(FaultyRing):
    """Every block is normalised by its own sum."""

    def softmax_again(self, view: RankView, scores: Numbers, seen: Numbers, part: RingPart) -> Numbers:
        own = self.partial(view, scores, seen, np.zeros((*scores.shape[:2], scores.shape[-1], 1)))
        return super().softmax_again(view, scores, seen, part._replace(lse=own.lse))


@fault("mask ignored in the backward pass", "backward", min_world_size=1)
class MaskIgnoredBackward(FaultyRing):
    """Hidden pairs send gradients."""

    def backward_seen(self, view: RankView) -> Numbers:
        return np.ones_like(super().backward_seen(view))


@fault("scale missing in dq", "backward", "scale missing in the backward pass", min_world_size=1)
class ScaleMissingInDq(FaultyRing):
    """dq is that of the scaled queries."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {"dq": grads["dq"] / self.scale}


@fault("scale twice in dk", "backward", "scale missing in the backward pass", min_world_size=1)
class ScaleTwiceInDk(FaultyRing):
    """dk is scaled by the kernel and again outside."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {"dk": grads["dk"] * self.scale}


@fault("dk and dv swapped", "backward", min_world_size=1)
class DkDvSwapped(FaultyRing):
    """The halves of the received pair are taken for each other."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {"dk": grads["dv"], "dv": grads["dk"]}


@fault("halves of dk and dv swapped", "backward", "dk and dv swapped", min_world_size=1)
class HalvesSwapped(FaultyRing):
    """A packed (dk, dv) buffer is split in the middle of its rows."""

    def finish_gradients(self, grads: Grads) -> Grads:
        half = grads["dk"].shape[-1] // 2
        dk, dv = grads["dk"], grads["dv"]
        return grads | {
            "dk": np.concatenate([dk[..., :half], dv[..., :half]], -1),
            "dv": np.concatenate([dk[..., half:], dv[..., half:]], -1),
        }


@fault("first head of a GQA group only", "backward", "GQA group not summed", min_world_size=1)
class FirstHeadOnly(FaultyRing):
    """dk and dv come from one query head of each group."""

    def collect(self, by_head: Numbers) -> Numbers:
        return by_head[:, :: self.case.num_heads // self.case.num_kv_heads]


@fault("GQA group averaged", "backward", "GQA group not summed", min_world_size=1)
class GroupAveraged(FaultyRing):
    """dk and dv are means over the heads of a group."""

    def collect(self, by_head: Numbers) -> Numbers:
        return super().collect(by_head) / (self.case.num_heads // self.case.num_kv_heads)


@fault("dv missing", "backward", "gradient missing", min_world_size=1)
class DvMissing(FaultyRing):
    """dv is zeros."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {"dv": grads["dv"] * 0}


@fault("dk missing on one rank", "backward", "gradient missing")
class DkMissingOnOneRank(FaultyRing):
    """Rank 1 never receives its dk."""

    def finish_gradients(self, grads: Grads) -> Grads:
        dk = grads["dk"].copy()
        dk[:, :, self.kv_rows(1)] = 0
        return grads | {"dk": dk}


@fault("gradients in bfloat16", "backward", "precision lost", min_world_size=1)
class GradientsInBfloat16(FaultyRing):
    """dk and dv are accumulated in the type of the wire."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {name: round_to(grads[name], "bfloat16").astype(grads[name].dtype) for name in ("dk", "dv")}


@fault("sink gradient missing", "backward", "gradient missing", min_world_size=1)
class SinkGradientMissing(FaultyRing):
    """Sinks are taken for constants."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {name: x * 0 for name, x in grads.items() if name == "dsinks"}


@fault("sink gradient negated", "backward", "gradient negated", min_world_size=1)
class SinkGradientNegated(FaultyRing):
    """The sign of delta is lost."""

    def finish_gradients(self, grads: Grads) -> Grads:
        return grads | {name: -x for name, x in grads.items() if name == "dsinks"}


@fault("softcap missing in the backward pass", "backward", min_world_size=1)
class SoftcapMissingBackward(FaultyRing):
    """The derivative of tanh is left out."""

    def gradients(self, parts: list[RingPart]) -> Grads:
        self._is_backward = True
        return super().gradients(parts)

    def block_gradients(
        self, view: RankView, q: Numbers, dout: Numbers, part: RingPart
    ) -> tuple[Numbers, Numbers, Numbers]:
        if self.softcap is None:
            return super().block_gradients(view, q, dout, part)
        k, v = self.spread(self.block_of(view.owner))
        seen = self.backward_seen(view)
        weights = self.softmax_again(view, self.scores(view, q, k), seen, part)
        dscores = weights * (dout @ v.swapaxes(-1, -2) - self.delta(dout, part)) * self.scale
        return dscores @ k, dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ dout


@fault("RoPE missing in the backward pass", "backward", min_world_size=1)
class RopeMissingBackward(FaultyRing):
    """Gradients are those of the turned rows."""

    def unrotate(self, grad: Numbers, positions: Numbers) -> Numbers:
        return grad

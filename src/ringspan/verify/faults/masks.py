"""Faults in masks, positions and what an adapter passes on."""

import numpy as np

from ringspan.verify.cases import make_layout
from ringspan.verify.faults.record import fault
from ringspan.verify.faults.ring import FaultyRing, RankView, RingPart
from ringspan.verify.patterns import Numbers, Pattern, replace_part, visible


class _OtherPattern(FaultyRing):
    """Another mask than the one asked for."""

    def pattern(self) -> Pattern:
        return self.case.pattern

    def allowed(self, view: RankView) -> Numbers:
        positions = self.q_positions(view.rank).astype(int), self.kv_positions(view.owner).astype(int)
        return visible(self.pattern(), *positions)


@fault("mask ignored", "adapter", min_world_size=1)
class MaskIgnored(_OtherPattern):
    """Every query sees every key."""

    def pattern(self) -> Pattern:
        return ("full",)


@fault("mask ignored in foreign blocks", "mask", "mask ignored")
class MaskIgnoredAbroad(FaultyRing):
    """Only a rank's own block is masked."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view)
        return seen if view.step == 0 else np.ones_like(seen)


@fault("diagonal excluded", "mask", "diagonal off by one", min_world_size=1)
class DiagonalExcluded(_OtherPattern):
    """A query does not see its own key."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "causal", ("window", None, -1))


@fault("one key ahead", "mask", "diagonal off by one", min_world_size=1)
class OneKeyAhead(_OtherPattern):
    """A query sees one key too many."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "causal", ("window", None, 1))


@fault("mask transposed", "mask", min_world_size=1)
class MaskTransposed(_OtherPattern):
    """Queries see the future and not the past."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "causal", ("window", 0, None))


@fault("window ignored", "adapter", min_world_size=1)
class WindowIgnored(_OtherPattern):
    """window_size is accepted and dropped."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "window", lambda part: ("window", None, part[2]))


@fault("window one too wide", "mask", "window off by one", min_world_size=1)
class WindowTooWide(_OtherPattern):
    """A window of W tokens taken as W + 1."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "window", lambda part: ("window", part[1] + 1, part[2]))


@fault("window one too narrow", "adapter", "window off by one", min_world_size=1)
class WindowTooNarrow(_OtherPattern):
    """left=W - 1 where left=W is meant."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "window", lambda part: ("window", part[1] - 1, part[2]))


@fault("window to both sides", "adapter", "causal part ignored", min_world_size=1)
class WindowBothSides(_OtherPattern):
    """A causal window that also looks ahead."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "window", lambda part: ("window", part[1], abs(part[1])))


@fault("window sides swapped", "adapter", min_world_size=1)
class WindowSidesSwapped(_OtherPattern):
    """(right, left) for (left, right)."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "window", lambda part: ("window", part[2], part[1]))


@fault("documents leak", "adapter", min_world_size=1)
class DocumentsLeak(_OtherPattern):
    """cu_seqlens is dropped."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "documents", ("full",))


@fault("document boundary shifted", "adapter", "document boundaries off by one", min_world_size=1)
class DocumentBoundaryShifted(_OtherPattern):
    """Documents begin one token late."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "documents", lambda part: ("documents", (part[1][0] + 1, *part[1][1:])))


@fault("prefix ignored", "adapter", min_world_size=1)
class PrefixIgnored(_OtherPattern):
    """A prefix mask taken as causal."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "prefix", ("causal",))


@fault("frames one token too long", "mask", "frames off by one", min_world_size=1)
class FramesTooLong(_OtherPattern):
    """tokens_per_frame + 1."""

    def pattern(self) -> Pattern:
        return replace_part(self.case.pattern, "frames", lambda part: ("frames", part[1] + 1, part[2]))


@fault("mask of the first batch row", "adapter", "mask of another batch row", min_world_size=1)
class MaskOfFirstRow(FaultyRing):
    """per_row masks, of which the first serves all."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view)
        return seen[0] if seen.ndim == 3 else seen


@fault("mask in local positions", "mask")
class MaskInLocalPositions(FaultyRing):
    """Every shard counts its positions from 0."""

    def allowed(self, view: RankView) -> Numbers:
        pattern = self.case.pattern
        return visible(pattern, np.arange(len(self.q_rows(view.rank))), np.arange(len(self.kv_rows(view.owner))))


@fault("zigzag mask on contiguous shards", "adapter", "positions of another layout")
class ZigzagOnContiguous(FaultyRing):
    """A zigzag kernel is fed contiguous shards, and the other way round."""

    def q_positions(self, rank: int) -> Numbers:
        return self._other(self.case.length, self.case.past, rank, super().q_positions(rank))

    def kv_positions(self, owner: int) -> Numbers:
        return self._other(self.case.length + self.case.past, 0, owner, super().kv_positions(owner))

    def _other(self, length: int, start: int, rank: int, real: Numbers) -> Numbers:
        name = "contiguous" if self.case.layout == "zigzag" else "zigzag"
        positions = make_layout(name, length, self.world_size, start=start).positions(rank)
        return np.resize(positions, len(real)).astype(np.float64)


@fault("causal aligned at the top left", "kernel", min_world_size=1)
class AlignedTopLeft(FaultyRing):
    """Queries count from 0 although keys came before them."""

    def allowed(self, view: RankView) -> Numbers:
        q = self.q_positions(view.rank).astype(int) - self.case.past
        return visible(self.case.pattern, q, self.kv_positions(view.owner).astype(int))


@fault("whole blocks only", "schedule", "positions of another layout", "mask ignored", "mask in local positions")
class WholeBlocksOnly(FaultyRing):
    """Blocks of lower ranks are seen whole, those of higher ranks not at all, whatever the layout."""

    def allowed(self, view: RankView) -> Numbers:
        seen = super().allowed(view)
        if view.step == 0 or self.case.pattern == ("full",):
            return seen
        return np.full_like(seen, float(view.owner < view.rank))


@fault("NaN in rows without a key", "merge", min_world_size=1)
class NanInEmptyRows(FaultyRing):
    """-inf minus -inf."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        is_empty = np.isneginf(part.lse)
        return RingPart(np.where(is_empty[..., None], np.nan, part.out), np.where(is_empty, np.nan, part.lse))


@fault("rows without a key attend to all", "kernel", min_world_size=1)
class EmptyRowsAttend(FaultyRing):
    """A mask of -1e9 instead of -inf: a row without a key gets the mean of all values."""

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        heads = [self.kv_head(head) for head in range(self.case.num_heads)]
        mean = self.whole["v"][:, heads].mean(2, keepdims=True)
        return part._replace(out=np.where(np.isneginf(part.lse)[..., None], mean, part.out))


@fault("RoPE restarts on every rank", "adapter", "RoPE offset")
class RopeRestarts(FaultyRing):
    """position_ids of a shard begin at 0."""

    def rotate(self, x: Numbers, positions: Numbers, rank: int) -> Numbers:
        local = np.arange(len(positions)).astype(np.float64)
        return super().rotate(x, local, rank) if self._is_forward(positions) else super().rotate(x, -local, rank)

    def unrotate(self, grad: Numbers, positions: Numbers) -> Numbers:
        return FaultyRing.rotate(self, grad, -np.arange(len(positions)).astype(np.float64), 0)

    def _is_forward(self, positions: Numbers) -> bool:
        return bool((positions >= 0).all())


@fault("RoPE of keys off by one", "adapter", "RoPE offset", min_world_size=1)
class RopeKeysOffByOne(FaultyRing):
    """Keys are turned one position too far."""

    def block_of(self, owner: int):  # type: ignore[no-untyped-def]
        rows = self.kv_rows(owner)
        k = self.rotate(self.whole["k"][:, :, rows], self.kv_positions(owner) + 1, owner)
        return super().block_of(owner)._replace(k=k)


@fault("softcap ignored", "adapter", min_world_size=1)
class SoftcapIgnored(FaultyRing):
    """softcap is accepted and dropped."""

    def __init__(self, case) -> None:  # type: ignore[no-untyped-def]
        super().__init__(case)
        self.softcap = None

"""A correct ring attention in NumPy, taken apart into stages that a fault can replace one at a time.

All ranks run in one loop. Rank r attends at step t to the block of rank (r - t) mod P, merges the partial results,
and sends the gradients of keys and values home the same way. Every stage is a method with a default that is right.
"""

from typing import NamedTuple

import numpy as np

from ringspan.verify.cases import VerifyCase
from ringspan.verify.outcome import Computed
from ringspan.verify.patterns import Numbers, visible


class KeysValues(NamedTuple):
    """A block on its way round the ring: k and v (batch, KV heads, m, dim)."""

    k: Numbers
    v: Numbers


class RingPart(NamedTuple):
    """A partial result: out (batch, heads, n, dim), normalised; lse (batch, heads, n)."""

    out: Numbers
    lse: Numbers


class RankView(NamedTuple):
    """The rank, step and block of a stage: this rank attends to the block of `owner` at `step`."""

    rank: int
    owner: int
    step: int


class FaultyRing:
    """Correct attention of one case on all ranks. A fault is a subclass that overrides one stage."""

    def __init__(self, case: VerifyCase) -> None:
        self.case = case
        self.world_size = case.world_size
        self.q_layout, self.kv_layout = case.q_layout(), case.kv_layout()
        question = case.question()
        self.scale = question.scale
        self.sinks = question.sinks
        self.softcap = case.softcap
        self.dtype = np.dtype(np.float64 if case.dtype == "float64" else np.float32)
        self.whole = {name: getattr(question, name).astype(self.dtype, copy=True) for name in ("q", "k", "v", "dout")}

    # Who holds what

    def q_rows(self, rank: int) -> Numbers:
        """Offsets of this rank's queries among all queries."""
        rows: Numbers = np.searchsorted(self.q_layout.all_positions(), self.q_layout.positions(rank))
        return rows

    def kv_rows(self, rank: int) -> Numbers:
        """Offsets of this rank's keys among all keys."""
        rows: Numbers = np.searchsorted(self.kv_layout.all_positions(), self.kv_layout.positions(rank))
        return rows

    def out_rows(self, rank: int) -> Numbers:
        """The arrays that receive this rank's outputs."""
        return self.q_rows(rank)

    def q_of(self, rank: int) -> Numbers:
        """This rank's queries, turned by RoPE."""
        return self.rotate(self.whole["q"][:, :, self.q_rows(rank)], self.q_positions(rank), rank)

    def block_of(self, owner: int) -> KeysValues:
        """The block that a rank owns."""
        rows = self.kv_rows(owner)
        k = self.rotate(self.whole["k"][:, :, rows], self.kv_positions(owner), owner)
        return KeysValues(k, self.whole["v"][:, :, rows])

    def q_positions(self, rank: int) -> Numbers:
        """Global positions, for masks and RoPE."""
        return self.q_layout.positions(rank).astype(np.float64)

    def kv_positions(self, owner: int) -> Numbers:
        """Global positions, for masks and RoPE."""
        return self.kv_layout.positions(owner).astype(np.float64)

    def rotate(self, x: Numbers, positions: Numbers, rank: int) -> Numbers:
        """RoPE on one shard."""
        if not self.case.has_rope:
            return x
        half = x.shape[-1] // 2
        phase = np.exp(1j * positions[:, None] * 10000.0 ** (-np.arange(half) / half))
        turned = (x[..., :half] + 1j * x[..., half:]) * phase
        rotated: Numbers = np.concatenate([turned.real, turned.imag], -1).astype(self.dtype)
        return rotated

    def unrotate(self, grad: Numbers, positions: Numbers) -> Numbers:
        """The gradient with respect to the unturned rows."""
        return FaultyRing.rotate(self, grad, -positions, 0)

    # The schedule

    def steps(self, rank: int) -> list[int]:
        """The steps in which this rank attends."""
        return list(range(self.world_size)) if rank >= 0 else []

    def owner_at(self, rank: int, step: int) -> int:
        """Whose block a rank attends to."""
        return (rank - step) % self.world_size

    def receive(self, view: RankView) -> KeysValues:
        """The data that arrived for a step."""
        return self.block_of(view.owner)

    # One block

    def allowed(self, view: RankView) -> Numbers:
        """1 where the rank's queries see the block's keys."""
        positions = self.q_positions(view.rank).astype(int), self.kv_positions(view.owner).astype(int)
        return visible(self.case.pattern, *positions)

    def kv_head(self, head: int) -> int:
        """The KV head that serves a query head."""
        return head // (self.case.num_heads // self.case.num_kv_heads)

    def score_scale(self, view: RankView) -> float:
        """The factor of the scores."""
        return self.scale

    def scores(self, view: RankView, q: Numbers, k: Numbers) -> Numbers:
        """Scaled and capped scores."""
        raw = q @ k.swapaxes(-1, -2) * self.dtype.type(self.score_scale(view))
        return raw if self.softcap is None else self.softcap * np.tanh(raw / self.softcap)

    def partial(self, view: RankView, scores: Numbers, seen: Numbers, v: Numbers) -> RingPart:
        """Attention to one block."""
        logits = np.where(seen > 0, scores, -np.inf)
        peak = logits.max(-1, initial=-np.inf)
        base = np.where(np.isneginf(peak), 0, peak)
        parts = np.exp(logits - base[..., None])
        total = parts.sum(-1)
        with np.errstate(divide="ignore"):
            lse = base + np.log(total)
        return RingPart(self.weigh(view, parts / np.where(total == 0, 1, total)[..., None], v), lse)

    def weigh(self, view: RankView, weights: Numbers, v: Numbers) -> Numbers:
        """The weighted sum of values."""
        return weights @ v

    # Merging

    def merge(self, into: RingPart, part: RingPart, view: RankView) -> RingPart:
        """Two partial results over different keys become one."""
        with np.errstate(invalid="ignore"):
            lse = np.logaddexp(into.lse, part.lse)
            shares = [np.nan_to_num(np.exp(x.lse - lse), nan=0.0)[..., None] for x in (into, part)]
        return RingPart(into.out * shares[0] + part.out * shares[1], lse)

    def attend(self, rank: int) -> RingPart:
        """All steps of one rank."""
        q = self.q_of(rank)
        n = q.shape[2]
        merged = RingPart(np.zeros_like(q), np.full((*q.shape[:2], n), -np.inf, self.dtype))
        for step in self.steps(rank):
            view = RankView(rank, self.owner_at(rank, step), step)
            k, v = self.spread(self.receive(view))
            seen = self.allowed(view)
            part = self.partial(view, self.scores(view, q, k), seen[:, None] if seen.ndim == 3 else seen, v)
            merged = self.merge(merged, part, view)
        return self.finish(rank, merged)

    def spread(self, block: KeysValues) -> KeysValues:
        """One KV head for every query head."""
        heads = [self.kv_head(head) for head in range(self.case.num_heads)]
        return KeysValues(block.k[:, heads], block.v[:, heads])

    def finish(self, rank: int, part: RingPart) -> RingPart:
        """The sinks join after everything is merged."""
        if self.sinks is None:
            return part
        lse = np.logaddexp(part.lse, self.sinks[:, None])
        return RingPart(part.out * np.exp(part.lse - lse)[..., None], lse)

    def deliver(self, rank: int, part: RingPart) -> RingPart:
        """Return a rank's result to the caller."""
        return part

    # The backward pass

    def softmax_again(self, view: RankView, scores: Numbers, seen: Numbers, part: RingPart) -> Numbers:
        """The weights of one block, recomputed from the merged log-sum-exp."""
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(seen > 0, np.exp(scores - part.lse[..., None]), 0)

    def delta(self, dout: Numbers, part: RingPart) -> Numbers:
        """rowsum(dout * out)."""
        delta: Numbers = (dout * part.out).sum(-1, keepdims=True)
        return delta

    def backward_seen(self, view: RankView) -> Numbers:
        """The mask of the backward pass."""
        return self.allowed(view)

    def backward_steps(self, rank: int) -> list[int]:
        """The steps of the backward pass."""
        return list(range(self.world_size)) if rank >= 0 else []

    def home(self, view: RankView) -> int:
        """The rank whose dk and dv a contribution is added to."""
        return view.owner

    def collect(self, by_head: Numbers) -> Numbers:
        """Sum the gradients of the query heads that share a KV head."""
        group = self.case.num_heads // self.case.num_kv_heads
        batch, heads, m, dim = by_head.shape
        total: Numbers = by_head.reshape(batch, heads // group, group, m, dim).sum(2)
        return total

    def add(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        """Add a contribution to dk or dv of its owner."""
        return total + contribution

    def add_dq(self, total: Numbers, contribution: Numbers, view: RankView) -> Numbers:
        """Add a contribution to this rank's dq."""
        return total + contribution

    def block_gradients(
        self, view: RankView, q: Numbers, dout: Numbers, part: RingPart
    ) -> tuple[Numbers, Numbers, Numbers]:
        """dq, dk and dv of one block, per query head."""
        k, v = self.spread(self.block_of(view.owner))
        seen = self.backward_seen(view)
        scores = self.scores(view, q, k)
        weights = self.softmax_again(view, scores, seen[:, None] if seen.ndim == 3 else seen, part)
        dscores = weights * (dout @ v.swapaxes(-1, -2) - self.delta(dout, part))
        if self.softcap is not None:
            dscores = dscores * (1 - (scores / self.softcap) ** 2)
        scale = self.dtype.type(self.scale)
        return dscores @ k * scale, dscores.swapaxes(-1, -2) @ q * scale, weights.swapaxes(-1, -2) @ dout

    def gradients(self, parts: list[RingPart]) -> dict[str, Numbers]:
        """dq, dk, dv and dsinks of all ranks."""
        dq, dk, dv = (np.zeros_like(self.whole[name]) for name in "qkv")
        for step in range(self.world_size):
            for rank in range(self.world_size):
                if step not in self.backward_steps(rank):
                    continue
                view = RankView(rank, self.owner_at(rank, step), step)
                rows, home = self.q_rows(rank), self.home(view)
                keys = self.kv_rows(home)
                q, dout = self.q_of(rank), self.whole["dout"][:, :, rows]
                grads = self.block_gradients(view, q, dout, parts[rank])
                own_dq = self.unrotate(grads[0], self.q_positions(rank)) if self.case.has_rope else grads[0]
                own_dk = self.unrotate(grads[1], self.kv_positions(view.owner)) if self.case.has_rope else grads[1]
                dq[:, :, rows] = self.add_dq(dq[:, :, rows], own_dq, view)
                for total, by_head in ((dk, own_dk), (dv, grads[2])):
                    contribution = self.collect(by_head)
                    width = min(len(keys), contribution.shape[2])
                    keys = keys[:width]
                    total[:, :, keys] = self.add(total[:, :, keys], contribution[:, :, :width], view)
        return {"dq": dq, "dk": dk, "dv": dv} | self.sink_gradients(parts)

    def sink_gradients(self, parts: list[RingPart]) -> dict[str, Numbers]:
        """Minus the sum over all rows of the sink's weight times delta."""
        if self.sinks is None:
            return {}
        total = np.zeros(len(self.sinks))
        for rank, part in enumerate(parts):
            dout = self.whole["dout"][:, :, self.q_rows(rank)]
            total -= (np.exp(self.sinks[:, None] - part.lse) * self.delta(dout, part)[..., 0]).sum((0, 2))
        return {"dsinks": total}

    def finish_gradients(self, grads: dict[str, Numbers]) -> dict[str, Numbers]:
        """Return a rank's gradients to the caller."""
        return grads

    def run(self) -> Computed:
        """Outputs and gradients, whole. Faulty stages may divide by zero."""
        with np.errstate(all="ignore"):
            return self._run()

    def _run(self) -> Computed:
        parts = [self.attend(rank) for rank in range(self.world_size)]
        out = np.zeros(self.whole["q"].shape, self.dtype)
        lse = np.zeros(out.shape[:3], self.dtype)
        for rank, part in enumerate(parts):
            delivered = self.deliver(rank, part)
            out[:, :, self.out_rows(rank)], lse[:, :, self.out_rows(rank)] = delivered
        grads = self.finish_gradients(self.gradients(parts)) if self.case.has_backward else {}
        return Computed.of(out, lse, grads)

"""The ring itself: blocks travel from rank to rank while every rank attends what it holds.

pass_kv, pass_q and hybrid use this loop with different blocks: KV travels and queries stay, queries travel and KV
stays, or one of the two travels for one group of heads at a time. At step t, rank r holds the blocks that started t
hops before it. A block travels no further than the last rank that needs it.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ringspan.errors import UnsupportedError
from ringspan.schedule import ALL, Attend, Block, Kind, Route, Schedule, Step, Transfer, Visible, complete

Side = Literal["kv", "q"]
Direction = Literal["forward", "reverse"]


class Holdings(NamedTuple):
    """The blocks that each rank holds when the ring starts; replicated keys do not travel."""

    qs: Sequence[tuple[Block, ...]]
    kvs: Sequence[tuple[Block, ...]]
    replicated: Sequence[Block]


class RingSteps:
    """The steps of `lanes` rings side by side: ranks u, u + lanes, u + 2·lanes, … form ring u."""

    def __init__(self, visible: Visible, held: Holdings, moving: Side, direction: Direction, lanes: int = 1) -> None:
        self.visible = visible
        self.held = held
        self.moving = moving
        self.lanes = lanes
        self.size = visible.world_size // lanes
        self.hop = hop_of(direction) * lanes
        self._needs = self._needed()
        self._reach = self._reached()
        self.num_steps = int(self._reach.max(initial=0)) + 1

    def step(self, t: int) -> Step:
        """Return the attends and transfers of ring step t."""
        ranks = range(self.visible.world_size)
        return Step(
            [attends_at(self.visible, self.held, self.moving, rank, self._origin(rank, t), t) for rank in ranks],
            [move for rank in ranks for move in self._moves(rank, t)],
        )

    def _moves(self, rank: int, t: int) -> list[Transfer]:
        origin = self._origin(rank, t)
        blocks = self.held.kvs[origin] if self.moving == "kv" else self.held.qs[origin]
        onward = (rank + self.hop) % self.visible.world_size
        return [Transfer(block, rank, onward) for block in blocks if t < self._reach[block.owner]]

    def _origin(self, rank: int, t: int) -> int:
        return (rank - t * self.hop) % self.visible.world_size

    def _needed(self) -> npt.NDArray[np.bool_]:
        """Return [ring position, owner]: whether a rank at that position needs the moving block of that owner."""
        sees = self.visible.matrix[:, :-1]
        if self.moving == "q":
            sees = sees.T
        needs: npt.NDArray[np.bool_] = sees.reshape(self.size, self.lanes, -1).max(axis=1)
        return needs

    def _reached(self) -> npt.NDArray[np.int64]:
        """Return [owner]: how many hops its block travels; 0 if no other rank needs it."""
        position = np.arange(self.size)[:, None]
        owner = np.arange(self.visible.world_size)[None, :] // self.lanes
        hops = (position - owner) * np.sign(self.hop) % self.size
        reach: npt.NDArray[np.int64] = np.where(self._needs, hops, 0).max(axis=0)
        return reach


def attends_at(visible: Visible, held: Holdings, moving: Side, rank: int, origin: int, t: int) -> list[Attend]:
    """Return what a rank attends with the blocks that started at `origin`; in step 0 also with the replicated keys."""
    pair = (held.qs[rank], held.kvs[origin]) if moving == "kv" else (held.qs[origin], held.kvs[rank])
    attends = [visible.prune(Attend(*pair))]
    if t == 0:
        attends.append(visible.prune(Attend(held.qs[rank], (held.replicated[rank],))))
    return [attend for attend in attends if attend is not None]


def build_ring(visible: Visible, moving: Side, direction: Direction, backward: Side | None, route: Route) -> Schedule:
    """Build one ring over all ranks. Forward, `moving` travels; backward, the side that `backward` names."""
    ring = RingSteps(visible, whole_blocks(visible.world_size, q_kind(backward)), backward or moving, direction)
    return bring_home(Schedule(visible.world_size, None, ring.num_steps, ring.step), visible, moving, backward, route)


def bring_home(draft: Schedule, visible: Visible, moving: Side, backward: Side | None, route: Route) -> Schedule:
    """Add the transfers of sums: gradients take `route`, and outputs computed on other ranks go straight home."""
    if backward is not None:
        return complete(_home_last(draft) if backward == "kv" else draft, visible, route)
    return complete(draft, visible) if moving == "q" else draft


def _home_last(draft: Schedule) -> Schedule:
    """Move the attends of a rank's own keys from the first step to the last.

    They need no message. At the end they hide the last hop of dkv, which is at least as large as the hop of kv that
    they would hide at the start, and which may come from a late rank.
    """
    if draft.num_steps == 1:
        return draft
    first, *others = draft.steps
    nothing: list[tuple[Attend, ...]] = [()] * draft.world_size
    steps = [Step(nothing, first.transfers), *others, Step(first.attends)]
    return Schedule.of_steps(draft.world_size, draft.heads, steps)


def whole_blocks(world_size: int, q_kind: Kind) -> Holdings:
    """Return the holdings in which each rank has its own q and kv with all heads."""
    return Holdings(
        qs=[(Block(q_kind, rank),) for rank in range(world_size)],
        kvs=[(Block("kv", rank),) for rank in range(world_size)],
        replicated=[Block("kv", ALL)] * world_size,
    )


def q_kind(backward: Side | None) -> Kind:
    """Return the kind of a query block: q alone, or q with all that its gradients need."""
    return "q" if backward is None else "q_grad"


def hop_of(direction: Direction) -> int:
    """Return +1 for the next rank and -1 for the previous one."""
    if direction not in ("forward", "reverse"):
        raise UnsupportedError(
            'blocks move to the next rank ("forward") or to the previous one ("reverse")',
            argument="direction",
            value=direction,
        )
    return 1 if direction == "forward" else -1

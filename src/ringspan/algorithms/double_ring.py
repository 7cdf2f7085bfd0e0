"""Double ring: an inner ring inside each node, an outer ring between nodes.

In phase n, the ranks of a node pass round the blocks that started n nodes before. The block for the next phase crosses
to the next node in the first step of the phase and is read when the phase is over, so the slow link has a whole phase
to carry it. Every block still visits every rank once.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ringspan.algorithms.loads import END, Load, Ranks, RegularCall
from ringspan.algorithms.mesh import Mesh, check_mesh
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.ring import Holdings, Side, attends_at, bring_home, q_kind, whole_blocks
from ringspan.schedule import Block, Route, Schedule, Step, Transfer, Visible


def build_double_ring(
    visible: Visible, *, mesh: Mesh, backward: Side | None = None, route: Route = "follow"
) -> Schedule:
    """Build the forward schedule, or the backward one with the side that travels and the route of its gradients."""
    check_mesh(mesh, visible.world_size)
    rings = _DoubleRing(visible, mesh, whole_blocks(visible.world_size, q_kind(backward)), backward or "kv")
    draft = Schedule(visible.world_size, None, rings.num_steps, rings.step)
    return bring_home(draft, visible, "kv", backward, route)


class _DoubleRing:
    """Step t is inner step t % inner of phase t // inner."""

    def __init__(self, visible: Visible, mesh: Mesh, held: Holdings, moving: Side) -> None:
        self.visible = visible
        self.mesh = mesh
        self.held = held
        self.moving = moving
        self._inner_reach = self._reached_in_node()
        # The last phase in which a rank needs the block; 0 if none does.
        phases = np.arange(mesh.outer)[:, None]
        self._outer_reach = np.where(self._inner_reach >= 0, phases, 0).max(axis=0)
        last_phase = int(self._outer_reach.max())
        self.num_steps = last_phase * mesh.inner + int(self._inner_reach[last_phase].max(initial=0)) + 1

    def step(self, t: int) -> Step:
        ranks = range(self.visible.world_size)
        attends, transfers = [], []
        for rank in ranks:
            owner = self._owner(rank, t)
            attends.append(attends_at(self.visible, self.held, self.moving, rank, owner, t))
            transfers += self._moves(rank, owner, t)
        return Step(attends, transfers)

    def _owner(self, rank: int, t: int) -> int:
        """Return the owner of the block that the rank holds, if it travels that far."""
        phase, hop = divmod(t, self.mesh.inner)
        node, local = divmod(rank, self.mesh.inner)
        return (node - phase) % self.mesh.outer * self.mesh.inner + (local - hop) % self.mesh.inner

    def _moves(self, rank: int, owner: int, t: int) -> list[Transfer]:
        phase, hop = divmod(t, self.mesh.inner)
        node, local = divmod(rank, self.mesh.inner)
        block = self._block(owner)
        moves = []
        if hop < self._inner_reach[phase, owner]:
            moves.append(Transfer(block, rank, node * self.mesh.inner + (local + 1) % self.mesh.inner))
        if hop == 0 and phase < self._outer_reach[owner]:
            moves.append(Transfer(block, rank, (rank + self.mesh.inner) % self.visible.world_size))
        return moves

    def _block(self, owner: int) -> Block:
        return (self.held.kvs if self.moving == "kv" else self.held.qs)[owner][0]

    def _reached_in_node(self) -> npt.NDArray[np.int64]:
        """Return [phase, owner]: the block's inner hops in that phase; -1 if no rank of that node needs it."""
        outer, inner = self.mesh
        sees = self.visible.matrix[:, :-1]
        needs = (sees.T if self.moving == "q" else sees).reshape(outer, inner, outer, inner)
        node, local, home, start = np.ogrid[:outer, :inner, :outer, :inner]
        reach = np.full((outer, outer, inner), -1, dtype=np.int64)
        hops = np.where(needs, (local - start) % inner, -1).max(axis=1)  # [node, home, start]
        reach[(node - home)[:, 0] % outer, home[0], start[0]] = hops
        return reach.reshape(outer, outer * inner)


def double_ring_loads(call: RegularCall) -> Iterator[Load]:
    """Yield the loads: an inner ring in each node; the block of the next phase crosses in the first step of a phase.

    Gradients follow round the node, at the end of a phase to the next node, and from the last one home, while each
    rank attends its own keys.
    """
    size, inner = call.ring.world_size, call.ring.inner
    nbytes, outer = call.kv_len * call.costs.token_bytes("kv"), size // inner
    # A window reaches some owners only, at irregular steps; the work is spread evenly over all steps.
    other_s = call.other_s() * (len(call.seers()) / max(1, size - 1))
    home, later = call.everywhere(call.own_s()), call.everywhere(other_s)
    is_home_last = call.is_backward and size > 1

    def turn(ranks: Ranks) -> Ranks:
        return ranks - ranks % inner + (ranks % inner + 1) % inner

    inside, across = call.moves(turn, nbytes), call.ahead(inner, nbytes)
    dkv = call.kv_len * call.costs.token_bytes("dkv")
    follow = (call.moves(turn, dkv), call.moves(lambda ranks: turn(ranks) + inner, dkv))
    for t in range(size):
        phase, hop = divmod(t, inner)
        moves = [inside] if hop < inner - 1 else []
        if hop == 0 and phase < outer - 1:
            moves.append(across._replace(reads_at=t + inner))
        if call.is_backward and t > 1:
            moves.append(follow[t % inner == 0])
        yield Load(later if t else call.none if is_home_last else home, moves)
    if is_home_last:
        yield Load(home, [follow[1]._replace(reads_at=END)])


def _buffer_bytes(sizes: BufferSizes) -> float:
    """Count the K and V in use, those that arrive from the neighbour and those from the next node."""
    return min(3, sizes.world_size // 2) * sizes.kv


DOUBLE_RING = Algorithm(
    name="double_ring",
    build=build_double_ring,
    options=frozenset({"mesh", "route"}),
    label="double ring",
    idea="a ring inside each node, and a ring of nodes",
    loads=double_ring_loads,
    buffer_bytes=_buffer_bytes,
)

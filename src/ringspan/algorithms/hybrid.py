"""Hybrid (USP): Ulysses inside, a ring outside.

The mesh is (ring, ulysses), the last axis inner: neighbouring ranks exchange tokens for heads, then each rank passes
the blocks of its heads round a ring of such groups. So Ulysses is no longer limited by the number of heads, the ring's
messages are smaller, and the exchanges stay inside a node.
"""

from ringspan.algorithms.mesh import Mesh, check_mesh
from ringspan.algorithms.record import Algorithm
from ringspan.algorithms.ring import Direction, RingSteps, Side, q_kind
from ringspan.algorithms.ulysses import exchange_buffer_bytes, exchange_heads, exchange_loads
from ringspan.schedule import Heads, Schedule, Step, Visible, complete


def build_hybrid(
    visible: Visible,
    *,
    heads: Heads,
    mesh: Mesh,
    direction: Direction = "forward",
    backward: Side | None = None,
) -> Schedule:
    """Build the forward schedule, or the backward one with the side that travels in the outer ring.

    All sums go straight home.
    """
    check_mesh(mesh, visible.world_size)
    held, exchange = exchange_heads(visible, heads, mesh.inner, q_kind(backward))
    ring = RingSteps(visible, held, backward or "kv", direction, lanes=mesh.inner)

    def step(t: int) -> Step:
        return ring.step(t - 1) if t else Step([()] * visible.world_size, exchange)

    return complete(Schedule(visible.world_size, heads, ring.num_steps + 1, step), visible)


HYBRID = Algorithm(
    name="hybrid",
    build=build_hybrid,
    options=frozenset({"heads", "mesh", "direction"}),
    label="hybrid",
    idea="Ulysses among neighbours, a ring between groups",
    loads=exchange_loads,
    buffer_bytes=exchange_buffer_bytes,
)

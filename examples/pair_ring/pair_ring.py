"""An algorithm in one file: a ring that sends two blocks of K and V at a time.

In step 0 every rank attends its own keys and sends its K and V to the next two ranks. In each later step it attends the
two blocks that arrived and sends both two ranks further. P ranks need P // 2 + 1 steps instead of P, with messages of
twice the size: good where latency costs more than bandwidth.
"""

from ringspan.algorithms import Algorithm, BufferSizes, Side, attends_at, q_kind, register, whole_blocks
from ringspan.schedule import Schedule, Step, Transfer, Visible, complete


def build_pair_ring(visible: Visible, *, backward: Side | None = None) -> Schedule:
    """Forward, K and V travel; backward, the side that `backward` names."""
    size = visible.world_size
    moving = backward or "kv"
    held = whole_blocks(size, q_kind(backward))
    blocks = held.kvs if moving == "kv" else held.qs

    def needs(rank: int, owner: int) -> bool:
        return visible.sees(rank, owner) if moving == "kv" else visible.sees(owner, rank)

    def goes_on(owner: int, distance: int, hop: int) -> bool:
        """Whether the block, `distance` ranks from home, is needed `hop` ranks further or by a later rank."""
        return any(needs((owner + far) % size, owner) for far in range(distance + hop, size, 2))

    def step(t: int) -> Step:
        distances = [d for d in ((2 * t - 1, 2 * t) if t else (0,)) if d < size]
        attends, transfers = [], []
        for rank in range(size):
            arrived = [((rank - distance) % size, distance) for distance in distances]
            attends.append([one for origin, _ in arrived for one in attends_at(visible, held, moving, rank, origin, t)])
            transfers += [
                Transfer(blocks[origin][0], rank, (rank + hop) % size)
                for origin, distance in arrived
                for hop in ((2,) if t else (1, 2))
                if goes_on(origin, distance, hop)
            ]
        return Step(attends, transfers)

    return complete(Schedule(size, None, size // 2 + 1, step), visible)


def buffer_bytes(sizes: BufferSizes) -> float:
    """Two blocks that are attended and two that arrive."""
    return min(4, sizes.world_size - 1) * sizes.kv


PAIR_RING = Algorithm(
    name="pair_ring",
    build=build_pair_ring,
    label="pair ring",
    idea="keys and values travel round the ring two blocks at a time",
    buffer_bytes=buffer_bytes,
)

if __name__ == "__main__":
    import numpy as np

    import ringspan as rs

    register(PAIR_RING)
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 16), dtype=np.float32)
    run = rs.simulate_attention(q, k, v, mask=rs.causal(), layout=rs.zigzag(40, 5), algorithm="pair_ring")
    print(rs.schedule.format_schedule(run.schedule))

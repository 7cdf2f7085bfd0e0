"""all-gather: every rank first receives all it will need, then attends it in one go.

Two steps instead of a ring, at the price of memory for all of the other side. Blocks that nobody on a rank sees are not
sent to it.
"""

from ringspan.algorithms.ring import Side, q_kind, whole_blocks
from ringspan.schedule import Attend, Schedule, Step, Transfer, Visible, complete


def build_all_gather(visible: Visible, *, backward: Side | None = None) -> Schedule:
    """Forward, or backward with the side that is gathered; its gradients go straight home."""
    world_size = visible.world_size
    ranks = range(world_size)
    held = whole_blocks(world_size, q_kind(backward))
    moving = held.qs if backward == "q" else held.kvs

    def needs(rank: int, owner: int) -> bool:
        return visible.sees(owner, rank) if backward == "q" else visible.sees(rank, owner)

    def attends(rank: int, owners: list[int]) -> list[Attend]:
        blocks = tuple(moving[owner][0] for owner in owners)
        pair = (blocks, held.kvs[rank]) if backward == "q" else (held.qs[rank], blocks)
        return [Attend(*pair)] if blocks else []

    def local(rank: int) -> list[Attend]:
        replicated = visible.prune(Attend(held.qs[rank], (held.replicated[rank],)))
        return attends(rank, [rank] if needs(rank, rank) else []) + ([replicated] if replicated else [])

    foreign = [[owner for owner in ranks if owner != rank and needs(rank, owner)] for rank in ranks]
    transfers = [Transfer(moving[owner][0], owner, rank) for rank in ranks for owner in foreign[rank]]
    steps = [Step([local(rank) for rank in ranks], transfers)]
    if transfers:
        steps.append(Step([attends(rank, foreign[rank]) for rank in ranks]))
    return complete(Schedule.of_steps(world_size, None, steps), visible)

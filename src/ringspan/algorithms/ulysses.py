"""Ulysses: tokens are exchanged for heads, so that each rank attends all tokens for its share of the heads.

One exchange before and one after, whatever the number of ranks. It needs head counts that divide: query heads by the
ranks, and KV heads by the ranks or the ranks by the KV heads (several ranks then receive the same KV head).
"""

from ringspan.algorithms.ring import Holdings, Side, q_kind
from ringspan.errors import UnsupportedError
from ringspan.schedule import ALL, Attend, Block, Heads, Kind, Schedule, Step, Transfer, Visible, complete

MOST_LISTED = 1024  # ranks that a refusal proposes; it takes no longer for a number of heads that no model has


def build_ulysses(visible: Visible, *, heads: Heads, backward: Side | None = None) -> Schedule:
    """Forward or backward; both sides travel anyway, so `backward` says only that gradients are wanted."""
    world_size = visible.world_size
    held, exchange = exchange_heads(visible, heads, world_size, q_kind(backward))
    attends = []
    for rank in range(world_size):
        attend = visible.prune(Attend(held.qs[rank], (*held.kvs[rank], held.replicated[rank])))
        attends.append([] if attend is None else [attend])
    steps = [Step([()] * world_size, exchange), Step(attends)]
    return complete(Schedule.of_steps(world_size, heads, steps), visible)


def exchange_heads(visible: Visible, heads: Heads, degree: int, kind: Kind) -> tuple[Holdings, list[Transfer]]:
    """What each rank holds once every `degree` neighbours have exchanged tokens for heads, and how it got there."""
    check_heads(heads, degree)
    world_size = visible.world_size
    asks, is_asked = visible.matrix.max(axis=1), visible.matrix.max(axis=0)
    qs, kvs, replicated, transfers = [], [], [], []
    for rank in range(world_size):
        q_heads, kv_heads = head_range(heads.num_heads, degree, rank), head_range(heads.num_kv_heads, degree, rank)
        group = range(rank - rank % degree, rank - rank % degree + degree)
        qs.append(tuple(Block(kind, owner, q_heads) for owner in group if asks[owner]))
        kvs.append(tuple(Block("kv", owner, kv_heads) for owner in group if is_asked[owner]))
        replicated.append(Block("kv", ALL, kv_heads))
        transfers += [Transfer(block, block.owner, rank) for block in (*qs[-1], *kvs[-1]) if block.owner != rank]
    return Holdings(qs, kvs, replicated), transfers


def head_range(num_heads: int, degree: int, rank: int) -> range:
    """The heads of a rank among `degree` neighbours; where heads are fewer than ranks, several ranks share one."""
    part = rank % degree
    return range(part * num_heads // degree, max(1, num_heads // degree) + part * num_heads // degree)


def check_heads(heads: Heads, degree: int) -> None:
    """Refuse a Ulysses degree the heads cannot be split by."""
    if not _divides(heads, degree):
        legal = [size for size in range(1, min(heads.num_heads, MOST_LISTED) + 1) if _divides(heads, size)]
        raise UnsupportedError(
            f"Ulysses over {degree} ranks with {heads.num_heads} query heads and {heads.num_kv_heads} KV heads: the "
            f"ranks must divide the query heads, and divide or be a multiple of the KV heads; use {_one_of(legal)} "
            "ranks, or an algorithm that leaves heads whole (pass_kv, pass_q, all_gather)"
        )


def _divides(heads: Heads, degree: int) -> bool:
    split = heads.num_kv_heads % degree == 0 or degree % heads.num_kv_heads == 0
    return heads.num_heads % degree == 0 and split


def _one_of(sizes: list[int]) -> str:
    return " or ".join(part for part in (", ".join(map(str, sizes[:-1])), str(sizes[-1])) if part)

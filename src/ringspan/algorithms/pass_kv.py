"""pass-KV: queries stay, K and V go round the ring (arXiv 2411.01783, algorithm 2).

Every rank keeps its queries and their running output, so nothing has to return. The right choice when many queries
wait for the keys: full prefill and training.
"""

from ringspan.algorithms.ring import Direction, Side, build_ring
from ringspan.schedule import Route, Schedule, Visible


def build_pass_kv(
    visible: Visible, *, direction: Direction = "forward", backward: Side | None = None, route: Route = "follow"
) -> Schedule:
    """Forward, or backward with the side that is to travel and the route of its gradients."""
    return build_ring(visible, "kv", direction, backward, route)

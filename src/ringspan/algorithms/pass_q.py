"""pass-Q: keys stay, queries go round the ring and their partial results return (arXiv 2411.01783, algorithm 3).

A partial result goes straight to its owner in the step after it was made, while the ring goes on; the paper sends all
of them in one all-to-all at the end. The right choice when few new queries meet a long cache.
"""

from ringspan.algorithms.ring import Direction, Side, build_ring
from ringspan.schedule import Route, Schedule, Visible


def build_pass_q(
    visible: Visible, *, direction: Direction = "forward", backward: Side | None = None, route: Route = "follow"
) -> Schedule:
    """Forward, or backward with the side that is to travel and the route of its gradients."""
    return build_ring(visible, "q", direction, backward, route)

"""Ranks in two dimensions, for algorithms that use links inside a node and between nodes differently."""

import operator
from collections.abc import Iterable
from typing import NamedTuple

from ringspan.errors import LayoutError


class Mesh(NamedTuple):
    """`outer` groups of `inner` neighbouring ranks: rank = outer index · inner + inner index."""

    outer: int
    inner: int


def as_mesh(mesh: Iterable[int] | None) -> Mesh | None:
    """Convert any pair to a Mesh; None stays None."""
    if mesh is None:
        return None
    try:
        outer, inner = map(operator.index, mesh)
    except (TypeError, ValueError):
        raise LayoutError("a mesh is a pair of whole numbers, (outer, inner)", argument="mesh", value=mesh) from None
    return Mesh(outer, inner)


def check_mesh(mesh: Mesh, world_size: int) -> None:
    """Raise LayoutError unless the mesh has exactly `world_size` ranks."""
    if mesh.outer < 1 or mesh.inner < 1 or mesh.outer * mesh.inner != world_size:
        legal = ", ".join(f"({world_size // n}, {n})" for n in range(1, world_size + 1) if world_size % n == 0)
        raise LayoutError(
            f"outer × inner must be the {world_size} ranks of the group",
            argument="mesh",
            value=tuple(mesh),
            remedy=f"use one of {legal}",
        )

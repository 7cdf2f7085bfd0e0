"""Algorithms: pure functions from a visibility matrix to a Schedule, one file each."""

from ringspan.algorithms.registry import (
    ALGORITHMS,
    Direction,
    Mesh,
    Query,
    Side,
    as_mesh,
    build_decode,
    build_schedule,
    check_algorithm,
)

__all__ = [
    "ALGORITHMS",
    "Direction",
    "Mesh",
    "Query",
    "Side",
    "as_mesh",
    "build_decode",
    "build_schedule",
    "check_algorithm",
]

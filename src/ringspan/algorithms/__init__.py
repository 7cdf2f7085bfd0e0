"""Algorithms: pure functions from a visibility matrix to a Schedule, one file and one record each."""

from ringspan.algorithms.decode import BY_QUERY, Query, build_decode
from ringspan.algorithms.loads import END, EXCHANGE_ROUNDS, Costs, Load, RegularCall, Ring, Round, Sequence
from ringspan.algorithms.mesh import Mesh, as_mesh
from ringspan.algorithms.record import Algorithm, BufferSizes
from ringspan.algorithms.registry import (
    ALGORITHMS,
    build_schedule,
    check_algorithm,
    find_algorithm,
    list_takers,
    register,
    register_entry_points,
    unregister,
)
from ringspan.algorithms.ring import Direction, Side, attends_at, q_kind, whole_blocks

__all__ = [
    "ALGORITHMS",
    "BY_QUERY",
    "END",
    "EXCHANGE_ROUNDS",
    "Algorithm",
    "BufferSizes",
    "Costs",
    "Direction",
    "Load",
    "Mesh",
    "Query",
    "RegularCall",
    "Ring",
    "Round",
    "Sequence",
    "Side",
    "as_mesh",
    "attends_at",
    "build_decode",
    "build_schedule",
    "check_algorithm",
    "find_algorithm",
    "list_takers",
    "q_kind",
    "register",
    "register_entry_points",
    "unregister",
    "whole_blocks",
]

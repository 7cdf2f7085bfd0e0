"""What came out of a target, and how far is it from the truth?"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ringspan.verify.budget import Budget
from ringspan.verify.cases import VerifyCase, ranks_of
from ringspan.verify.oracle import OracleAnswer
from ringspan.verify.patterns import Numbers

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


class Computed(NamedTuple):
    """Whole results of a target in position order, in float64; None for what it does not give."""

    out: Numbers
    lse: Numbers | None = None
    dq: Numbers | None = None
    dk: Numbers | None = None
    dv: Numbers | None = None
    dsinks: Numbers | None = None

    @classmethod
    def of(cls, out: Numbers, lse: Numbers | None, grads: Mapping[str, Numbers | None]) -> "Computed":
        """From arrays of any type."""
        given = {"lse": lse, **grads}
        others = {name: np.asarray(x, np.float64) for name, x in given.items() if x is not None}
        return cls(np.asarray(out, np.float64), **others)


class Deviation(NamedTuple):
    """One result that exceeds its budget: by how much, in which rows, and where it begins."""

    name: str
    error: float  # the largest, in absolute terms; inf for NaN
    budget: float  # at the same place
    is_wrong: Numbers  # bool (batch, heads, rows)
    ranks: tuple[int, ...]
    heads: tuple[int, ...]
    rows: tuple[int, int, int]  # first and last wrong row, and how many of all rows

    def __str__(self) -> str:
        if self.name == "dsinks":
            return f"dsinks: error {self.error:.1e}, budget {self.budget:.1e}; heads {_list(self.heads)}"
        first, last, number = self.rows
        return (
            f"{self.name}: error {self.error:.1e}, budget {self.budget:.1e}; ranks {_list(self.ranks)}, "
            f"heads {_list(self.heads)}, rows {first} to {last} ({number} of {self.is_wrong.shape[-1]})"
        )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def find_deviations(case: VerifyCase, computed: Computed, right: OracleAnswer, allowed: Budget) -> list[Deviation]:
    """Every result beyond its budget, in the order out, lse, dq, dk, dv, dsinks."""
    found = []
    ranks = ranks_of(case)
    for name in NAMES:
        x, y, limit = getattr(computed, name), getattr(right, name), getattr(allowed, name)
        if x is None or y is None:
            continue
        if x.shape != y.shape:
            found.append(_wrong_shape(name, y))
            continue
        with np.errstate(invalid="ignore"):
            error = np.where(x == y, 0.0, abs(x - y))
        error = np.where(np.isnan(error), np.inf, error)
        if (error > limit).any():
            owners = ranks.of_q if name in ("out", "lse", "dq") else ranks.of_kv
            found.append(_deviation(name, error, limit, owners))
    return found


def _wrong_shape(name: str, y: Numbers) -> Deviation:
    everything: Numbers = np.ones(y.shape[:3], np.bool_)
    return Deviation(name, np.inf, 0.0, everything, (), (), (0, everything.shape[-1] - 1, everything.shape[-1]))


def _deviation(name: str, error: Numbers, limit: Numbers, owners: Numbers) -> Deviation:
    is_wrong: Numbers = np.asarray(error > limit)
    at = np.unravel_index(int(np.argmax(np.where(is_wrong, error / limit, 0))), error.shape)
    if name == "dsinks":
        heads = tuple(np.flatnonzero(is_wrong).tolist())
        return Deviation(name, float(error[at]), float(limit[at]), is_wrong, (), heads, (0, 0, 0))
    is_wrong = np.any(is_wrong.reshape(*is_wrong.shape[:3], -1), axis=-1)
    rows = np.flatnonzero(is_wrong.any((0, 1)))
    return Deviation(
        name,
        float(error[at]),
        float(limit[at]),
        is_wrong,
        tuple(sorted({int(owners[row]) for row in rows})),
        tuple(np.flatnonzero(is_wrong.any((0, 2))).tolist()),
        (int(rows[0]), int(rows[-1]), len(rows)),
    )

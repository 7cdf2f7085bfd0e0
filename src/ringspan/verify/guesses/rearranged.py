"""Right numbers in the wrong places: each slice of a wrong result is looked for among the slices of the right one.

Unlike the other guesses these read the wrong result, so any order is found, not only those on a list.
"""

from collections.abc import Iterator

import numpy as np

from ringspan.verify.guesses.base import Guess, Setting
from ringspan.verify.patterns import Numbers

_AXES = (
    (0, "batch rows mixed up", "gradient on the wrong batch row"),
    (1, "heads in another order", "gradient on the wrong head"),
    (2, "rows in another order", "gradient on the wrong row"),
    (3, "columns of a head in another order", "columns of a head in another order"),
)


def guess_rearranged(setting: Setting, name: str, computed: Numbers) -> Iterator[Guess]:
    """The right result with batch rows, heads, rows or columns reordered to be nearest to the computed one."""
    right = getattr(setting.right, name)
    if right.ndim < 3 or computed.shape != right.shape or not np.isfinite(computed).all():
        return
    owners = setting.kv_rank if name in ("dk", "dv") else setting.q_rank
    for axis, of_result, of_gradient in _AXES[: right.ndim]:
        order = _nearest(computed, right, axis)
        moved = np.flatnonzero(order != np.arange(len(order)))
        if not moved.size:
            continue
        mistake = of_gradient if name.startswith("d") else of_result
        if axis == 2 and _are_whole_shards(owners, order):
            mistake = "gradient on the wrong rank" if name.startswith("d") else "results on the wrong rank"
        places = ", ".join(f"{order[i]} at {i}" for i in moved[:4])
        yield Guess(mistake, name, np.take(right, order, axis), places + (", …" if len(moved) > 4 else ""))


def _nearest(computed: Numbers, right: Numbers, axis: int) -> Numbers:
    """For each slice of the computed result the nearest one of the right result."""
    x, y = (np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (computed, np.nan_to_num(right)))
    order: Numbers = abs(x[:, None] - y[None]).sum(-1).argmin(1)
    return order


def _are_whole_shards(owners: Numbers, order: Numbers) -> bool:
    """Whether every rank has only rows of one rank, and some rank those of another one."""
    sources = [set(owners[order[owners == rank]].tolist()) for rank in np.unique(owners)]
    return all(len(source) == 1 for source in sources) and sources != [{rank} for rank in np.unique(owners)]

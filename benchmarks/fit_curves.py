"""Fits the constants of the planner to published rows, and again without each source: `curves.toml`, `left_out.toml`.

    python benchmarks/fit_curves.py [--dry-run]

Minimises the squares of log(predicted / published) over all judged rows and of log(constant / prior) over all
constants, each over its spread, by Gauss and Newton's method with numeric derivatives. A row counts as known to 10 %;
a source of many rows counts as MOST_ROWS of them; a row further off than MOST_OFF spreads counts no more than one that
far, so that rows which contradict all others do not pull.
"""

import math
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import ringspan.planner.catalog
from ringspan.planner.catalog import Constants
from ringspan.planner.catalog.constants import priors
from ringspan.planner.published.check import predict_row
from ringspan.planner.published.rows import Row, read_rows

FOLDER = Path(ringspan.planner.catalog.__file__).parent / "data"
ROUNDS, ROUNDS_WITHOUT = 8, 6
JUDGED_ONLY = ("arXiv:2408.04093",)  # runs in JAX, whose host is not that of eager PyTorch
ROW_SPREAD, MOST_ROWS, MOST_OFF = 0.10, 12, 2.5
NAMES = Constants._fields
PRIORS = np.log([priors()[name].value for name in NAMES])
SPREADS = np.array([priors()[name].spread for name in NAMES])


def main() -> None:
    rows = [row for row in read_rows() if row.use == "judged" and row.source not in JUDGED_ONLY]
    everything = np.ones(len(rows), dtype=bool)
    at = PRIORS.copy()
    jacobian = _jacobian(rows, at)
    for turn in range(ROUNDS):
        if turn == 2:
            jacobian = _jacobian(rows, at)
        at = _step(rows, at, jacobian, everything)
    jacobian = _jacobian(rows, at)
    for _ in range(3):
        at = _step(rows, at, jacobian, everything)
    sources = sorted({row.source for row in rows})
    without = {}
    for source in sources:
        kept = np.array([row.source != source for row in rows])
        found = at.copy()
        for _ in range(ROUNDS_WITHOUT):
            found = _step(rows, found, jacobian, kept)
        without[source] = found
    for name, prior, value in zip(NAMES, np.exp(PRIORS), np.exp(at), strict=True):
        print(f"{name:34} prior {prior:10.4g}   fitted {value:10.4g}")
    for source in sources:
        kept = [row for row in rows if row.source == source]
        errors = np.abs(_errors(kept, without[source]))
        print(f"{source:36} {len(kept):4} rows; without it median {np.median(errors):.1%}")
    if "--dry-run" not in sys.argv:
        _write(at, without)


def _errors(rows: list[Row], logs: np.ndarray) -> np.ndarray:
    constants = Constants(*(float(value) for value in np.exp(logs)))
    return np.array([math.log(predict_row(row, constants).value / row.value) for row in rows])


def _jacobian(rows: list[Row], at: np.ndarray) -> np.ndarray:
    base, jacobian = _errors(rows, at), np.empty((len(rows), len(at)))
    for i in range(len(at)):
        moved = at.copy()
        moved[i] += 1e-3
        jacobian[:, i] = (_errors(rows, moved) - base) / 1e-3
    return jacobian


def _step(rows: list[Row], at: np.ndarray, jacobian: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """One step of Gauss and Newton, halved until it lowers the sum."""
    errors = _errors(rows, at)
    weights = _weights(rows, errors) * kept
    normal = jacobian.T @ (weights[:, None] * jacobian) + np.diag(SPREADS**-2)
    gradient = jacobian.T @ (weights * errors) + (at - PRIORS) / SPREADS**2
    step = np.clip(np.linalg.solve(normal, -gradient), -0.7, 0.7)
    before = _cost(errors, at, weights)
    for _ in range(4):
        if _cost(_errors(rows, at + step), at + step, weights) < before:
            return at + step
        step = step / 2
    return at


def _cost(errors: np.ndarray, at: np.ndarray, weights: np.ndarray) -> float:
    return float(weights @ errors**2 + np.sum(((at - PRIORS) / SPREADS) ** 2))


def _weights(rows: list[Row], errors: np.ndarray) -> np.ndarray:
    counts = Counter(row.source for row in rows)
    spreads = np.array([ROW_SPREAD * max(1.0, counts[row.source] / MOST_ROWS) ** 0.5 for row in rows])
    spreads *= np.array([2.0 if row.fields.get("status") == "label_half_hidden" else 1.0 for row in rows])
    off = np.abs(errors) / ROW_SPREAD
    return np.minimum(1.0, MOST_OFF / np.maximum(off, 1e-9)) ** 2 / spreads**2


def _write(at: np.ndarray, without: dict[str, np.ndarray]) -> None:
    path = FOLDER / "curves.toml"
    text = path.read_text(encoding="utf-8")
    for name, value in zip(NAMES, np.exp(at), strict=True):
        text = re.sub(rf"(\[{name}\]\nvalue = )\S+", rf"\g<1>{float(f'{value:.4g}')}", text)
    path.write_text(text, encoding="utf-8")
    lines = ["# Written by benchmarks/fit_curves.py: the constants fitted without the rows of one source each."]
    for source, logs in without.items():
        lines += ["", f'["{source}"]']
        lines += [f"{name} = {float(f'{value:.4g}')}" for name, value in zip(NAMES, np.exp(logs), strict=True)]
    (FOLDER / "left_out.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How far are predictions from published measurements, and would the planner have picked the winner?

An error is predicted / published - 1. The limits: the median over sources of each source's median absolute error, no
source above a second limit, and the share of winners called right among pairs that differ by more than 3 %.
"""

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ringspan.planner.catalog.files import read_data
from ringspan.planner.published.predict import predict_row
from ringspan.planner.published.rows import Row, Use, read_rows

MEDIAN_LIMIT = 0.12
SOURCE_LIMIT = 0.25
WINNERS_LIMIT = 0.85
LEAST_DIFFERENCE = 0.03
MOST_PARAMETERS = 25
RATES = ("iters_per_s", "tflops_per_gpu")  # more is faster


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with its prediction."""

    id: str
    source: str
    quantity: str
    use: Use
    why: str
    published: float
    predicted: float | None

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        assert self.predicted is not None
        return self.predicted / self.published - 1

    @property
    def time_ratio(self) -> float:
        """Published over predicted time, for times and for rates."""
        return 1 + self.error if self.quantity in RATES else 1 / (1 + self.error)


@dataclass(frozen=True, slots=True)
class SourceError:
    """The rows of one source and use together."""

    source: str
    use: Use
    num_rows: int
    median_error: float  # absolute
    worst_error: float
    bias: float  # median, with its sign


@dataclass(frozen=True, slots=True)
class Winner:
    """Two set-ups that differ in one choice, and which of them is faster."""

    kind: str
    first: str
    second: str
    published_ratio: float  # time of the first over that of the second
    predicted_ratio: float

    @property
    def is_right(self) -> bool:
        """Whether the prediction favours the same one."""
        return (self.published_ratio > 1) == (self.predicted_ratio > 1)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All of it."""

    rows: tuple[Judged, ...]
    sources: tuple[SourceError, ...]
    winners: tuple[Winner, ...]
    parameters: dict[str, float]
    median_error: float
    worst_source_error: float
    winners_right: float
    low: float  # published over predicted time of judged rows, 10th and 90th percentile; every source counts the same
    high: float

    @property
    def is_passed(self) -> bool:
        """Whether all limits are kept."""
        return (
            self.median_error <= MEDIAN_LIMIT
            and self.worst_source_error <= SOURCE_LIMIT
            and self.winners_right >= WINNERS_LIMIT
            and len(self.parameters) <= MOST_PARAMETERS
        )


def run_check() -> CheckResult:
    """Hold the planner against every row."""
    rows = list(read_rows())
    predicted = {row.id: None if row.use == "unused" else predict_row(row) for row in rows}
    judged = tuple(
        Judged(row.id, row.source, row.quantity, row.use, row.why, row.value, predicted[row.id]) for row in rows
    )
    sources = tuple(_by_source(judged))
    winners = tuple(_winners(rows, predicted))
    medians = [source.median_error for source in sources if source.use == "judged"]
    low, high = _range([row for row in judged if row.use == "judged"])
    return CheckResult(
        rows=judged,
        sources=sources,
        winners=winners,
        parameters=fitted_parameters(),
        median_error=statistics.median(medians),
        worst_source_error=max(medians),
        winners_right=sum(winner.is_right for winner in winners) / len(winners),
        low=low,
        high=high,
    )


def _range(rows: list[Judged]) -> tuple[float, float]:
    """Where the middle 80 % of the published times lie, as multiples of the predicted ones; every source weighs 1."""
    sizes = Counter(row.source for row in rows)
    ratios = sorted((row.time_ratio, 1 / sizes[row.source] / len(sizes)) for row in rows)
    below = list(itertools.accumulate(weight for _, weight in ratios))
    low = next(ratio for (ratio, _), share in zip(ratios, below, strict=True) if share >= 0.1)
    high = next(ratio for (ratio, _), share in zip(ratios, below, strict=True) if share >= 0.9)
    return low, high


def fitted_parameters() -> dict[str, float]:
    """All numbers of the curves, by name; those that `fixed` lists come from elsewhere."""
    curves = read_data("curves.toml")
    fixed = set(curves["fixed"])

    def flat(prefix: str, value: object) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(f"{prefix}.{key}" if prefix else key, inner)
        elif isinstance(value, float | int):
            yield prefix, float(value)

    return {name: value for name, value in flat("", curves) if name not in fixed}


def _by_source(rows: tuple[Judged, ...]) -> Iterator[SourceError]:
    groups: defaultdict[tuple[str, Use], list[float]] = defaultdict(list)
    for row in rows:
        if row.predicted is not None:
            groups[row.source, row.use].append(row.error)
    order = {"fitted": 0, "judged": 1, "apart": 2}
    for (source, use), errors in sorted(groups.items(), key=lambda item: (order[item[0][1]], item[0][0])):
        absolute = [abs(error) for error in errors]
        median, worst = statistics.median(absolute), max(absolute)
        yield SourceError(source, use, len(errors), median, worst, statistics.median(errors))


def _winners(rows: list[Row], predicted: dict[str, float | None]) -> Iterator[Winner]:
    """Pairs of judged rows that are alike but for the algorithm, and differ enough to call one the winner."""
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.use == "judged" and (key := _set_up(row)) is not None:
            groups[key].append(row)
    for key, alike in groups.items():
        for first, second in itertools.combinations(alike, 2):
            ratio = first.value / second.value
            guess = predicted[first.id] / predicted[second.id]  # type: ignore[operator]
            if first.quantity in RATES:
                ratio, guess = 1 / ratio, 1 / guess
            if max(ratio, 1 / ratio) > 1 + LEAST_DIFFERENCE:
                yield Winner(key[0], first.id, second.id, ratio, guess)


def _set_up(row: Row) -> tuple[str, ...] | None:
    """What must be equal for two rows to be compared."""
    f = row.fields
    if row.table == "prefill_ttft" and f["variant"].startswith("pass-"):
        return "pass-KV or pass-Q", f["source"], f["new_tokens"]
    if row.table == "cp_attention_iters" and f["library"].startswith("USP"):
        keys = ("seq_len_tokens", "heads_q", "heads_kv", "head_dim", "scheme", "packing")
        return "ring or Ulysses", f["source"], *(f[key] for key in keys)
    if row.table == "dit_step_time":
        return "ring or Ulysses", f["source"], f["n_gpus"], f["cfg_degree"]
    return None

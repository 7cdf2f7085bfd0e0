"""How far are predictions from published measurements, and would the planner have picked the winner?

Every row is predicted by constants that were fitted without its source. An error is predicted / published - 1. The
median over sources of each source's median absolute error has a limit. So has the share of winners called right among
pairs that differ by more than 3 %: a pair that the planner calls a tie counts as neither, or as wrong where the
published times differ by more than 25 %; ties have a limit too. And the range printed with a time must hold as many
rows as it says, and not by being wide. A row that no plan expresses is refused, by name.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ringspan.errors import RingspanError, UnsupportedError
from ringspan.planner.accuracy import Z80, is_tie
from ringspan.planner.catalog import Constants, fitted, fitted_without
from ringspan.planner.catalog.constants import MOST_CONSTANTS
from ringspan.planner.published import attention_rows, model_rows
from ringspan.planner.published.rows import Fields, Predicted, Row, Use, read_rows

MEDIAN_LIMIT = 0.12
SOURCE_LIMIT = 0.30
WINNERS_LIMIT = 0.90
TIES_LIMIT = 0.25
COVERAGE_LIMITS = (0.70, 0.90)
WIDTH_LIMIT = 2.0
LEAST_DIFFERENCE = 0.03
MOST_TIED = 0.25  # a tie between times that differ by more is wrong


@dataclass(frozen=True, slots=True)
class Judged:
    """A row with its prediction; `refused` says why there is none."""

    id: str
    source: str
    quantity: str
    use: Use
    why: str
    published: float
    predicted: float | None
    spread: float | None
    has_curve: bool
    refused: str = ""

    @property
    def error(self) -> float:
        """Relative, with its sign."""
        assert self.predicted is not None
        return self.predicted / self.published - 1

    @property
    def is_covered(self) -> bool:
        """Whether the published value lies in the range of the middle 80 %."""
        assert self.predicted is not None
        assert self.spread is not None
        return abs(math.log(self.predicted / self.published)) <= Z80 * self.spread

    @property
    def width(self) -> float:
        """High over low end of the range."""
        assert self.spread is not None
        return math.exp(2 * Z80 * self.spread)


@dataclass(frozen=True, slots=True)
class SourceError:
    """The rows of one source together."""

    source: str
    use: Use
    num_rows: int
    median_error: float  # absolute
    worst_error: float
    bias: float  # median, with its sign
    coverage: float
    width: float  # median
    holds_median: bool  # whether the range holds the median row

    @property
    def is_kept(self) -> bool:
        """Whether it is close enough, or as far off as its range says."""
        return self.median_error <= SOURCE_LIMIT or self.holds_median


@dataclass(frozen=True, slots=True)
class Winner:
    """Two set-ups that differ in one choice, and which of them is faster."""

    kind: str
    first: str
    second: str
    published_ratio: float  # time of the first over that of the second
    predicted_ratio: float
    is_tied: bool

    @property
    def is_right(self) -> bool:
        """Whether the prediction favours the same one, if it favours one."""
        return not self.is_tied and (self.published_ratio > 1) == (self.predicted_ratio > 1)

    @property
    def is_wrong(self) -> bool:
        """Whether it favours the other one, or calls times alike that are not."""
        if self.is_tied:
            return max(self.published_ratio, 1 / self.published_ratio) > 1 + MOST_TIED
        return not self.is_right


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All of it."""

    rows: tuple[Judged, ...]
    sources: tuple[SourceError, ...]
    winners: tuple[Winner, ...]
    constants: dict[str, float]
    median_error: float
    winners_right: float  # of pairs that are right or wrong
    ties: float  # of all pairs
    coverage: float  # of the middle 80 %, every source counting the same
    width: float  # median, of rows on devices whose kernel was measured

    @property
    def is_passed(self) -> bool:
        """Whether all limits are kept."""
        low, high = COVERAGE_LIMITS
        return (
            self.median_error <= MEDIAN_LIMIT
            and all(source.is_kept for source in self.sources if source.use == "judged")
            and self.winners_right >= WINNERS_LIMIT
            and self.ties <= TIES_LIMIT
            and low <= self.coverage <= high
            and self.width <= WIDTH_LIMIT
            and len(self.constants) <= MOST_CONSTANTS
        )


def run_check(folder: Path | None = None) -> CheckResult:
    """Hold the planner against every row of the package, or of tables with the same columns in a folder.

    A row of a source that the package knows is predicted without that source, wherever the row is from.
    """
    rows = list(read_rows(folder))
    predicted: dict[str, Predicted] = {}
    judged = []
    for row in rows:
        refused = ""
        try:
            predicted[row.id] = predict_row(row, fitted_without(row.source))
        except RingspanError as error:
            refused = str(error)
        judged.append(_judged(row, predicted.get(row.id), refused))
    sources = tuple(_by_source(judged))
    winners = tuple(_winners(rows, predicted))
    wrong, right = (sum(kind) for kind in ((w.is_wrong for w in winners), (w.is_right for w in winners)))
    kept = [row for row in judged if row.use == "judged" and row.predicted is not None]
    medians = [source for source in sources if source.use == "judged"]
    if not medians:
        refused = next(
            (row.refused for row in judged if row.refused), "it holds no tables with the names of published/data"
        )
        raise UnsupportedError(f"{folder}: no row of it can be judged: {refused}")
    return CheckResult(
        rows=tuple(judged),
        sources=sources,
        winners=winners,
        constants=fitted()._asdict(),
        median_error=statistics.median(source.median_error for source in medians),
        winners_right=right / max(1, right + wrong),
        ties=sum(winner.is_tied for winner in winners) / max(1, len(winners)),
        coverage=statistics.mean(source.coverage for source in medians),
        width=statistics.median([row.width for row in kept if row.has_curve] or [1.0]),
    )


def _judged(row: Row, found: Predicted | None, refused: str) -> Judged:
    return Judged(
        id=row.id,
        source=row.source,
        quantity=row.quantity,
        use=row.use,
        why=row.why,
        published=row.value,
        predicted=None if found is None else found.value,
        spread=None if found is None else found.spread,
        has_curve=found is not None and found.device.has_curve,
        refused=refused,
    )


def _by_source(rows: list[Judged]) -> Iterator[SourceError]:
    groups: defaultdict[tuple[Use, str], list[Judged]] = defaultdict(list)
    for row in rows:
        if row.predicted is not None:
            groups[row.use, row.source].append(row)
    for (use, source), members in sorted(groups.items(), key=lambda item: (item[0][0] != "judged", item[0][1])):
        errors = [row.error for row in members]
        logs = [math.log1p(error) for error in errors]
        yield SourceError(
            source,
            use,
            len(members),
            statistics.median(map(abs, errors)),
            max(map(abs, errors)),
            statistics.median(errors),
            Counter(row.is_covered for row in members)[True] / len(members),
            statistics.median(row.width for row in members),
            abs(statistics.median(logs)) <= Z80 * statistics.median(row.spread or 0.0 for row in members),
        )


def _winners(rows: list[Row], predicted: dict[str, Predicted]) -> Iterator[Winner]:
    """Pairs of judged rows that are alike but for one choice, and differ enough to call one the winner."""
    groups: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.use == "judged" and row.id in predicted and (key := set_up(row)) is not None:
            groups[key].append(row)
    for key, alike in groups.items():
        for first, second in itertools.combinations(alike, 2):
            ratio = second.value / first.value if first.is_rate else first.value / second.value
            ours = predicted[first.id], predicted[second.id]
            guess = sum(ours[0].parts.values()) / sum(ours[1].parts.values())
            if max(ratio, 1 / ratio) > 1 + LEAST_DIFFERENCE:
                is_tied = is_tie(ours[0].parts, ours[1].parts, ours[0].device)
                yield Winner(key[0], first.id, second.id, ratio, guess, is_tied)


CHART = ("n_gpus", "pass", "mask", "seq_len_tokens", "heads_q", "heads_kv", "head_dim")
ITERATIONS = ("device_id", "n_gpus", "pass", "mask", "batch", "seq_len_tokens", "heads_q", "heads_kv", "head_dim")


def set_up(row: Row) -> tuple[str, ...] | None:
    """The choice in question, and what must be equal for two rows to be compared."""
    f = row.fields
    match row.table:
        case "prefill_ttft" if f["variant"].startswith("pass-"):
            return "pass-KV or pass-Q", row.source, f["new_tokens"], f["cached_tokens"]
        case "cp_attention_iters":
            same = tuple(f[key] for key in ITERATIONS)
            if f["library"].startswith("USP"):
                return "ring or Ulysses", row.source, f["source"], *same, f["scheme"], f["packing"]
            return "layout", row.source, f["device"], *same
        case "cp_attention_throughput" if f["library"].startswith("Magi"):
            return "ring, all-gather or Ulysses", row.source, f["device_id"], *(f[key] for key in CHART)
        case "dit_step_time":
            return "ring or Ulysses", row.source, f["source"], f["n_gpus"], f["cfg_degree"]
        case "training_step":
            return "tensor parallelism, ring or Ulysses", row.source, f["model"], f["n_gpus"], f["seq_len_tokens"]
        case "generation_time":
            return "merge or ring in decode", row.source, f["model"], f["n_gpus"], f["seq_len_tokens"], f["device_id"]
    return None


def predict_row(row: Row, constants: Constants | None = None) -> Predicted:
    """The prediction, in the unit of the row, and where the time goes."""
    if row.use == "unused":
        raise UnsupportedError(f"{row.id}: {row.why}")
    for name, known in (("mask", MASKS), ("pass", PASSES)):
        if row.fields.get(name, known[0]) not in known:
            raise UnsupportedError(f"{row.id}: {name}={row.fields[name]!r} is not modelled")
    try:
        return _PREDICT[row.table](row.fields, constants or fitted())
    except (KeyError, ValueError) as error:
        raise UnsupportedError(f"{row.id}: a field is missing, or names what is not known: {error!r}") from None


MASKS = ("full", "causal")
PASSES = ("fwd", "bwd", "fwd_bwd")
_PREDICT: dict[str, Callable[[Fields, Constants], Predicted]] = {
    "attention_kernel_throughput": attention_rows.kernel,
    "ring_step_time": attention_rows.ring_step,
    "decode_attention_time": attention_rows.decode_attention,
    "cp_attention_throughput": attention_rows.throughput,
    "cp_attention_iters": attention_rows.iterations,
    "ring_min_block": attention_rows.min_block,
    "dit_latency": model_rows.video_latency,
    "dit_step_time": model_rows.video_step,
    "prefill_ttft": model_rows.ttft,
    "decode_ttit": model_rows.ttit,
    "generation_time": model_rows.generation,
    "training_step": model_rows.training_step,
    "cp_speedup": model_rows.speedup,
}

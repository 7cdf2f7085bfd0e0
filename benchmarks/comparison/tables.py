"""What do the rounds say? Medians of ratios within rounds, with an interval, and whether promises are kept."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from results import format_table

from comparison.points import BASELINES, GROWTH, IDEALS, ONE_PROCESS, OURS, PEERS, WIDE, Point
from comparison.rounds import MOST_OTHERS, PEER_LIMIT_BYTES, PEER_LIMIT_S, TRIED, Record

LEAST_SHARE = {"forward16k": 0.97, "backward8k": 0.96, "forward4k": 0.92}
MOST_CPU, MOST_GROWTH = 1.03, 1.10
CONFIDENCE = 0.95

TITLES = {
    "forward16k": "Two ranks: forward, 16,384 tokens",
    "backward8k": "Two ranks: forward and backward, 8,192 tokens",
    "forward4k": "Two ranks: forward, 4,096 tokens",
    "alone": "One rank against SDPA, causal",
    "growth": "CPU seconds on more and more ranks",
}

Measured = list[tuple[Point, Record]]


class Median(NamedTuple):
    """Return a median and its CONFIDENCE interval by order statistics; the range if there are few values."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        ordered, n = sorted(values), len(values)
        cut, tail = 0, 0.0  # values cut off at either end, and the probability that the median lies there
        while (tail := tail + math.comb(n, cut) / 2**n) <= (1 - CONFIDENCE) / 2:
            cut += 1
        cut = max(0, cut - 1)
        return cls(statistics.median(values), ordered[cut], ordered[n - 1 - cut])

    def text(self, form: str) -> str:
        return f"{self.middle:{form}} ({self.low:{form}} – {self.high:{form}})"


def ratios(record: Record, above: str, below: str, field: int = 0) -> list[float]:
    """Return ratios of the seconds (or, field 1, CPU seconds) of two contenders, round by round."""
    return [it[above][field] / it[below][field] for it in record.rounds if above in it and below in it]


def format_section(section: str, measured: Measured) -> tuple[str, bool]:
    """Return the text of a section, and whether its measured promises are kept."""
    return {"alone": _alone, "growth": _growth}.get(section, _ranks)(measured)


# --- Two ranks ---

ABOUT = f"""\
Two gloo processes of one thread and one core, which keep the memory they free; batch 1, 8 heads; causal with a zigzag
layout, full with a contiguous one. In every round the contenders run in turn, in random order, ringspan, in half
types its call in float32, and the ideal one after the other; ratios are those of a round, given as their median and its
{CONFIDENCE:.0%} interval. Rounds in which other programs took more than {MOST_OTHERS:.0%} of the machine do not count.

**The ideal** is what each rank must compute, all keys at hand: no messages, nothing merged, no gradients added up; the
slower rank counts. ᵃ is `scaled_dot_product_attention`, a rank's whole share in as few calls as its mask allows (full:
one; causal: its own tokens, and those it sees of the other rank). ᵇ is this library's kernel on the pieces its schedule
cuts. Both run in the first {TRIED} rounds, then the faster one alone, so a better kernel makes a harder ideal. CPU
seconds are those of all threads of both ranks. "over float32" is the time of a half type over that of the same call in
float32. What is promised is "too close to tell" where a median misses a limit that its interval holds.

Under the names of others stands how many times as fast this library is, [in so many rounds].

- one process: SDPA of everything with one thread, the other core idle. This is the speedup.
- all-gather: all K and V to every rank, SDPA with a mask that was made before; gradients by reduce-scatter.
- blocking ring: plain send and receive, SDPA's operator with its lse on every block, merge; nothing overlaps.
- peers: from PyPI, in an environment of their own, with the same torch. A rank of theirs may use
  {PEER_LIMIT_BYTES / 2**30:.0f} GB and {PEER_LIMIT_S:.0f} s. † marks wrong results.

All results were first checked on 512 tokens. All processes have `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`, unless it is set
otherwise: in some virtual machines oneDNN dies of matrix instructions (AMX) that are promised and not there."""


def _ranks(measured: Measured) -> tuple[str, bool]:
    others = [*BASELINES, *(it for it in PEERS if any(record.count(it) for _, record in measured))]
    header = [
        "dtype",
        "mask",
        "head_dim",
        "ideal, s",
        "ringspan, s",
        "of the ideal",
        "CPU, of the ideal's",
        "over float32",
    ]
    rows = [_ranks_row(point, record, others) for point, record in measured]
    is_kept, verdicts = _judge_ranks(measured)
    table = format_table([*header, *others, "pairs"], rows)
    return "\n\n".join([table, *_shortcomings(measured), *verdicts]), is_kept


def _ranks_row(point: Point, record: Record, others: list[str]) -> list[str]:
    ideal = record.ideal()
    shares = ratios(record, ideal, OURS)
    return [
        point.dtype,
        "causal" if point.is_causal else "full",
        str(point.head_dim),
        f"{_seconds(record, ideal):.3f} {'ᵃ' if ideal == IDEALS[0] else 'ᵇ'}",
        f"{_seconds(record, OURS):.3f}",
        Median.of(shares).text(".1%"),
        Median.of(ratios(record, OURS, ideal, 1)).text(".1%"),
        Median.of(ratios(record, OURS, WIDE)).text(".3f") if record.count(WIDE) else "",
        *(_times_as_fast(record, it) for it in others),
        str(len(shares)),
    ]


def _seconds(record: Record, contender: str) -> float:
    return statistics.median(it[contender].seconds for it in record.rounds if contender in it)


def _times_as_fast(record: Record, other: str) -> str:
    if other in record.failures:
        return "does not run"
    found = ratios(record, other, OURS)
    return f"{statistics.median(found):.2f}{'†' * (other in record.wrong)} [{len(found)}]" if found else "not measured"


def _shortcomings(measured: Measured) -> list[str]:
    """Return why contenders did not run, and whose results are wrong."""
    places: dict[str, list[str]] = {}
    for point, record in measured:
        found = [f"{name} does not run: `{why}`" for name, why in record.failures.items()]
        found += [f"{name}† has wrong results: {why}" for name, why in record.wrong.items()]
        for text in found:
            places.setdefault(text, []).append(point.name.partition("/")[2])
    return ["\n".join(f"- {text} ({', '.join(at)})" for text, at in places.items())] if places else []


def _judge_ranks(measured: Measured) -> tuple[bool, list[str]]:
    section = measured[0][0].section
    least = LEAST_SHARE[section]
    wide = [it for it in measured if it[0].dtype == "float32"]
    shares = {p.name: Median.of(ratios(r, r.ideal(), OURS)) for p, r in wide}
    cpu = {p.name: Median.of(ratios(r, OURS, r.ideal(), 1)) for p, r in wide}
    peers = {f"{p.name}, {it}": Median.of(ratios(r, it, OURS)) for p, r in measured for it in PEERS if r.count(it)}
    slowdown = {p.name: Median.of(ratios(r, OURS, WIDE)) for p, r in measured if r.count(WIDE)}
    checks = [
        Promise(f"float32: at least {least:.0%} of the ideal", shares, least, None, ".1%"),
        Promise(f"float32: CPU seconds at most {MOST_CPU:.0%} of the ideal's", cpu, None, MOST_CPU, ".1%"),
        Promise("bfloat16 no slower than float32 (its time over that)", slowdown, None, 1.0, ".3f"),
        Promise("faster than every peer that runs", peers, 1.0, None, ".2f"),
    ]
    return _verdicts(checks)


class Promise(NamedTuple):
    """Values by point, none of which may be below `least` or above `most`."""

    what: str
    values: dict[str, Median]
    least: float | None
    most: float | None
    form: str

    def is_kept_by(self, value: float) -> bool:
        """Format to a tenth of a per cent."""
        value = round(value, 3)
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def verdict(self, value: Median) -> str:
        """A median beyond the limit is undecided while its interval contains the limit."""
        if self.is_kept_by(value.middle):
            return "yes"
        return "too close to tell" if self.is_kept_by(value.low) or self.is_kept_by(value.high) else "**NO**"


_VERDICTS = ("yes", "too close to tell", "**NO**")  # from best to worst


def _verdicts(promises: list[Promise]) -> tuple[bool, list[str]]:
    """Return whether no promise is broken, and a line about the worst point of each measured promise."""
    lines, are_kept = [], True
    for promise in promises:
        values = promise.values
        if not values:
            continue
        found = {name: promise.verdict(value) for name, value in values.items()}
        sign = -1 if promise.most is None else 1
        worst = max(values, key=lambda name: (_VERDICTS.index(found[name]), sign * values[name].middle))
        are_kept &= found[worst] != "**NO**"
        lines.append(f"- {promise.what}: {found[worst]}; worst {values[worst].text(promise.form)} ({worst})")
    return are_kept, ["\n".join(lines)] if lines else []


# --- One rank ---


def _alone(measured: Measured) -> tuple[str, bool]:
    header = [
        "dtype",
        "head_dim",
        "tokens",
        "SDPA, s",
        "ringspan, s",
        "SDPA over ringspan",
        "CPU, SDPA over ringspan",
        "pairs",
    ]
    rows, speed = [], {}
    for point, record in measured:
        found = ratios(record, ONE_PROCESS, OURS)
        speed[point.name] = Median.of(found)
        cpu = ratios(record, ONE_PROCESS, OURS, 1)
        times = [f"{_seconds(record, it):.3f}" for it in (ONE_PROCESS, OURS)]
        texts = Median.of(found).text(".3f"), Median.of(cpu).text(".3f")
        rows.append([point.dtype, str(point.head_dim), f"{point.seq_len:,}", *times, *texts, str(len(found))])
    is_kept, verdicts = _verdicts([Promise("no slower than SDPA (its time over ours)", speed, 1.0, None, ".3f")])
    text = (
        "The public call on one rank against `scaled_dot_product_attention`, one thread, batch 1, 8 heads, causal, in "
        f"turn. Brackets: the {CONFIDENCE:.0%} interval of the median."
    )
    return "\n\n".join([text, format_table(header, rows), *verdicts]), is_kept


# --- Growth ---


def _growth(measured: Measured) -> tuple[str, bool]:
    ((point, record),) = measured
    one, *more = GROWTH
    header = ["ranks", "CPU seconds of all ranks", "over one rank", "rounds"]
    rows, growth = [], {}
    for name, number in GROWTH.items():
        cpu = Median.of([it[name].cpu_seconds for it in record.rounds]).text(".2f")
        found = ratios(record, name, one, 1)
        rows.append([str(number), cpu, "" if name == one else Median.of(found).text(".1%"), str(len(found))])
        if name in more:
            growth[name] = Median.of(found)
    promise = Promise(f"at most {MOST_GROWTH:.0%} of one rank's", growth, None, MOST_GROWTH, ".1%")
    is_kept, verdicts = _verdicts([promise])
    text = (
        f"{point.seq_len:,} tokens × 8 heads × {point.head_dim}, {point.dtype}, causal, zigzag: CPU seconds of all "
        "threads of all ranks in one call; there may be more ranks than cores. In turn; ratios are those of a round. "
        f"Brackets: the {CONFIDENCE:.0%} interval of the median."
    )
    return "\n\n".join([text, format_table(header, rows), *verdicts]), is_kept

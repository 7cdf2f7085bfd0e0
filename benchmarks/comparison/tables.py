"""What do the rounds say? Medians of ratios taken within rounds, with an interval, and whether promises are kept."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from results import format_table

from comparison.points import BASELINES, GROWTH, IDEALS, ONE_PROCESS, OURS, PEERS, Point
from comparison.rounds import PEER_LIMIT_BYTES, PEER_LIMIT_S, Record

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
    """A median and the interval that holds it with CONFIDENCE, by order statistics; all of the range if there are few."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Median":
        ordered, n = sorted(values), len(values)
        cut, tail = 0, 0.0  # values cut off at either end, and the chance that the median is among those at one end
        while (tail := tail + math.comb(n, cut) / 2**n) <= (1 - CONFIDENCE) / 2:
            cut += 1
        cut = max(0, cut - 1)
        return cls(statistics.median(values), ordered[cut], ordered[n - 1 - cut])

    def text(self, form: str) -> str:
        return f"{self.middle:{form}} ({self.low:{form}} – {self.high:{form}})"


def ratios(record: Record, above: str, below: str, field: int = 0) -> list[float]:
    """Of the seconds (or, field 1, CPU seconds) of two contenders, round by round."""
    return [it[above][field] / it[below][field] for it in record.rounds if above in it and below in it]


def format_section(section: str, measured: Measured) -> tuple[str, bool]:
    """The text of a section, and whether what it promises is kept as far as it was measured."""
    return {"alone": _alone, "growth": _growth}.get(section, _ranks)(measured)


# --- Two ranks ---


def _ranks(measured: Measured) -> tuple[str, bool]:
    others = [*BASELINES, *(it for it in PEERS if any(record.count(it) for _, record in measured))]
    header = [
        "dtype",
        "mask",
        "head_dim",
        "ideal, s",
        "ringspan, s",
        "of the ideal",
        "CPU of the ideal's",
        *others,
        "pairs",
    ]
    rows = [_ranks_row(point, record, others) for point, record in measured]
    is_kept, verdicts = _judge_ranks(measured)
    return "\n\n".join([_ranks_text(), format_table(header, rows), *_failures(measured), *verdicts]), is_kept


def _ranks_row(point: Point, record: Record, others: list[str]) -> list[str]:
    ideal = record.ideal()
    shares = ratios(record, ideal, OURS)
    return [
        point.dtype,
        "causal" if point.is_causal else "full",
        str(point.head_dim),
        f"{_seconds(record, ideal)} {'ᵃ' if ideal == IDEALS[0] else 'ᵇ'}",
        _seconds(record, OURS),
        Median.of(shares).text(".1%"),
        Median.of(ratios(record, OURS, ideal, 1)).text(".1%"),
        *(_times_as_fast(record, it) for it in others),
        str(len(shares)),
    ]


def _seconds(record: Record, contender: str) -> str:
    return f"{statistics.median(it[contender].seconds for it in record.rounds if contender in it):.3f}"


def _times_as_fast(record: Record, other: str) -> str:
    if other in record.failures:
        return "does not run"
    found = ratios(record, other, OURS)
    return f"{statistics.median(found):.2f} [{len(found)}]" if found else "not measured"


def _ranks_text() -> str:
    return (
        f"Two gloo processes with one thread each, batch 1, 8 heads; causal with a zigzag layout, full with a contiguous "
        f"one. In every round the contenders run in turn, in random order, and ratios are those of a round. Brackets: "
        f"the {CONFIDENCE:.0%} interval of the median.\n\n"
        "**The ideal** is what each rank must compute, with all keys at hand, no messages, nothing merged and no gradients "
        "added up, timed by the slower rank. ᵃ is `scaled_dot_product_attention`, the whole share of a rank in as few "
        "calls as its mask allows (full: one; causal: its own tokens, and the other rank's that it sees); ᵇ is this "
        f"library's kernel on the pieces its schedule cuts. Both run in the first rounds; the faster one is the ideal. "
        "CPU seconds are those of all threads of both ranks, ours over the ideal's.\n\n"
        "The columns of others say how many times as fast this library is [in so many rounds]. One process: SDPA of "
        "everything with one thread, so this is the speedup. All-gather: all K and V to every rank, then SDPA with a mask "
        "made before (gradients by reduce-scatter). Blocking ring: plain send and receive, SDPA's operator with its lse "
        "on each block, merge. Peers are from PyPI, in an environment of their own with the same torch; a rank of theirs "
        f"may use {PEER_LIMIT_BYTES / 2**30:.0f} GB and {PEER_LIMIT_S:.0f} s. Results of all were checked on 512 tokens "
        "first. All processes run with `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` (unless it is set otherwise), since in some "
        "virtual machines oneDNN dies of matrix instructions that are promised and not there."
    )


def _failures(measured: Measured) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for point, record in measured:
        for name, reason in record.failures.items():
            reasons.setdefault((name, reason), []).append(point.name.partition("/")[2])
    lines = [f"- {name}: `{why}` (at {_places(at, len(measured))})" for (name, why), at in reasons.items()]
    return ["What did not run, and why:\n\n" + "\n".join(lines)] if lines else []


def _places(names: list[str], num_points: int) -> str:
    return "all points" if len(names) == num_points > 1 else ", ".join(names)


def _judge_ranks(measured: Measured) -> tuple[bool, list[str]]:
    section = measured[0][0].section
    least = LEAST_SHARE[section]
    wide = [it for it in measured if it[0].dtype == "float32"]
    shares = {p.name: Median.of(ratios(r, r.ideal(), OURS)).middle for p, r in wide}
    cpu = {p.name: Median.of(ratios(r, OURS, r.ideal(), 1)).middle for p, r in wide}
    slower = {p.name: Median.of(ratios(r, it, OURS)).middle for p, r in measured for it in PEERS if r.count(it)}
    halves = {}
    for point, record in wide:
        for other, half in measured:
            if other.dtype != "float32" and other.name.split("/")[2:] == point.name.split("/")[2:]:
                halves[other.name] = float(_seconds(half, OURS)) / float(_seconds(record, OURS))
    checks = [
        (f"float32: at least {least:.0%} of the ideal", min, shares, lambda x: x >= least, ".1%"),
        (f"float32: CPU seconds at most {MOST_CPU:.0%} of the ideal's", max, cpu, lambda x: x <= MOST_CPU, ".1%"),
        ("bfloat16 no slower than float32 (time over time)", max, halves, lambda x: x <= 1.0, ".2f"),
        ("faster than every peer that runs", min, slower, lambda x: x > 1.0, ".2f"),
    ]
    return _verdicts(checks)


def _verdicts(checks: list) -> tuple[bool, list[str]]:  # type: ignore[type-arg]
    """Whether all promises are kept at their worst point, and a line about each that was measured."""
    lines, kept = [], True
    for what, worst, values, holds, form in checks:
        if values:
            name = worst(values, key=values.__getitem__)
            is_kept = holds(values[name])
            kept &= is_kept
            lines.append(f"- {what}: {'yes' if is_kept else '**NO**'}; worst {values[name]:{form}} at {name}")
    return kept, ["Promises:\n\n" + "\n".join(lines)] if lines else []


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
        speed[point.name] = statistics.median(found)
        cpu = ratios(record, ONE_PROCESS, OURS, 1)
        times = _seconds(record, ONE_PROCESS), _seconds(record, OURS)
        texts = Median.of(found).text(".3f"), Median.of(cpu).text(".3f")
        rows.append([point.dtype, str(point.head_dim), f"{point.seq_len:,}", *times, *texts, str(len(found))])
    check = ("no slower than SDPA (its time over ours)", min, speed, lambda x: x >= 1.0, ".3f")
    is_kept, verdicts = _verdicts([check])
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
            growth[name] = statistics.median(found)
    check = (f"at most {MOST_GROWTH:.0%} of one rank's", max, growth, lambda x: x <= MOST_GROWTH, ".1%")
    is_kept, verdicts = _verdicts([check])
    text = (
        f"{point.seq_len:,} tokens × 8 heads × {point.head_dim}, {point.dtype}, causal, zigzag: CPU seconds of all threads "
        "of all ranks in one call, with more ranks than cores where there are more. In turn; ratios are those of a round. "
        f"Brackets: the {CONFIDENCE:.0%} interval of the median."
    )
    return "\n\n".join([text, format_table(header, rows), *verdicts]), is_kept

"""Published measurements, one row each: what was measured, where it is printed, and what it is used for.

`data/README.md` tells what is known of every source. A source is a paper or a repository with all its tables. Its rows
are judged by constants that were fitted to the rows of all other sources; some rows are only shown.
"""

import csv
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

from ringspan.planner.accuracy import Parts, spread_of
from ringspan.planner.catalog import Device

Use = Literal["judged", "apart", "unused"]
Fields = dict[str, str]
RATES = ("iters_per_s", "tflops_per_gpu")  # more is faster


class Row(NamedTuple):
    """`value` in the unit of the table; `apart` rows are erratic, inconsistent or ratios near 1."""

    id: str
    table: str
    source: str
    quantity: str
    value: float
    use: Use
    why: str  # it is apart or unused
    fields: Fields

    @property
    def is_rate(self) -> bool:
        """Whether a larger value is a faster one."""
        return self.quantity in RATES


def read_rows(folder: Path | None = None) -> Iterator[Row]:
    """Every row with a value: of the package's tables, or of those in a folder with the same names and columns."""
    for table, (quantities, of_row) in _TABLES.items():
        for fields in _read(table, folder):
            quantity = next((name for name in quantities if fields.get(name)), None)
            if quantity is None or (fields.get("status") or "ok") not in ("ok", "label_half_hidden"):
                continue
            use, why = of_row(fields)
            value = float(fields[quantity])
            yield Row(fields["row_id"], table, source_of(fields), quantity, value, use, why, fields)


def _read(table: str, folder: Path | None) -> list[Fields]:
    if folder is not None:
        path = folder / f"{table}.csv"
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
    text = (files("ringspan.planner.published") / "data" / f"{table}.csv").read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def source_of(fields: Fields) -> str:
    """The paper or repository of a row: its first word, without the version of a paper."""
    return re.sub(r"^(arXiv:[0-9.]+)v[0-9]+$", r"\1", fields["source"].split()[0])


def _judged(_: Fields) -> tuple[Use, str]:
    return "judged", ""


def _kernels(fields: Fields) -> tuple[Use, str]:
    if fields["kernel"] == "cuDNN":
        return "unused", "no plan uses this kernel"
    return "judged", ""


def _formula(_: Fields) -> tuple[Use, str]:
    return "apart", "a formula, not a measurement"


def _twice(fields: Fields) -> tuple[Use, str]:
    if fields["notes"].startswith("same figure as"):
        return "apart", "printed twice in the source"
    if fields["row_id"] == "meta-t6-cp2-128K-ttit":
        return "apart", "disagrees with Table 7, and Table 8 supports Table 7"
    return "judged", ""


def _iterations(fields: Fields) -> tuple[Use, str]:
    if fields["source"].endswith("benchmark_results.png") and int(fields["seq_len_tokens"]) <= 8192:
        return "apart", "erratic: rows of 8K and shorter"
    return "judged", ""


def _throughput(fields: Fields) -> tuple[Use, str]:
    if fields["method"].startswith("magi-"):
        return "unused", "its own schedule, dispatched by a solver, is not modelled"
    return "judged", ""


def _ratio(_: Fields) -> tuple[Use, str]:
    return "apart", "a ratio near 1"


def _video(fields: Fields) -> tuple[Use, str]:
    if fields["row_id"].endswith("-readme"):
        return "apart", "two sources disagree"
    return "judged", ""


_TABLES = {
    "attention_kernel_throughput": (("tflops_per_gpu",), _kernels),
    "ring_step_time": (("time_us",), _judged),
    "decode_attention_time": (("pass_q_total_us",), _judged),
    "cp_attention_throughput": (("time_ms", "tflops_per_gpu"), _throughput),
    "dit_latency": (("time_s",), _video),
    "dit_step_time": (("step_time_s",), _video),
    "prefill_ttft": (("ttft_ms",), _twice),
    "decode_ttit": (("ttit_ms",), _twice),
    "generation_time": (("time_s",), _judged),
    "training_step": (("step_time_s",), _twice),
    "cp_attention_iters": (("iters_per_s",), _iterations),
    "cp_speedup": (("measured_speedup",), _ratio),
    "ring_min_block": (("min_block_tokens",), _formula),
}


class Predicted(NamedTuple):
    """`value` in the unit of the row; seconds by what they are spent on."""

    value: float
    parts: Parts
    device: Device

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return spread_of(self.parts, self.device)

"""Published measurements, one row each: what was measured, where it is printed, and what it is used for.

`data/README.md` tells what is known of every source. A row is either fitted (the curves come from it) or judged (a
prediction is held against it), never both; some are only shown.
"""

import csv
from collections.abc import Iterator
from importlib.resources import files
from typing import Literal, NamedTuple

Use = Literal["fitted", "judged", "apart", "unused"]
Fields = dict[str, str]


class Row(NamedTuple):
    """`value` in the unit of the source; `apart` rows are erratic, inconsistent or ratios near 1."""

    id: str
    table: str
    source: str
    quantity: str
    value: float
    use: Use
    why: str  # it is apart or unused
    fields: Fields


def read_rows() -> Iterator[Row]:
    """Every row with a value."""
    for table, (quantity, of_row) in _TABLES.items():
        for fields in _read(table):
            if not fields[quantity] or fields.get("status", "ok") not in ("ok", "label_half_hidden"):
                continue
            use, why = of_row(fields)
            yield Row(fields["row_id"], table, _source(fields), quantity, float(fields[quantity]), use, why, fields)


def _read(table: str) -> list[Fields]:
    text = (files("ringspan.planner.published") / "data" / f"{table}.csv").read_text()
    return list(csv.DictReader(text.splitlines()))


def _source(fields: Fields) -> str:
    """As printed, without what is said about the reading of it."""
    return fields["source"].split(" (seen")[0].split(" (commit")[0]


def _kernels(fields: Fields) -> tuple[Use, str]:
    if fields["kernel"] == "cuDNN":
        return "unused", "no plan uses this kernel"
    return "fitted", ""


def _always_fitted(_: Fields) -> tuple[Use, str]:
    return "fitted", ""


def _formula(_: Fields) -> tuple[Use, str]:
    return "apart", "a formula, not a measurement"


def _ttft(fields: Fields) -> tuple[Use, str]:
    if fields["notes"].startswith("same figure as"):
        return "apart", "printed twice in the source"
    return "judged", ""


def _ttit(fields: Fields) -> tuple[Use, str]:
    if fields["notes"].startswith("same figure as"):
        return "apart", "printed twice in the source"
    if fields["row_id"] == "meta-t6-cp2-128K-ttit":
        return "apart", "disagrees with Table 7, and Table 8 supports Table 7"
    return "judged", ""


def _iterations(fields: Fields) -> tuple[Use, str]:
    if fields["library"].startswith("USP") and int(fields["seq_len_tokens"]) <= 8192:
        return "apart", "erratic: rows of 8K and shorter"
    return "judged", ""


def _burst(fields: Fields) -> tuple[Use, str]:
    return ("fitted", "") if fields["n_gpus"] == "1" else ("judged", "")


def _ratio(_: Fields) -> tuple[Use, str]:
    return "apart", "a ratio near 1"


def _video(fields: Fields) -> tuple[Use, str]:
    if fields["n_gpus"] == "1":
        return "fitted", ""
    if fields["row_id"].endswith("-readme"):
        return "apart", "two sources disagree"
    return "judged", ""


_TABLES = {
    "attention_kernel_throughput": ("tflops_per_gpu", _kernels),
    "ring_step_time": ("time_us", _always_fitted),
    "decode_attention_time": ("pass_q_total_us", _always_fitted),
    "cp_attention_throughput": ("time_ms", _burst),
    "dit_latency": ("time_s", _video),
    "dit_step_time": ("step_time_s", _video),
    "prefill_ttft": ("ttft_ms", _ttft),
    "decode_ttit": ("ttit_ms", _ttit),
    "cp_attention_iters": ("iters_per_s", _iterations),
    "cp_speedup": ("measured_speedup", _ratio),
    "ring_min_block": ("min_block_tokens", _formula),
}

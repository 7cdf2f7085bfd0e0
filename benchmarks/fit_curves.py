"""How are the curves of the catalogue fitted to the published rows? Writes `curves.toml`.

    python benchmarks/fit_curves.py [--dry-run]

Least squares of log(predicted / published) over the fitted rows only, by Levenberg and Marquardt's method with numeric
derivatives, from the values in the file as it is. Every row counts the same, but for labels that are half hidden.
"""

import math
import sys
from pathlib import Path

import numpy as np

import ringspan.planner.catalog
from ringspan.planner.catalog.files import read_data
from ringspan.planner.published.check import fitted_parameters
from ringspan.planner.published.predict import predict_row
from ringspan.planner.published.rows import Row, read_rows

FILE = Path(ringspan.planner.catalog.__file__).parent / "data" / "curves.toml"
ROUNDS = 40

ABOUT = {
    "attention.fa2": "FlashAttention-2: limit · d/(d + softmax_dims) · n/(n + ramp), see cost.attention_flops_per_s.\n"
    "# Rows: flash2_a100_fwd_bwd, flash2_h100_fwd_bwd, flash3_fp16_fwd (its FA2 bars), BurstAttention on one GPU, tvm\n"
    "# flash_perf (RTX 4090).",
    "attention.fa2.efficiency": "Share of the dense peak. L40: from CogVideoX-5b on one GPU.",
    "attention.fa3": "FlashAttention-3. Rows: flash3_fp16_fwd, arXiv:2411.01783v3 Table 5 and Appendix A.",
    "attention.fa3.efficiency": "Share of the dense peak.",
    "dense": "Matrix products of a layer, share of the dense peak. Row: CogVideoX-5b on one A100.",
    "dense.model": "Times that, for pipelines that do more beside. Rows: HunyuanVideo and Wan2.1 on one H100.",
    "memory": "Share of the memory's rate. Rows: decode attention, arXiv:2411.01783v3 Table 8.",
    "network": "Share of the line rate and start of a message; an exchange is an all-to-all. Rows: Tables 5 and 8.",
    "scale_up": "Not fitted: NVLink 4 point to point, 380 of 450 GB/s (NVIDIA/nccl#1264).",
}


def main() -> None:
    rows = [row for row in read_rows() if row.use == "fitted"]
    names = sorted(fitted_parameters())
    start = np.log([fitted_parameters()[name] for name in names])
    found = _fit(rows, names, start)
    for name, before, after in zip(names, np.exp(start), np.exp(found), strict=True):
        print(f"{name:45} {before:10.4g} → {after:10.4g}")
    errors = np.abs(np.expm1(_residuals(rows, names, found) / _weights(rows)))
    print(f"{len(rows)} rows, {len(names)} parameters; median error {np.median(errors):.1%}, worst {errors.max():.1%}")
    if "--dry-run" not in sys.argv:
        FILE.write_text(_format(read_data("curves.toml")))


def _fit(rows: list[Row], names: list[str], start: np.ndarray) -> np.ndarray:
    at, damping = start, 1e-2
    residuals = _residuals(rows, names, at)
    for _ in range(ROUNDS):
        jacobian = np.empty((len(rows), len(names)))
        for i in range(len(names)):
            moved = at.copy()
            moved[i] += 1e-4
            jacobian[:, i] = (_residuals(rows, names, moved) - residuals) / 1e-4
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ residuals
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
        trial = at + np.clip(step, -0.5, 0.5)
        trial_residuals = _residuals(rows, names, trial)
        if trial_residuals @ trial_residuals < residuals @ residuals:
            at, residuals, damping = trial, trial_residuals, damping / 3
        else:
            damping *= 4
    _residuals(rows, names, at)  # leaves the curves at the fitted values
    return at


def _residuals(rows: list[Row], names: list[str], logs: np.ndarray) -> np.ndarray:
    for name, value in zip(names, np.exp(logs), strict=True):
        _set(name, float(f"{value:.4g}") if value is logs else float(value))
    return _weights(rows) * np.array([math.log(predict_row(row) / row.value) for row in rows])


def _weights(rows: list[Row]) -> np.ndarray:
    return np.array([0.25 if row.fields.get("status") == "label_half_hidden" else 1.0 for row in rows])


def _set(name: str, value: float) -> None:
    """Set a value in the loaded catalogue; names of models and devices contain dots."""
    node = read_data("curves.toml")
    while name not in node:
        key = next(key for key in node if name.startswith(f"{key}."))
        node, name = node[key], name.removeprefix(f"{key}.")
    node[name] = value


def _format(curves: dict[str, object]) -> str:
    lines = [
        "# How much of their peaks devices and links reach. Written by benchmarks/fit_curves.py from published rows",
        "# that are for fitting; `fixed` lists what is not fitted. Lengths in tokens, times in seconds.",
        "",
        "fixed = [" + ", ".join(f'"{name}"' for name in curves["fixed"]) + "]",  # type: ignore[attr-defined]
    ]

    def table(name: str, node: dict[str, object]) -> None:
        lines.extend(["", f"# {ABOUT[name]}" if name in ABOUT else "", f"[{name}]"])
        for key, value in node.items():
            if not isinstance(value, dict):
                quoted = f'"{key}"' if "." in key else key
                lines.append(f"{quoted} = {float(f'{value:.4g}')}")
        for key, value in node.items():
            if isinstance(value, dict):
                table(f"{name}.{key}", value)

    for key, node in curves.items():
        if key == "attention":
            for kernel, curve in node.items():  # type: ignore[attr-defined]
                table(f"attention.{kernel}", curve)
        elif isinstance(node, dict):
            table(key, node)
    return "\n".join(line for i, line in enumerate(lines) if line or lines[i - 1]) + "\n"


if __name__ == "__main__":
    main()

"""`ringspan bench calibrate --html`: the fitted curves of this machine through the measured points."""

from pathlib import Path

from ringspan.bench.calibration import Calibration
from ringspan.bench.settings import DTYPES, CalibrationSettings
from ringspan.cli.formats import format_seconds
from ringspan.page.report import Section, build_report, chart, curves, facts, text
from ringspan.planner.catalog import Device, load_device
from ringspan.planner.cost import Shard, message_s, tile_s
from ringspan.planner.software import RINGSPAN


def build_calibration_page(calibration: Calibration, settings: CalibrationSettings, file: Path, command: str) -> str:
    """One HTML file; `file` holds the calibrated device as ringspan plan reads it."""
    device = load_device(str(file))
    charts = [_tiles(calibration, settings, device)]
    if calibration.messages:
        charts.append(_messages(calibration, device))
    lead = ["Lines are what ringspan plan computes from the file; circles are what was measured."]
    sections = [
        _rates(calibration),
        curves("curves", "Measured against fitted", charts, lead),
        text(
            "use",
            "Plan with it",
            ["Plan for this machine, or compare the prediction with a measured run:"],
            _uses(calibration, file),
        ),
    ]
    return build_report("This machine, calibrated", [f"One rank of it: {calibration.about}."], sections, command)


def _rates(calibration: Calibration) -> Section:
    rate, latency_s = calibration.link
    rows = [
        ("attention", f"{calibration.attention.flops_per_s / 1e9:,.3g} GFLOP/s ({calibration.attention.kernel})"),
        ("matrix products", f"{calibration.dense_flops_per_s / 1e9:,.3g} GFLOP/s"),
        ("memory", f"{calibration.memory_bytes_per_s / 1e9:,.3g} GB/s"),
        ("messages", f"{rate / 1e9:,.3g} GB/s after {format_seconds(latency_s)}"),
    ]
    return facts("rates", "What one rank reaches while the others are busy too", rows)


def _tiles(calibration: Calibration, settings: CalibrationSettings, device: Device) -> Section:
    shard = Shard(
        batch=settings.batch,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        v_head_dim=settings.head_dim,
        kv_elements=2 * settings.num_kv_heads * settings.head_dim,
        itemsize=DTYPES[settings.dtype].itemsize,
        wire="bf16",
        practice=RINGSPAN,
    )
    lines, dots = [], []
    for kind in dict.fromkeys(kind for kind, _, _ in calibration.tiles):
        measured = [(n, seconds) for one, n, seconds in calibration.tiles if one == kind]
        fitted = [(n, tile_s(device, shard, n, n, is_causal=kind == "causal")) for n, _ in measured]
        lines.append((f"{kind} tile", fitted))
        dots.append((f"{kind} tile", measured))
    return chart("A tile of n queries and n keys", "tokens", lines, dots=dots)


def _messages(calibration: Calibration, device: Device) -> Section:
    fitted = [(nbytes, message_s(device.near, nbytes)) for nbytes, _ in calibration.messages]
    measured = list(calibration.messages)
    return chart("A message to the next rank", "bytes", [("message", fitted)], dots=[("message", measured)])


def _uses(calibration: Calibration, file: Path) -> str:
    return (
        f"ringspan plan --model llama-3.1-8b --devices {calibration.node_size}x{file} --tokens 16K\n"
        f"ringspan bench attention --predict {file} --html bench.html"
    )

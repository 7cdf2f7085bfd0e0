"""How is a calibrated device printed? What its ranks reach, and the commands that read the file."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from ringspan.bench.calibration import Calibration
from ringspan.cli.formats import format_seconds
from ringspan.cli.page import Page


def print_calibration(calibration: Calibration, file: Path, console: Console) -> None:
    """Print the curves of one rank and the commands that read the file."""
    page = Page(console)
    console.print(Text(f"One rank of this machine ({calibration.about}), measured", "bold"))
    rate, latency_s = calibration.link
    page.facts(
        [
            ("attention", f"{calibration.attention.flops_per_s / 1e9:,.3g} GFLOP/s ({calibration.attention.kernel})"),
            ("matrix products", f"{calibration.dense_flops_per_s / 1e9:,.3g} GFLOP/s"),
            ("memory", f"{calibration.memory_bytes_per_s / 1e9:,.3g} GB/s"),
            ("messages", f"{rate / 1e9:,.3g} GB/s after {format_seconds(latency_s)}"),
        ]
    )
    page.prose(
        "Plan for this machine, or compare the prediction with a measured run:",
    )
    page.show(
        Text(f"ringspan plan --model llama-3.1-8b --devices {calibration.node_size}x{file} --tokens 16K"),
        Text(f"ringspan bench attention --predict {file}"),
    )

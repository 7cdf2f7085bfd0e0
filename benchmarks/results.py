"""How are results measured in separate processes, and where are they kept?

RESULTS.md has one section for each benchmark and type of CPU, rewritten by its `--write`. A section stands between two
marker comments that name both, so that one can be rerun without the others.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("RESULTS.md")
HEADER = "# Measured results\n\nEach section is written by the command it names, for one type of CPU.\n"


THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


def in_subprocess(script: str, *arguments: object) -> Any:
    """Return the JSON of a script that runs in its own process, with BLAS on one thread.

    On Linux a process inherits the peak resident size of its parent, so a parent that compares peaks must stay small.
    """
    command = [sys.executable, script, *map(str, arguments)]
    environment = os.environ | dict.fromkeys(THREADS, "1")
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def run_checkout(checkout: Path, script: str | Path, *arguments: object) -> str:
    """Return the JSON of a script in its own process that imports `ringspan` from a checkout, on one thread."""
    source = checkout.resolve() / "src"
    if not (source / "ringspan").is_dir():
        raise SystemExit(f"--against={checkout}: a checkout has a folder src/ringspan; give the root of one")
    environment = os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONPATH": str(source)}
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_median(values: Sequence[float], digits: int = 2) -> str:
    """Format the median with the smallest and largest value."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} – {max(values):.{digits}f})"


def describe_machine() -> str:
    """Describe the machine without names that identify its owner."""
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return (
        f"{describe_cpu()}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy {np.__version__} with "
        f"{blas['name']} {blas['version']}"
    )


def describe_cpu() -> str:
    """Return the type of the CPU with its vector extension, because clouds use one name for several."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    if found := re.search(r"model name\s*: (.+)", text):
        vectors = (name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if f" {flag} " in text)
        return ", ".join([found[1], *vectors][:2])
    return platform.processor() or platform.machine()


def write_section(name: str, title: str, text: str) -> None:
    """Replace the benchmark's section of RESULTS.md for this type of CPU, or append it."""
    cpu = describe_cpu()
    name, title = f"{name} on {cpu}", f"{title} ({cpu})"
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    section = f"{begin}\n## {title}\n\n{text}\n{end}\n"
    page = FILE.read_text() if FILE.exists() else HEADER
    before, found, rest = page.partition(begin)
    after = rest.partition(f"{end}\n")[2] if found else ""
    FILE.write_text(f"{before if found else before + chr(10)}{section}{after}")

"""`ringspan bench selfcheck --html`: every kernel and transport of this machine and whether it is right."""

from collections.abc import Sequence

from ringspan.bench.result import PathCheck
from ringspan.page.report import build_report, facts, table


def build_selfcheck_page(paths: Sequence[PathCheck], machine: str, command: str) -> str:
    """One HTML file."""
    count = {status: sum(path.status == status for path in paths) for status in ("ok", "failed", "not available")}
    verdict = f"✗ {count['failed']} failed" if count["failed"] else f"✓ all {count['ok']} that can run here are right"
    rows = [
        (it.path, it.status, ("" if it.max_error is None else f"{it.max_error:.1e}", it.max_error or 0.0), it.note)
        for it in paths
    ]
    columns = ["path", "status", ">largest error", "note"]
    sections = [
        facts("summary", "The verdict", [("paths", verdict), ("not available here", count["not available"])]),
        table("paths", "Every path", columns, rows, "Choose a heading to sort by it."),
    ]
    return build_report("Self-check of kernels and transports", [machine], sections, command)

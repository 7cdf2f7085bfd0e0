"""The report of `ringspan verify` as one HTML page: the verdict, what the mistake looks like, and every case."""

from collections.abc import Iterator

from ringspan.page.report import Section, build_report, facts, table, text
from ringspan.verify import VerifyReport


def build_verify_page(report: VerifyReport, command: str) -> str:
    """One HTML file."""
    verdict = "right" if report.has_passed else "NOT right"
    lead = [f"{report.target} is {verdict}: every case is compared with dense attention in float64."]
    return build_report(f"Verify: {report.target}", lead, _sections(report), command)


def _sections(report: VerifyReport) -> Iterator[Section]:
    yield facts("summary", "The verdict", [*report.counts().items(), ("seconds", f"{report.seconds:.0f}")])
    if report.diagnosis is not None:
        yield text("diagnosis", "What the mistake looks like", [str(report.diagnosis)])
    rows = [
        (str(one.case), one.status, "yes" if one.has_passed else "no", one.message or ", ".join(one.missing))
        for one in report.verdicts
    ]
    yield table("cases", "Every case", ["case", "status", "passed", "message"], rows, "Choose a heading to sort by it.")

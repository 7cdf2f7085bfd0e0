"""What was found: a verdict for each case, the diagnosis, and the report as text, JSON and JUnit XML."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from xml.etree import ElementTree

from ringspan.verify.cases import VerifyCase
from ringspan.verify.diagnose import Diagnosis

Status = Literal["right", "wrong", "refused", "error", "hung", "not asked"]


@dataclass(frozen=True, slots=True)
class CaseVerdict:
    """How a target did in one case.

    `missing` are the features that the case needs and the target does not declare: then it may compute the right
    answer or refuse, and anything else fails.
    """

    case: VerifyCase
    status: Status
    missing: tuple[str, ...] = ()
    message: str = ""

    @property
    def has_passed(self) -> bool:
        """Right, refused where that is fine, or not asked."""
        return self.status in ("right", "not asked") or (self.status == "refused" and bool(self.missing))

    def __str__(self) -> str:
        undeclared = f" [does not declare {', '.join(self.missing)}]" if self.missing else ""
        return f"{self.status}: {self.case}{undeclared}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All verdicts on one target."""

    target: str
    verdicts: tuple[CaseVerdict, ...]
    diagnosis: Diagnosis | None
    seconds: float

    @property
    def has_passed(self) -> bool:
        """Whether at least one case was computed, and none failed."""
        return all(verdict.has_passed for verdict in self.verdicts) and any(
            verdict.status == "right" for verdict in self.verdicts
        )

    @property
    def failures(self) -> tuple[CaseVerdict, ...]:
        """The verdicts that did not pass."""
        return tuple(verdict for verdict in self.verdicts if not verdict.has_passed)

    def counts(self) -> dict[str, int]:
        """How many cases of each status."""
        return dict(Counter(verdict.status for verdict in self.verdicts))

    def to_text(self, most: int = 10) -> str:
        """A few lines for people: the verdict first."""
        counted = ", ".join(f"{number} {status}" for status, number in self.counts().items())
        lines = [f"{self.target}: {'right' if self.has_passed else 'NOT right'} ({counted}, {self.seconds:.0f} s)"]
        if self.diagnosis is not None:
            lines.append(f"looks like: {self.diagnosis}")
        failures: Sequence[CaseVerdict] = self.failures
        lines += [f"  {verdict}" for verdict in failures[:most]]
        if len(failures) > most:
            lines.append(f"  … and {len(failures) - most} more")
        if not any(verdict.status == "right" for verdict in self.verdicts):
            reasons = dict.fromkeys(verdict.message for verdict in self.verdicts if verdict.status == "refused")
            lines += [f"  refused: {reason}" for reason in list(reasons)[:most]]
            lines.append("no case was computed: nothing is known to be right")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        diagnosis = self.diagnosis
        return {
            "target": self.target,
            "has_passed": self.has_passed,
            "seconds": round(self.seconds, 3),
            "counts": self.counts(),
            "diagnosis": None if diagnosis is None else diagnosis._asdict(),
            "cases": [
                {
                    "case": str(verdict.case),
                    "status": verdict.status,
                    "has_passed": verdict.has_passed,
                    "missing": list(verdict.missing),
                    "message": verdict.message,
                }
                for verdict in self.verdicts
            ],
        }

    def to_junit(self) -> str:
        """One test case per case, for continuous integration."""
        skipped = [verdict for verdict in self.verdicts if verdict.status in ("refused", "not asked")]
        suite = ElementTree.Element(
            "testsuite",
            name=f"ringspan verify {self.target}",
            tests=str(len(self.verdicts)),
            failures=str(len(self.failures)),
            skipped=str(sum(verdict.has_passed for verdict in skipped)),
            time=f"{self.seconds:.3f}",
        )
        for verdict in self.verdicts:
            entry = ElementTree.SubElement(suite, "testcase", classname=self.target, name=str(verdict.case))
            if not verdict.has_passed:
                looks_like = f"\n{self.diagnosis}" if self.diagnosis else ""
                ElementTree.SubElement(entry, "failure", message=verdict.status).text = verdict.message + looks_like
            elif verdict.status != "right":
                ElementTree.SubElement(entry, "skipped", message=verdict.status)
        return ElementTree.tostring(suite, encoding="unicode")

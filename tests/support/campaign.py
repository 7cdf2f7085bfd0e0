"""Campaigns: random cases by the thousand, counted by kind. pytest runs a few of them, `make fuzz` goes on for hours.

A campaign is a Hypothesis test in `tests/fuzz` that calls `count(kind)` once for every case that ended as it must.
`python -m support.campaign SECONDS [name …]` runs those whose names contain one of the words, or all.
"""

import importlib
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings

COUNTS: Counter[str] = Counter()

_FEW = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
_MANY = settings(
    max_examples=200,
    deadline=None,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)

HOW_MANY = _MANY if "RINGSPAN_CAMPAIGN" in os.environ else _FEW
"""In `make test` the same few cases every time."""


def count(kind: str) -> None:
    COUNTS[kind] += 1


def find_campaigns(words: list[str]) -> dict[str, Callable[[], Any]]:
    folder = Path(__file__).parents[1] / "fuzz"
    sys.path.insert(0, str(folder))
    found = {}
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(path.stem)
        for name, campaign in vars(module).items():
            if name.startswith("test_") and hasattr(campaign, "hypothesis"):
                found[f"{path.stem}.{name}"] = campaign
            elif isinstance(campaign, type) and hasattr(campaign, "runTest"):
                found[f"{path.stem}.{name}"] = campaign("runTest").runTest
    return {name: campaign for name, campaign in found.items() if not words or any(word in name for word in words)}


def run_for(campaigns: dict[str, Callable[[], Any]], seconds: float, totals: Path) -> int:
    """Take turns until the time is over, or one fails; add the counts to those of earlier runs."""
    deadline = time.monotonic() + seconds
    failed: list[str] = []
    while not failed and time.monotonic() < deadline:
        for name, campaign in campaigns.items():
            try:
                campaign()
            except Exception:
                failed.append(name)
                traceback.print_exc()
            if time.monotonic() >= deadline:
                break
    before = Counter(json.loads(totals.read_text())) if totals.exists() else Counter()
    totals.parent.mkdir(parents=True, exist_ok=True)
    totals.write_text(json.dumps(before + COUNTS, indent=2, sort_keys=True))
    for kind, number in sorted(COUNTS.items()):
        sys.stdout.write(f"{number:8} {kind} ({(before + COUNTS)[kind]} in all runs)\n")
    sys.stdout.write(f"failed: {', '.join(failed) or 'none'}\n")
    return len(failed)


if __name__ == "__main__":
    os.environ["RINGSPAN_CAMPAIGN"] = "1"
    from support import campaign  # so that the counts are those that the campaigns add to

    seconds, words = float(sys.argv[1]), sys.argv[2:]
    totals = Path(os.environ.get("RINGSPAN_FUZZ_TOTALS", ".fuzz/totals.json"))
    sys.exit(campaign.run_for(campaign.find_campaigns(words), seconds, totals))

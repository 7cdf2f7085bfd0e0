"""How many injected faults does the verifier catch, how many does it name, and how often is it wrong about a right one?

python benchmarks/verify_faults.py                 # the faults of rs.verify.faults on 2, 3, 4 and 5 ranks
python benchmarks/verify_faults.py --false-alarms  # 2,000 correct runs and more
"""

import argparse
import time
from collections import Counter

import ringspan as rs
from ringspan.verify.diagnose import diagnose
from ringspan.verify.faults import FAULTS, Fault, FaultyRing
from ringspan.verify.run import judge

SIZES = (2, 3, 4, 5)


def find_name(fault: Fault, world_size: int) -> str | None:
    """What the diagnosis calls it; None if no case failed."""
    judged = (judge(case, fault.run(case))[1] for case in rs.verify.make_cases([world_size]))
    failures = [failure for failure in judged if failure is not None]
    return diagnose(failures).mistake if failures else None


def print_faults() -> None:
    caught, named = Counter(), Counter()
    total = Counter()
    rows: dict[str, list[str]] = {name: [] for name in FAULTS}
    for world_size in SIZES:
        for fault in FAULTS.values():
            if world_size < fault.min_world_size:
                rows[fault.name].append("-")
                continue
            name = find_name(fault, world_size)
            total[world_size] += 1
            caught[world_size] += name is not None
            named[world_size] += name in fault.mistakes
            cell = "missed" if name is None else "named" if name in fault.mistakes else f"as {name}"
            rows[fault.name].append(cell)
    print("| fault | area | 2 | 3 | 4 | 5 |\n|---|---|---|---|---|---|")
    for fault in FAULTS.values():
        print(f"| {fault.name} | {fault.area} | {' | '.join(rows[fault.name])} |")
    for world_size in SIZES:
        print(f"{world_size} ranks: {caught[world_size]} of {total[world_size]} caught, {named[world_size]} named")


def print_false_alarms() -> None:
    """A NumPy ring with 18 seeds, and this library's attention on threads with 9."""
    start = time.monotonic()
    runs: Counter[str] = Counter()
    alarms: list[str] = []
    for seed in range(18):
        for case in rs.verify.make_cases((1, 2, 3, 4, 5), seed=seed):
            verdict, _ = judge(case, FaultyRing(case).run())
            runs[case.dtype] += 1
            alarms += [] if verdict.has_passed else [str(verdict)]
    print(f"NumPy ring: {dict(runs)}, {len(alarms)} false alarms")
    runs.clear()
    for seed in range(9):
        report = rs.verify.verify("ringspan", seed=seed)
        runs.update(verdict.case.dtype for verdict in report.verdicts if verdict.status == "right")
        alarms += map(str, report.failures)
    print(f"ringspan: {dict(runs)} right, {len(alarms)} false alarms in all, {time.monotonic() - start:.0f} s")
    print("\n".join(alarms))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--false-alarms", action="store_true")
    print_false_alarms() if parser.parse_args().false_alarms else print_faults()

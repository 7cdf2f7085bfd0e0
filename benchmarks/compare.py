"""How fast are two ranks compared with the ideal, with code written by hand, and with other libraries?

Two gloo processes with one thread each run this library, the ideal, plain PyTorch and peers in turn, round by round.
Points are named SECTION/DTYPE/MASK/TOKENSxHEAD_DIM; sections are forward16k, backward8k, forward4k, alone and growth.
All of it takes about two hours. It can be stopped and started again: rounds are kept until the code changes.

    python benchmarks/compare.py --only forward4k --pairs 7
    python benchmarks/compare.py --only 'forward16k/float32/causal/*64' --seconds 200
    python benchmarks/compare.py --peers /tmp/peers --write
"""

import argparse
import sys
import time
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

from comparison.environment import make_environment, peer_versions
from comparison.points import all_points
from comparison.rounds import MOST_OTHERS, Store, measure
from comparison.tables import ABOUT, TITLES, format_section
from comparison.team import TeamFailed
from results import describe_machine, write_section

STATE = Path(__file__).parents[1] / ".benchmarks" / "compare.json"


def main() -> None:
    args = parse_arguments()
    points = [point for point in all_points() if any(fnmatch(point.name, f"*{it}*") for it in args.only or ["*"])]
    if not points:
        sys.exit(f"--only {' '.join(args.only)}: no such point; there are\n" + "\n".join(p.name for p in all_points()))
    python = make_environment(args.peers) if args.peers else None
    store = Store(args.state)
    deadline = time.monotonic() + (args.seconds or float("inf"))
    for point in points:
        if args.fresh:
            store.forget(point)
        if not args.report and time.monotonic() < deadline:
            try:
                measure(point, store, args.pairs, deadline, python, 1.0 if args.noisy else MOST_OTHERS, tell)
            except TeamFailed as error:
                sys.exit(f"{point.name}: {error}")
    is_kept = True
    for section in dict.fromkeys(point.section for point in points):
        is_kept &= report(section, store, args.write, python)
    sys.exit(not is_kept)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="points whose name has this in it; * is any")
    parser.add_argument(
        "--pairs", type=int, default=31, help="rounds of a point, four times as many of a short one; default 31"
    )
    parser.add_argument("--seconds", type=float, help="stop after so long; the next time it goes on")
    parser.add_argument(
        "--peers", type=Path, metavar="DIR", help="measure peers; DIR is their environment, made if new"
    )
    parser.add_argument("--fresh", action="store_true", help="forget the rounds of these points first")
    parser.add_argument("--noisy", action="store_true", help="count rounds that other programs have disturbed, too")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what is known")
    parser.add_argument("--state", type=Path, default=STATE, help="where rounds are kept")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    return parser.parse_args()


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(section: str, store: Store, is_written: bool, python: str | None) -> bool:
    """Print the results of a section; return whether its promises are kept."""
    known = [(p, store.record(p)) for p in all_points() if p.section == section and store.record(p).rounds]
    if not known:
        return True
    body, is_kept = format_section(section, known)
    peers = f" Peers: {peer_versions(python)}." if python and known[0][0].peers else ""
    command = f"`python benchmarks/compare.py --only {section}{' --peers DIR' if peers else ''} --write`"
    text = f"{command}\n\n{describe_machine()}, torch {version('torch')}.{peers}\n\n{body}"
    print(f"\n## {TITLES[section]}\n\n{text}")
    if is_written and known[0][0].peers:
        write_section("compare", "Two ranks: how they are compared", ABOUT)
    if is_written:
        write_section(f"compare_{section}", TITLES[section], text)
    return is_kept


if __name__ == "__main__":
    main()

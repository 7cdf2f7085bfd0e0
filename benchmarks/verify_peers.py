"""What do other libraries' attention functions compute, refuse and get wrong, as installed here?

python benchmarks/verify_peers.py                              # every library that `ringspan verify` knows
python benchmarks/verify_peers.py ring_attention_pytorch --ranks 2

Prints a row for each library, and for each that is wrong its smallest wrong case. Cases depend on nothing but the
numbers of ranks and --seed, so a mistake is the same on every machine.
"""

import argparse
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import torch

import ringspan as rs
from ringspan.verify.targets.peers import PEERS


def find_version(name: str) -> str:
    package = name.partition(":")[0].replace("_", "-")
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def describe_error(verdict: rs.verify.CaseVerdict) -> str:
    """An error's kind and first sentence, without what differs between cases."""
    return verdict.message.partition(". ")[0][:100]


def print_peer(name: str, world_sizes: tuple[int, ...], seed: int) -> list[str]:
    """Print a row of the table; return lines about what is wrong."""
    try:
        report = rs.verify.verify(name, world_sizes=world_sizes, seed=seed)
    except rs.UnsupportedError as error:
        print(f"| `{name}` | {find_version(name)} | | {error.rule} | |", flush=True)
        return []
    by_status = {status: [one for one in report.verdicts if one.status == status] for status in report.counts()}
    unable = [one for one in report.verdicts if one.status in ("refused", "error", "hung")]
    refusals = Counter(map(describe_error, unable))
    told = "; ".join(f"{number}: {reason}" for reason, number in refusals.most_common(3))
    wrong = by_status.get("wrong", [])
    print(
        f"| `{name}` | {find_version(name)} | {len(by_status.get('right', []))} cases | {told} | {len(wrong)} cases |",
        flush=True,
    )
    if not wrong:
        return []
    smallest = min(wrong, key=lambda one: (one.case.world_size, one.case.length, str(one.case)))
    assert report.diagnosis is not None
    return [f"{name} {find_version(name)}: {smallest}", f"  looks like: {report.diagnosis.mistake}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(PEERS)}")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sizes = tuple(map(int, given.ranks.split(",")))
    print(f"torch {torch.__version__}, {given.ranks} ranks\n")
    print("| name | version | right | refused or failed | wrong |\n|---|---|---|---|---|")
    mistakes = [line for name in given.names or PEERS for line in print_peer(name, sizes, given.seed)]
    print("\n" + "\n".join(mistakes))

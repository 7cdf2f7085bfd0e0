"""What does a repeated call cost outside kernels and transport?

One rank's side of `rs.attention`, causal and zigzag, with a kernel that returns prepared results and a transport that
never waits. The rest is Python: checking arguments, finding the plan, walking the program, views of tensors, and the
merges, which are arithmetic and are listed separately. The minimum of many repetitions is reported, because
disturbances only make a call slower.

    python benchmarks/overhead.py [--repeats 800] [--write]
    python benchmarks/overhead.py --against CHECKOUT [--rounds 7] [--repeats 100]

With `--against` the two checkouts take turns, each with its own copy of this program, since it replaces private parts
of its own code. The table has medians over the rounds, smallest and largest, and the ratio of this to the other one.
"""

import argparse
import json
import statistics
import timeit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from results import describe_machine, format_median, format_table, run_checkout, write_section

import ringspan as rs
from ringspan.kernels.softmax import Partial
from ringspan.program.pieces import Piece
from ringspan.runtime.arithmetic import TorchArithmetic
from ringspan.runtime.contract import Contract
from ringspan.runtime.scratch import ScratchPool
from ringspan.runtime.session import Session, lend_session
from ringspan.runtime.wire import Buffers
from ringspan.transports.base import Posted, Receive, Send, Single

ALLOWED_US = {2: 60, 4: None, 8: 200}
TOKENS, HEADS, HEAD_DIM = 32, 2, 8  # of one rank
NUMBER = 20  # calls per repetition


class Done:
    """A message that has arrived."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


class Nowhere(Single):
    """A transport that returns what this rank sends and carries nothing."""

    def __init__(self, world_size: int) -> None:
        self.rank, self.world_size, self.timeout_s = 1, world_size, 1.0

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Posted:
        return Posted([Done()] * len(sends), [Done()] * len(receives))

    def all_gather_bytes(self, payload: bytes, timeout_s: float) -> list[bytes]:  # noqa: ARG002
        return [payload] * self.world_size


class Ready:
    """A kernel that returns prepared results."""

    name = "ready"

    def __init__(self) -> None:
        self._parts = {
            rows: Partial(torch.zeros(1, HEADS, rows, HEAD_DIM), torch.zeros(1, HEADS, rows))
            for rows in range(1, TOKENS + 1)
        }

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, piece: Piece, scale: float) -> Partial:  # noqa: ARG002
        """Make a result of the right shape."""
        return self._parts[q.shape[2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=800)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="measure it in turns with this checkout")
    parser.add_argument("--rounds", type=int, default=7, help="of --against")
    parser.add_argument("--json", action="store_true", help="print µs per call without merges, by ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.against:
        print(compare(args.against, args.rounds, args.repeats))
        return
    if args.json:
        with without_merges():
            print(json.dumps({ranks: call_us(ranks, args.repeats) for ranks in ALLOWED_US}))
        return
    text = report(args.repeats)
    print(text)
    if args.write:
        write_section("overhead", "What a repeated call costs outside kernels and transport", text)


def compare(other: Path, rounds: int, repeats: int) -> str:
    checkouts = (Path(__file__).resolve().parents[1], other)
    measured: list[list[dict[str, float]]] = [[], []]
    for i in range(rounds):
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            script = checkouts[which] / "benchmarks" / "overhead.py"
            text = run_checkout(checkouts[which], script, "--json", "--repeats", repeats)
            measured[which].append(json.loads(text))
    rows = []
    for ranks in map(str, ALLOWED_US):
        here, there = ([one[ranks] for one in side] for side in measured)
        ratio = statistics.median(here) / statistics.median(there)
        rows.append([ranks, format_median(here, 1), format_median(there, 1), f"{ratio:.3f}"])
    return format_table(["ranks", "here, µs per call", "there, µs per call", "ratio"], rows)


def report(repeats: int) -> str:
    rows = []
    for world_size, allowed_us in ALLOWED_US.items():
        with_merges = call_us(world_size, repeats)
        with without_merges():
            without = call_us(world_size, repeats)
        verdict = "" if allowed_us is None else f"at most {allowed_us}: {'yes' if without <= allowed_us else 'NO'}"
        rows.append([str(world_size), f"{without:.0f}", verdict, f"{with_merges:.0f}"])
    table = format_table(["ranks", "µs per call", "promised", "with merges, µs"], rows)
    return (
        f"`python benchmarks/overhead.py --repeats {repeats}`\n\n{describe_machine()}, torch {torch.__version__}.\n\n"
        "One rank's side of a call with a signature that is known, pass_kv, causal, zigzag, a kernel that does nothing "
        f"and a transport that carries nothing. The smallest of {repeats} repetitions of {NUMBER} calls.\n\n{table}"
    )


def call_us(world_size: int, repeats: int) -> float:
    transport = Nowhere(world_size)
    session = Session(transport, None, Contract(transport), Buffers(), ScratchPool(), {}, {})
    mask, layout = rs.causal(), rs.zigzag(TOKENS * world_size, world_size)
    x = torch.zeros(1, HEADS, TOKENS, HEAD_DIM)
    kernel = Ready()
    with lend_session(None, session), patch("ringspan.runtime.plan.choose_kernel", lambda *_: kernel):
        calls = timeit.repeat(lambda: rs.attention(x, x, x, mask=mask, layout=layout), number=NUMBER, repeat=repeats)
    return 1e6 * min(calls) / NUMBER


@contextmanager
def without_merges() -> Iterator[None]:
    with patch.object(TorchArithmetic, "merge_parts", staticmethod(lambda *_: None)):
        yield


if __name__ == "__main__":
    main()

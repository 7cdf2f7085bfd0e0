"""Should K and V travel as one message or as two?

Two gloo processes send each other their K and V at once, as in a step of a ring: as two messages; packed into one,
including the copy; and as one message that is packed already, as when a rank forwards a block. The receiver needs no
copy, because its K and V are views. All three run in turn, so that disturbances affect all of them. Single exchanges
are timed and medians reported, because with few cores an exchange can wait milliseconds for the scheduler.

    python benchmarks/packing.py [--rounds 100] [--write]
"""

import argparse
import statistics
from collections.abc import Callable, Mapping

from gloo_pair import Cost, of_both, on_pair, ratio, time_in_turn
from results import describe_machine, format_table, write_section

KB = 1024
SIZES = [n * KB for n in (1, 4, 16, 64, 256, 1024, 4096, 8192)]  # bytes of K, and as many of V
TIMEOUT_S = 60.0
WAYS = ("two", "packed", "forwarded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds)
    print(text)
    if args.write:
        write_section("packing", "K and V in one message or in two", text)


def report(rounds: int) -> str:
    import torch

    first, second = on_pair(measure, rounds)
    rows = []
    for size in SIZES:
        costs = {way: of_both(first[size][way], second[size][way]) for way in WAYS}
        rows.append([_format_size(size), *_columns(costs, "wall_s"), *_columns(costs, "cpu_s")])
    header = ["K, and as much V"]
    for what in ("time", "CPU"):
        header += [f"two, {what} µs", f"packed, {what} µs", "ratio", f"packed before, {what} µs", "ratio"]
    return (
        f"`python benchmarks/packing.py --rounds {rounds}`\n\n{describe_machine()}, torch {torch.__version__}.\n\n"
        "One exchange of K and V, both ways at once, between two gloo processes with one thread each: two messages, "
        "one that is packed for it, and one that was packed before. The time that passes on one rank, and the CPU time "
        f"of both with gloo's threads; medians of {rounds} rounds of all three in turn. Ratios are to two messages, "
        f"the median of those of each round: below 1 one message wins.\n\n{format_table(header, rows)}"
    )


def _columns(costs: Mapping[str, list[Cost]], what: str) -> list[str]:
    seconds = {way: [getattr(cost, what) for cost in of_way] for way, of_way in costs.items()}
    medians = {way: f"{statistics.median(values) * 1e6:.0f}" for way, values in seconds.items()}
    ratios = {way: f"{ratio(values, seconds['two']):.2f}" for way, values in seconds.items()}
    return [medians["two"], medians["packed"], ratios["packed"], medians["forwarded"], ratios["forwarded"]]


def _format_size(nbytes: int) -> str:
    return f"{nbytes // KB} KB" if nbytes < KB * KB else f"{nbytes // KB // KB} MB"


# --- On a rank ---


def measure(rank: int, rounds: int) -> dict[int, dict[str, list[Cost]]]:
    return {size: time_in_turn(exchanges(rank, size), rounds) for size in SIZES}


def exchanges(rank: int, size: int) -> dict[str, Callable[[], None]]:
    """Return what to time; buffers are reused, as in the runtime."""
    import torch
    import torch.distributed as dist

    from ringspan.transports.base import Receive, Send
    from ringspan.transports.torch_distributed import TorchDistributed

    transport, peer = TorchDistributed(dist.group.WORLD), 1 - rank
    k, v, their_k, their_v = (torch.full((size // 4,), float(rank)) for _ in range(4))
    packed, theirs = torch.zeros(size // 2), torch.zeros(size // 2)

    def exchange(sends: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
        posted = transport.exchange([Send(peer, x) for x in sends], [Receive(peer, x) for x in buffers])
        for handle in (*posted.receives, *posted.sends):
            handle.wait(TIMEOUT_S)

    def pack_and_exchange() -> None:
        torch.cat((k, v), out=packed)
        exchange([packed], [theirs])

    return {
        "two": lambda: exchange([k, v], [their_k, their_v]),
        "packed": pack_and_exchange,
        "forwarded": lambda: exchange([packed], [theirs]),
    }


if __name__ == "__main__":
    main()

"""What does reproducible mode cost a training step?

A small transformer on gloo processes with one thread each, causal and zigzag: forward, loss, backward, and gradients on
every rank, in three variants in turn: plain modules with all-reduced gradients; the same with attention in reproducible
mode; and everything reproducible. The optimizer is the same for all and is not timed. With more ranks than cores wall
time says little, so CPU seconds are reported too.

    python benchmarks/reproducible_model.py [--rounds 7] [--ranks 1 2 4] [--write]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ranks import run_ranks
from results import describe_machine, format_table, write_section

SEQ_LEN, FEATURES, HEADS, LAYERS, VOCABULARY = 4096, 512, 8, 2, 1024
WAYS = ("plain", "attention", "all")


class Cost(NamedTuple):
    """The costs of one step on one rank."""

    wall_s: float
    cpu_s: float


class Measured(NamedTuple):
    """The results of one rank: its steps by round, and the bytes it sends in one, for each variant."""

    costs: dict[str, list[Cost]]
    sent: dict[str, int]
    weights_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds, args.ranks)
    print(text)
    if args.write:
        write_section("reproducible_model", "What the same bits cost a training step", text)


def report(rounds: int, ranks: list[int]) -> str:
    import torch

    steps, messages = [], []
    for world_size in ranks:
        measured: list[Measured] = run_ranks(measure, world_size, rounds)
        row = [str(world_size)]
        for what, of_ranks in (("wall_s", max), ("cpu_s", sum)):
            seconds = {
                way: [
                    of_ranks(getattr(cost, what) for cost in of_round)
                    for of_round in zip(*(rank.costs[way] for rank in measured), strict=True)
                ]
                for way in WAYS
            }
            row += [f"{statistics.median(seconds[way]):.2f}" for way in WAYS]
            row += [f"{ratio(seconds[way], seconds['plain']):.2f}" for way in WAYS[1:]]
        steps.append(row)
        weights = measured[0].weights_bytes
        of_layers = statistics.mean(rank.sent["all"] - rank.sent["attention"] for rank in measured)
        reduced = 2 * weights * (world_size - 1) / world_size
        messages.append([str(world_size), *(f"{number / 1e6:.1f}" for number in (weights, reduced, of_layers))])
    header = ["ranks"]
    for what in ("time", "CPU"):
        header += [f"{way}, {what} s" for way in WAYS] + [f"{way} / plain" for way in WAYS[1:]]
    bytes_header = ["ranks", "weights, MB", "ring all-reduce sends, MB", "reproducible layers send, MB"]
    return (
        f"`python benchmarks/reproducible_model.py --rounds {rounds} --ranks {' '.join(map(str, ranks))}`\n\n"
        f"{describe_machine()}, torch {torch.__version__}.\n\n"
        f"One step of a transformer of {LAYERS} layers of {FEATURES} features and {HEADS} heads with a vocabulary of "
        f"{VOCABULARY}, on {SEQ_LEN} tokens in float32: forward, backward and the gradients on all ranks. Time is that "
        f"of the slowest rank, CPU that of all; medians of {rounds} rounds of all three in turn, ratios those of each "
        f"round.\n\n{format_table(header, steps)}\n\nBytes that a rank sends for the gradients of the weights, in the "
        f"mean over the ranks; attention's own are not in it.\n\n{format_table(bytes_header, messages)}"
    )


def ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


# --- On a rank ---


def measure(rank: int, rounds: int) -> Measured:  # noqa: ARG001
    import torch
    import torch.distributed as dist

    import ringspan as rs
    import ringspan.runtime.session
    from ringspan.transports import open_transport
    from ringspan.transports.base import CountingTransport

    transports: list[CountingTransport] = []

    def open_counted(group: Any) -> CountingTransport:
        transports.append(CountingTransport(open_transport(group)))
        return transports[-1]

    ringspan.runtime.session.open_transport = open_counted
    layout = rs.zigzag(SEQ_LEN, dist.get_world_size(), align=rs.TILE)
    tokens = torch.randint(VOCABULARY, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    batch = rs.shard_batch({"input_ids": tokens}, layout)
    steps = {way: make_step(way, layout, batch) for way in WAYS}
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    sent: dict[str, int] = {}
    weights_bytes = 0
    for _ in range(rounds + 1):
        for way, step in steps.items():
            before = sum(sum(transport.bytes_sent) for transport in transports)
            wall, cpu = time.perf_counter(), time.process_time()
            weights_bytes = step()
            costs[way].append(Cost(time.perf_counter() - wall, time.process_time() - cpu))
            sent[way] = sum(sum(transport.bytes_sent) for transport in transports) - before
    return Measured({way: of_rounds[1:] for way, of_rounds in costs.items()}, sent, weights_bytes)


def make_step(way: str, layout: Any, batch: dict[str, Any]) -> Callable[[], int]:
    """Run a step; return the bytes of the weights."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import ringspan as rs

    torch.manual_seed(0)
    model = make_model(partial(rs.attention, mask=rs.causal(), layout=layout, reproducible=way != "plain"))
    if way == "all":
        rs.reproducible.convert(model, layout=layout)
    labels = batch["labels"]

    def step() -> int:
        model.zero_grad()
        logits = model(batch["input_ids"])
        if way == "all":
            rs.reproducible.cross_entropy(logits, labels, layout=layout).backward()
        else:
            losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            rs.cross_rank_mean_loss(losses, labels).backward()
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        return sum(weight.nbytes for weight in model.parameters())

    return step


def make_model(attend: Callable[..., Any]) -> Any:
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = nn.LayerNorm(FEATURES), nn.LayerNorm(FEATURES)
            self.qkv, self.out = nn.Linear(FEATURES, 3 * FEATURES), nn.Linear(FEATURES, FEATURES)
            self.mlp = nn.Sequential(nn.Linear(FEATURES, 4 * FEATURES), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm2(x))

    layers = [Layer() for _ in range(LAYERS)]
    return nn.Sequential(
        nn.Embedding(VOCABULARY, FEATURES), *layers, nn.LayerNorm(FEATURES), nn.Linear(FEATURES, VOCABULARY)
    )


if __name__ == "__main__":
    main()

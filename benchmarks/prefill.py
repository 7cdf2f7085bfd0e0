"""Which side should travel in partial prefill, and does "auto" choose it?

New tokens meet a cache, from 1 % to 100 % of all tokens new, with pass-KV, pass-Q and what "auto" picks, in turn, on
two gloo ranks of one thread. `--link 100mbit` puts the ranks into network namespaces of their own and shapes the link
between them (needs root, `ip` and `tc`); without it they talk over loopback. Results are checked against one rank.

    python benchmarks/prefill.py [--link 100mbit] [--tokens 8192] [--rounds 5] [--write]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from results import describe_machine, format_table, write_section

import ringspan as rs

MISS_RATES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100)  # per cent
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
WAYS = ("pass_kv", "pass_q", "auto")
WITHIN = 1.10
PORT = 29533


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", help="rate of a shaped link, as tc writes it")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(measure(args.rank, args.tokens, args.rounds)))
        return
    with ranks_on(args.link) as prefixes:
        points = run(prefixes, args)
    text, is_kept = report(points, args)
    print(text)
    if args.write:
        name = "prefill_shaped" if args.link else "prefill"
        write_section(name, f"Partial prefill, {'a link of ' + args.link if args.link else 'loopback'}", text)
    sys.exit(not is_kept)


def report(points: list[dict[str, Any]], args: argparse.Namespace) -> tuple[str, bool]:
    """Return the table, and whether the promises are kept."""
    rows, worst = [], 0.0
    for point in points:
        # Runs of auto count as runs of the algorithm that it chooses.
        picked = str(point["picked"])
        seconds = {way: statistics.median(point[way]) for way in WAYS}
        runs = {way: point[way] + (point["auto"] if way == picked else []) for way in ("pass_kv", "pass_q")}
        over = statistics.median(runs[picked]) / min(map(statistics.median, runs.values())) - 1
        worst = max(worst, 1 + over)
        rows.append(
            [
                f"{point['miss']} %",
                str(point["new"]),
                *(f"{1e3 * seconds[way]:.1f}" for way in WAYS),
                picked,
                f"{100 * over:+.1f} %",
            ]
        )
    first, last = ({way: statistics.median(point[way]) for way in WAYS} for point in (points[0], points[-1]))
    crossing = first["pass_q"] < first["pass_kv"] and last["pass_q"] > last["pass_kv"]
    is_kept = worst <= WITHIN and (crossing or not args.link)
    error = max(point["error"] for point in points)
    link = f" --link {args.link}" if args.link else ""
    header = ["new", "tokens", "pass-KV, ms", "pass-Q, ms", "auto, ms", "auto picks", "over the better"]
    return (
        f"`python benchmarks/prefill.py{link} --tokens {args.tokens} --rounds {args.rounds}`\n\n"
        f"{describe_machine()}.\n\n"
        f"{args.tokens} tokens in all, {HEADS}/{KV_HEADS} heads of {HEAD_DIM}, float32, one layer, 2 gloo ranks of one "
        f"thread; medians of {args.rounds} interleaved rounds; the last column compares the algorithm that auto picks, "
        f"auto's own runs included, with the better one. {points[0]['machine']}\n\n"
        + format_table(header, rows)
        + f"\n\nLargest difference from a single rank: {error:.1e}. pass-Q faster at 1 % and slower at 100 %: "
        f"{'yes' if crossing else 'NO'}. Auto at most {100 * (WITHIN - 1):.0f} % over the better one: "
        f"{'yes' if worst <= WITHIN else 'NO'} ({100 * (worst - 1):+.1f} % at worst)."
    ), is_kept


def run(prefixes: list[list[str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the results of rank 0, after all ranks have finished."""
    address = "10.77.0.1" if args.link else "127.0.0.1"
    environment = os.environ | {"MASTER_ADDR": address, "MASTER_PORT": str(PORT), "OMP_NUM_THREADS": "1"}
    if args.link:
        environment["GLOO_SOCKET_IFNAME"] = "rs0"
    command = [sys.executable, __file__, "--tokens", str(args.tokens), "--rounds", str(args.rounds), "--rank"]
    ranks = [
        subprocess.Popen([*prefix, *command, str(rank)], env=environment, stdout=subprocess.PIPE)
        for rank, prefix in enumerate(prefixes)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    points: list[dict[str, Any]] = json.loads(outputs[0])
    return points


@contextmanager
def ranks_on(link: str | None) -> Iterator[list[list[str]]]:
    """Return how to start each rank: directly, or in a network namespace at one end of a shaped link."""
    if link is None:
        yield [[], []]
        return
    spaces = [f"ringspan-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        for space in spaces:
            tell(f"ip netns add {space}")
        tell(f"ip link add rs0 netns {spaces[0]} type veth peer name rs0 netns {spaces[1]}")
        for rank, space in enumerate(spaces):
            inside = f"ip netns exec {space}"
            tell(f"{inside} ip addr add 10.77.0.{rank + 1}/24 dev rs0")
            tell(f"{inside} ip link set rs0 up")
            tell(f"{inside} ip link set lo up")
            tell(f"{inside} tc qdisc add dev rs0 root tbf rate {link} burst 256kb latency 100ms")
        yield [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, stderr=subprocess.DEVNULL)


def tell(command: str) -> None:
    subprocess.run(command.split(), check=True)


# --- On a rank ---


def measure(rank: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of every algorithm at every miss rate."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    machine = rs.measure_machine()
    points = []
    for miss in MISS_RATES:
        num_new = max(2, tokens * miss // 100)
        cached = tokens - num_new
        generator = torch.Generator().manual_seed(miss)
        q, k, v = (torch.rand(1, n, tokens, HEAD_DIM, generator=generator) for n in (HEADS, KV_HEADS, KV_HEADS))
        cache = rs.KVCache(num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        if cached:
            with cache.begin([cached], algorithm="pass_kv") as turn:
                turn.store(*(turn.layout.shard(x[:, :, :cached], rank, 2) for x in (k, v)), layer=0)
        new = [x[:, :, cached:] for x in (q, k, v)]
        exact = whole(*(x[:, :, cached:] if x is q else x for x in (q, k, v)))
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        error, picked = 0.0, ""
        for number in range(rounds + 1):  # the first round is a warm-up
            for way in WAYS:
                dist.barrier()
                start = time.perf_counter()
                turn = cache.begin([num_new], algorithm=way)
                qkv = [turn.layout.shard(x, rank, 2) for x in new]
                out = turn.prefill(*qkv, layer=0)
                dist.barrier()
                if number:
                    seconds[way].append(time.perf_counter() - start)
                picked = turn.algorithm if way == "auto" else picked
                error = max(error, float((out - turn.layout.shard(exact, rank, 2)).abs().max()))
                turn.abort()
        point = {"miss": miss, "new": num_new, "picked": picked, "error": error, "machine": describe(machine)}
        points.append(point | seconds)
    dist.destroy_process_group()
    return points


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One device: the last queries of a causal sequence against all its keys, with PyTorch."""
    rows = torch.arange(k.shape[2])[None, :] <= torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None]
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=rows, enable_gqa=True)


def describe(machine: rs.RingMachine) -> str:
    return (
        f"Measured by the ranks beforehand: {machine.compute_flops_per_s / 1e9:.1f} GFLOP/s, "
        f"{machine.link_bytes_per_s / 1e6:.1f} MB/s, {1e6 * machine.latency_s:.0f} µs."
    )


if __name__ == "__main__":
    main()

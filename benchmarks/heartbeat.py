"""What does it cost that waits can end? `python benchmarks/heartbeat.py [calls]`

Two gloo ranks on this machine, 4,096 tokens, 8 heads of 64, causal. Calls alternate between waits that look around for
lost ranks and waits that do not; heartbeats go on beside both. Prints the median of the ratios of neighbouring calls.
"""

import os
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from gloo_pair import on_pair

import ringspan as rs
from ringspan.runtime.session import session_of
from ringspan.transports._waiting import GlooMessage
from ringspan.transports.torch_distributed import TorchDistributed


def wait_blindly(_: Any, handle: Any, timeout_s: float | None) -> None:
    message = handle.message
    message.run() if isinstance(message, GlooMessage) else message.wait(timedelta(seconds=timeout_s or 60.0))


def measure(rank: int, same_host: str, num_calls: int) -> list[tuple[float, float]]:
    os.environ["RINGSPAN_SAME_HOST"] = same_host
    layout = rs.zigzag(4096, 2)
    q, k, v = (torch.randn(1, 8, layout.shard_len(rank), 64) for _ in range(3))
    ways = (TorchDistributed._wait_for, wait_blindly)
    pairs = []
    for number in range(num_calls + 3):
        seconds = {}
        for way in ways if number % 2 else reversed(ways):
            TorchDistributed._wait_for = way  # type: ignore[method-assign]
            began = time.perf_counter()
            rs.attention(q, k, v, mask=rs.causal(), layout=layout, algorithm="pass_kv")
            seconds[way] = time.perf_counter() - began
        if number >= 3:
            pairs.append((seconds[ways[0]], seconds[ways[1]]))
    TorchDistributed._wait_for = ways[0]  # type: ignore[method-assign]
    session_of(None).transport.close()
    return pairs


def main() -> None:
    num_calls = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for name, same_host in (("memory to memory", "1"), ("gloo", "0")):
        pairs = on_pair(measure, same_host, num_calls)[0]
        ratio = statistics.median(a / b for a, b in pairs)
        call_ms = 1000 * statistics.median(b for _, b in pairs)
        print(f"{name:16} call {call_ms:6.1f} ms, with looks around x {ratio:.4f}")


if __name__ == "__main__":
    main()

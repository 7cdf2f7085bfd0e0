"""Ranks of this host that are killed, frozen, or fail at a random moment: `python -m support.chaos SECONDS`.

Every survivor must end with an error within its deadline and a second, name the rank that was lost, and exit; and
nothing may be left: no process, and no shared memory.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import ringspan as rs
from ringspan.transports._heartbeat import SILENCE
from ringspan.transports._neighbours import SWITCH
from support.calls import Outcome, arguments, attend
from support.ranks import run_ranks

LIMIT_S, SLACK_S = 2.0, 1.0
KINDS = ("kill", "freeze", "raise", "interrupt")
CALLS = ("pass_kv", "pass_q", "ulysses", "backward", "decode", "prefill")
_FOUND = {"kill": "gone", "freeze": "frozen", "raise": "Boom", "interrupt": "KeyboardInterrupt"}


class Boom(Exception):
    pass


def harm(kind: str, after_s: float, state: dict[str, Any]) -> None:
    """To this process, some time from now."""

    def strike() -> None:
        time.sleep(after_s)
        if kind in ("kill", "freeze"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        state["is_doomed"] = True

    threading.Thread(target=strike, daemon=True).start()


def run(rank: int, world_size: int, what: str, kind: str, victim: int, after_s: float, switch: str) -> Outcome:
    """Calls without end, until one fails."""
    os.environ[SILENCE], os.environ[SWITCH] = str(LIMIT_S), switch
    state: dict[str, Any] = {"is_doomed": False}

    def record(event: Any) -> None:
        if state["is_doomed"]:
            raise Boom if kind == "raise" else KeyboardInterrupt

    good = arguments(rank, world_size) | {"timeout_s": 1800.0}
    attend(good)
    if rank == victim:
        harm(kind, after_s, state)
        good["record"] = record
    began = time.time()
    try:
        while True:
            if what in ("decode", "prefill"):
                _turn(what, state, kind)
            elif what == "backward":
                x = good["q"].clone().requires_grad_()
                attend(good | {"q": x}).sum().backward()
            else:
                attend(good | {"algorithm": what})
    except (Exception, KeyboardInterrupt) as error:
        return Outcome(type(error).__name__, str(error), time.time() - began)


def _turn(what: str, state: dict[str, Any], kind: str) -> None:
    cache = rs.KVCache(num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
    options = {"query": "replicated"} if what == "decode" else {}
    with cache.begin([1 if what == "decode" else 20], **options) as turn:
        for layer in range(2):
            if state["is_doomed"]:
                raise Boom if kind == "raise" else KeyboardInterrupt
            q = torch.zeros(1, 2, turn.num_rows, 8)
            (turn.decode if what == "decode" else turn.prefill)(q, q[:, :1], q[:, :1], layer=layer)


def left_behind() -> set[str]:
    """Files that ranks could leave; their sockets are in no folder and go with them."""
    return set(map(str, Path("/dev/shm").glob("*ringspan*")))


def once(rng: random.Random) -> str:
    """One run; AssertionError if it does not end as it must."""
    kind, what = rng.choice(KINDS), rng.choice(CALLS)
    world_size = rng.choice([2, 3, 4])
    victim = rng.randrange(world_size)
    switch = rng.choice("01")
    frozen = victim if kind == "freeze" else None
    after_s = rng.uniform(0.0, 1.0)
    before = left_behind()
    ends = run_ranks(
        run, world_size, world_size, what, kind, victim, after_s, switch, group_timeout_s=1800.0, frozen=frozen
    )
    for rank, end in enumerate(ends):
        if rank == victim:
            continue
        told = f"{kind} of rank {victim} in {what}, {world_size} ranks, same host {switch}; rank {rank}: {end}"
        assert end.error is None, told
        assert end.exit_code == 0, told
        assert end.value.error == "TransportError", told
        assert re.search(rf"rank {victim}\b", end.value.message), told
        assert _FOUND[kind] in end.value.message, told
        promised_s = LIMIT_S + SLACK_S if kind == "freeze" else 2.0
        assert end.value.seconds - after_s < 3 * promised_s, told
    assert left_behind() <= before
    return f"chaos, {kind}, {what}"


def main(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    totals = Path(os.environ.get("RINGSPAN_FUZZ_TOTALS", ".fuzz/totals.json"))
    counts: Counter[str] = Counter()
    rng = random.Random()
    try:
        while time.monotonic() < deadline:
            counts[once(rng)] += 1
    finally:
        before = Counter(json.loads(totals.read_text())) if totals.exists() else Counter()
        totals.parent.mkdir(parents=True, exist_ok=True)
        totals.write_text(json.dumps(before + counts, indent=2, sort_keys=True))
        for kind, number in sorted(counts.items()):
            sys.stdout.write(f"{number:8} {kind}\n")
        sys.stdout.write(f"{sum(counts.values()):8} in all\n")


if __name__ == "__main__":
    from support import chaos  # ranks are told of its functions by the module's name

    chaos.main(float(sys.argv[1]))

"""Machines that are lost in the middle of long messages, many times: `python -m support.machine_campaign RUNS [FILE]`.

Every fault meets every kind of call RUNS times, each time on another rank. A run is right if every survivor raises a
TransportError that names the lost rank and what became of it. Runs are lines of JSON in FILE, and are counted with
those that are there already; the table gives the seconds from the fault to the error on the last survivor.
"""

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.machines import Job, Machines

WORLD_SIZE = 4
CALLS = ("pass_kv", "pass_q", "ulysses", "double_ring", "decode", "backward")
FOUND = {"kill": "gone", "freeze": "frozen", "cut": "cut off"}
_PATIENCE_S = 45.0


def once(fault: str, call: str, victim: int, folder: Path) -> dict[str, Any]:
    """How the survivors of one run ended."""
    survivors = [rank for rank in range(WORLD_SIZE) if rank != victim]
    run: dict[str, Any] = {"fault": fault, "call": call, "victim": victim}
    with Machines(WORLD_SIZE) as machines, Job(machines, folder, "support.machine_program", call) as job:
        job.await_word("READY", [*range(WORLD_SIZE)], 180)
        time.sleep(1.0)  # into the middle of a message
        began = time.time()
        {"kill": job.kill, "freeze": job.freeze, "cut": machines.cut}[fault](victim)
        try:
            fates = job.fates(survivors, began, _PATIENCE_S)
        except TimeoutError as error:
            return run | {"is_right": False, "seconds": [], "wrong": [f"a survivor waits on: {error}"]}
        expected = re.compile(rf"rank {victim} on \S+ \(process \d+\) is {FOUND[fault]}\b")
        wrong = [
            f"rank {rank}: {fate.error}: {fate.message}"
            for rank, fate in fates.items()
            if fate.error != "TransportError" or not expected.search(fate.message)
        ]
        exits = job.exit_codes(survivors, _PATIENCE_S)
        wrong += [f"exit codes {exits}"] if any(exits) else []
        return run | {"is_right": not wrong, "seconds": [fate.seconds for fate in fates.values()], "wrong": wrong}


def rows(runs: list[dict[str, Any]]) -> Iterator[str]:
    """The table, in Markdown."""
    yield "| fault | call | right | seconds to the last survivor's error: median | longest |"
    yield "|---|---|---|---|---|"
    for fault in FOUND:
        for call in CALLS:
            these = [run for run in runs if (run["fault"], run["call"]) == (fault, call)]
            last = [max(run["seconds"]) for run in these if run["seconds"]]
            num_right = sum(run["is_right"] for run in these)
            times = f"{statistics.median(last):.2f} | {max(last):.2f}" if last else "- | -"
            yield f"| {fault} | {call} | {num_right} of {len(these)} | {times} |"


def main(num_runs: int, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    for number in range(num_runs):
        for offset, fault in enumerate(FOUND):
            for call in CALLS:
                with tempfile.TemporaryDirectory() as folder:
                    run = once(fault, call, (number + offset) % WORLD_SIZE, Path(folder))
                with file.open("a") as out:
                    out.write(json.dumps(run) + "\n")
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    sys.stdout.write("\n".join(rows(runs)) + "\n")
    for run in runs:
        if not run["is_right"]:
            sys.stdout.write(f"\n{run['fault']} of rank {run['victim']} in {run['call']}:\n" + "\n".join(run["wrong"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else ".fuzz/machines.jsonl"))

"""How fast does `ringspan serve` answer, against plain transformers in one process with one thread?

    python benchmarks/serve.py ./SmolLM2-135M-Instruct --only cold --write
    python benchmarks/serve.py ./SmolLM2-135M-Instruct --only turns --write
    python benchmarks/serve.py ./SmolLM2-135M-Instruct --only decode --write
    python benchmarks/serve.py ./SmolLM2-135M-Instruct --only batch --write

Each part is interleaved: every round measures all that is compared, one after the other. `decode` compares with two
independent processes that run at the same time, because two ranks on one machine share its memory bandwidth as well.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from results import describe_machine, format_table, write_section

WORDS = ("the", "old", "house", "of", "stone", "and", "wood", "stands", "near", "a", "river", "where", "people", "meet")


class ServedModel:
    """`ringspan serve` on a free port."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.name = folder.resolve().name
        self._log: list[str] = []
        command = [sys.executable, "-m", "ringspan", "serve", str(folder), "--port", "0", "--no-verify"]
        self._process = subprocess.Popen([*command, "--ranks", str(ranks)], stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, daemon=True).start()
        while not any("ready:" in line for line in self._log):
            if self._process.poll() is not None:
                sys.exit("\n".join(self._log))
            time.sleep(0.1)
        self._port = int(re.search(r"listening on http://\S+:(\d+)", "\n".join(self._log))[1])

    def _read(self) -> None:
        for line in self._process.stderr:
            self._log.append(line)

    def cpu_s(self) -> float:
        """CPU seconds that the busiest rank has used so far."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = stat.read_text().rpartition(")")[2].split()
                if int(words[1]) == self._process.pid:
                    found.append((int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK"))
        return max(found)

    def ask(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """Seconds to the first token and per token, the text, the prompt's tokens and those reused."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        body = {"model": self.name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        start, times, text, usage = time.perf_counter(), [], "", {}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["text"]:
                times.append(time.perf_counter() - start)
                text += chunk["choices"][0]["text"]
        connection.close()
        times = times or [time.perf_counter() - start]  # a model may end its answer before any text
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return {
            "first_s": times[0],
            "token_s": statistics.median(gaps) if gaps else None,
            "text": text,
            "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"],
            "generated": usage["completion_tokens"],
        }

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


class PlainModel:
    """transformers in a process of its own, one thread, pinned to one core as a rank is."""

    def __init__(self, folder: Path, core: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder), "--plain", str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._process.stdout.readline()

    def start(self, what: str, count: int) -> None:
        self._process.stdin.write(f"{what} {count}\n".encode())
        self._process.stdin.flush()

    def result(self) -> tuple[float, float]:
        """Seconds that passed, and seconds of CPU."""
        seconds, cpu_s = self._process.stdout.readline().split()
        return float(seconds), float(cpu_s)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(60)


def plain(folder: Path, core: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [cores[core % len(cores)]])
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()[0], int(line.split()[1])
        cache, ids = DynamicCache(), torch.randint(100, 20000, (1, count))
        start, cpu = time.perf_counter(), time.process_time()
        model(ids, past_key_values=cache, logits_to_keep=1)
        times, cpus = [time.perf_counter() - start], [time.process_time() - cpu]
        for _ in range(24 if what == "decode" else 0):
            start, cpu = time.perf_counter(), time.process_time()
            model(ids[:, :1], past_key_values=cache, logits_to_keep=1)
            times.append(time.perf_counter() - start)
            cpus.append(time.process_time() - cpu)
        print(statistics.median(times[1:] or times), statistics.mean(cpus[1:] or cpus), flush=True)


def prompt_of(tokenizer: Any, count: int, rng: random.Random) -> str:
    """About `count` tokens that begin as no other prompt does."""
    words = [str(rng.randrange(10**9))]
    while len(tokenizer.encode(" ".join(words))) < count - 3:
        words += [rng.choice(WORDS) for _ in range(max(1, (count - len(words)) // 8))]
    return " ".join(words)


def cold(folder: Path, tokenizer: Any, rounds: int, rng: random.Random) -> Iterator[dict[str, float]]:
    served, alone = ServedModel(folder, 2), PlainModel(folder, 0)
    for _ in range(rounds):
        before_s = served.cpu_s()
        answer = served.ask(prompt_of(tokenizer, 4096, rng), 1)
        rank_s = served.cpu_s() - before_s
        alone.start("prefill", answer["prompt"])
        one_s, one_cpu_s = alone.result()
        yield {
            "one process, s": one_s,
            "2 ranks, s": answer["first_s"],
            "ratio": one_s / answer["first_s"],
            "one process, CPU s": one_cpu_s,
            "each rank, CPU s": rank_s,
            "ratio of CPU": one_cpu_s / rank_s,
        }
    served.close()
    alone.close()


def turns(folder: Path, tokenizer: Any, rounds: int, rng: random.Random) -> Iterator[dict[str, float]]:
    served = ServedModel(folder, 2)
    for _ in range(rounds):
        prompt = prompt_of(tokenizer, 1024, rng)
        first = served.ask(prompt, 8)
        second = served.ask(f"{prompt}{first['text']} And what do people do there in winter?", 8)
        yield {
            "cold, s": first["first_s"],
            "turn 2, s": second["first_s"],
            "share": second["first_s"] / first["first_s"],
            "tokens cached": second["cached"],
            "tokens computed": second["prompt"] - second["cached"],
        }
    served.close()


def decode(folder: Path, tokenizer: Any, rounds: int, rng: random.Random) -> Iterator[dict[str, float]]:
    served, both = ServedModel(folder, 2), [PlainModel(folder, 0), PlainModel(folder, 1)]
    for _ in range(rounds):
        prompt = prompt_of(tokenizer, 1000, rng)
        served.ask(prompt, 1)
        before_s = served.cpu_s()
        answer = served.ask(prompt, 25)
        rank_s = (served.cpu_s() - before_s) / answer["generated"]
        for each in both:
            each.start("decode", 1000)
        alone_s, alone_cpu_s = map(statistics.mean, zip(*(each.result() for each in both), strict=True))
        yield {
            "two processes, ms": 1e3 * alone_s,
            "2 ranks, ms": 1e3 * answer["token_s"],
            "ratio": answer["token_s"] / alone_s,
            "two processes, CPU ms": 1e3 * alone_cpu_s,
            "each rank, CPU ms": 1e3 * rank_s,
            "ratio of CPU": rank_s / alone_cpu_s,
        }
    served.close()
    for each in both:
        each.close()


def batch(folder: Path, tokenizer: Any, rounds: int, rng: random.Random) -> Iterator[dict[str, float]]:
    served = ServedModel(folder, 2)
    for _ in range(rounds):
        rates = []
        for at_once in (False, True):
            prompts = [prompt_of(tokenizer, 32, rng) for _ in range(8)]
            for prompt in prompts:
                served.ask(prompt, 1)  # so that decode is measured, not prefill
            answers: list[dict[str, Any]] = []
            work = [threading.Thread(target=lambda p=p, to=answers: to.append(served.ask(p, 24))) for p in prompts]
            start = time.perf_counter()
            for thread in work:
                thread.start()
                if not at_once:
                    thread.join()
            for thread in work:
                thread.join()
            rates.append(sum(answer["generated"] for answer in answers) / (time.perf_counter() - start))
        yield {"one by one, tokens/s": rates[0], "8 at once, tokens/s": rates[1], "ratio": rates[1] / rates[0]}
    served.close()


class Part(NamedTuple):
    """A part of the benchmark: its section in RESULTS.md, and what is measured."""

    measure: Callable[..., Iterator[dict[str, float]]]
    title: str
    about: str


PARTS = {
    "cold": Part(
        cold,
        "ringspan serve: first token of a cold prompt of 4,096 tokens",
        "Seconds to the first token, over HTTP from 2 ranks with one thread each, and of a forward pass of the same "
        "length in one process with one thread. Other work on the machine changes the CPU time less.",
    ),
    "turns": Part(
        turns,
        "ringspan serve: first token of a second turn",
        "Seconds to the first token from 2 ranks, of a cold prompt and of one that continues it.",
    ),
    "decode": Part(
        decode,
        "ringspan serve: time per token after 1,000 cached tokens",
        "Time per token: the mean of two independent processes of transformers at once, one thread and core each, "
        "and over HTTP from 2 ranks that share one conversation. Other work on the machine changes the CPU time less.",
    ),
    "batch": Part(
        batch,
        "ringspan serve: 8 conversations at once",
        "Tokens per second of 8 answers of 24 tokens each from 2 ranks; the prompts are cached.",
    ),
}


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def describe(part: Part, command: str, load: float, found: list[dict[str, float]]) -> str:
    """The section: command, machine and table."""
    import torch
    import transformers

    rows = [
        [name, *(_three_digits(pick(each[key] for each in found)) for key in found[0])]
        for name, pick in (("median", statistics.median), ("least", min), ("most", max))
    ]
    machine = f"{describe_machine()}, torch {torch.__version__}, transformers {transformers.__version__}"
    about = f"{part.about} {len(found)} rounds, each with all of them; the load average was {load:.1f} before."
    return f"`{command}`\n\n{machine}.\n\n{about}\n\n{format_table(['', *found[0]], rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain is not None:
        plain(args.model, args.plain)
        return
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(args.model), random.Random()
    for name in args.only or PARTS:
        load = os.getloadavg()[0]
        found = []
        for one_round in PARTS[name].measure(args.model, tokenizer, args.rounds, rng):
            print(name, {what: round(value, 3) for what, value in one_round.items()}, file=sys.stderr, flush=True)
            found.append(one_round)
        command = f"python benchmarks/serve.py {args.model.name} --only {name} --rounds {args.rounds}"
        text = describe(PARTS[name], command, load, found)
        print(text, end="\n\n", flush=True)
        if args.write:
            write_section(f"serve {name}", PARTS[name].title, text)


if __name__ == "__main__":
    main()

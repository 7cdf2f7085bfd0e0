"""How soon do the interactive pages open, and do they stay fluid?

Three pages are written by the command line: the lesson, a plan for 128 devices and a trace of 20,000 slices with a
predicted one of as many laid over it. Chromium opens each cold, in a new process. "First paint" is the browser's own
entry; "whole" is when every section is drawn. Then every frame moves a slider or points at another bar, for two
seconds; frames that took place are counted. A display shows 60 frames per second at most. Needs playwright and
Debian's chromium.

    python benchmarks/page_speed.py [--rounds 5] [--against CHECKOUT] [--write]
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright
from results import describe_machine, format_table, write_section

ROOT = Path(__file__).parents[1]
RANKS, SLICES = 8, 20_000
PLAN = "plan --model llama-3.1-405b --devices 16x8xh100 --tokens 1M --weights fp8"
PAGES = {
    "the lesson": "page --output {page}",
    "a plan of 128 devices": PLAN + " --html {page}",
    "a trace of 20,000 slices": "page --trace {trace} --predicted {trace} --output {page}",
}
PAINT = """() => ({
  paint: performance.getEntriesByName('first-contentful-paint')[0].startTime,
  whole: performance.now(),
})"""
# Frames in which something was done: `act` gets the number of the frame.
FRAMES = """([selector, kind, seconds]) => new Promise((resolve) => {
  const target = document.querySelector(selector);
  target.scrollIntoView({ block: 'center' });
  const box = target.getBoundingClientRect();
  const place = (share) => ({ clientX: box.left + 70 + share * (box.width - 80), clientY: box.top + share * 7919 % (box.height - 30), bubbles: true });
  const act = {
    hover: (i) => target.dispatchEvent(new PointerEvent('pointermove', place((i * 0.0377) % 1))),
    slide: (i) => {
      const [low, high] = [Number(target.min), Number(target.max)];
      target.value = low + (i * Math.max(1, Math.round((high - low) * 0.037))) % (high - low + 1);
      target.dispatchEvent(new Event('input', { bubbles: true }));
    },
  }[kind];
  const times = [];
  let [first, before] = [0, 0];
  const frame = (now) => {
    if (!first) first = now;
    else times.push(now - before);
    before = now;
    if (now - first > 1000 * seconds) {
      times.sort((a, b) => a - b);
      resolve([1000 * times.length / (now - first), times[Math.floor(0.95 * times.length)]]);
      return;
    }
    act(times.length);
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
})"""  # noqa: E501
ACTS = {
    "the lesson": (
        ("stepping", ".player input[type=range]", "slide"),
        ("choosing a length", "section[data-id=time] input[type=range]", "slide"),
        ("pointing at bars", "section[data-id=time] canvas", "hover"),
    ),
    "a plan of 128 devices": (("pointing at bars", "section[data-id=time] canvas", "hover"),),
    "a trace of 20,000 slices": (
        ("pointing at bars", "section[data-id=time] canvas", "hover"),
        ("zooming", ".zoom input[aria-label=Zoom]", "slide"),
        ("moving along", ".zoom input[aria-label=Position]", "slide"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    sources = {"this": ROOT} | ({"other": args.against} if args.against else {})
    with tempfile.TemporaryDirectory() as folder:
        text = report(sources, Path(folder), args.rounds)
    print(text)
    if args.write:
        write_section("page_speed", "How soon pages open and whether they stay fluid", text)


def report(sources: dict[str, Path], folder: Path, rounds: int) -> str:
    files = {(who, name): write_page(source, folder, name, who) for who, source in sources.items() for name in PAGES}
    opened: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in files}
    frames: dict[tuple[str, str, str], list[list[float]]] = {}
    for _ in range(rounds):
        for (who, name), file in files.items():
            entries, found = measure(file, name)
            opened[who, name].append(entries)
            for what, rate in found.items():
                frames.setdefault((who, name, what), []).append(rate)
    rows = [
        [
            name,
            who,
            f"{files[who, name].stat().st_size / 1000:,.0f}",
            *(f"{median(one[key] for one in entries):,.0f}" for key in ("paint", "whole")),
        ]
        for (who, name), entries in opened.items()
    ]
    moved = [
        [name, who, what, f"{median(rate for rate, _ in rates):.0f}", f"{median(slow for _, slow in rates):.0f}"]
        for (who, name, what), rates in frames.items()
    ]
    load = os.getloadavg()[0]
    return "\n\n".join(
        [
            f"`python benchmarks/page_speed.py --rounds {rounds} --write`\n\n"
            f"{describe_machine()}. Medians of {rounds} rounds; load of the machine at the end: {load:.1f}.",
            format_table(["page", "code", "kB", "first paint, ms", "whole, ms"], rows),
            format_table(["page", "code", "in every frame", "frames per second", "95 % of frames within, ms"], moved),
        ]
    )


def write_page(source: Path, folder: Path, name: str, who: str) -> Path:
    page, trace = folder / f"{who} {name}.html", folder / "trace.json"
    trace.write_text(json.dumps(build_trace()))
    words = [word.format(page=page, trace=trace) for word in PAGES[name].split()]
    environment = os.environ | {"PYTHONPATH": str(source / "src")}
    subprocess.run([sys.executable, "-m", "ringspan", *words], check=True, capture_output=True, env=environment)
    return page


def build_trace() -> dict[str, Any]:
    """Slices without a gap on every rank, of lengths that vary."""
    ends = [0.0] * RANKS
    events = []
    for i in range(SLICES):
        rank, length = i % RANKS, 20.0 + (i * 7919) % 100
        name = f"wait for kv{i % 7} from {(rank + 1) % RANKS}" if i % 3 == 0 else f"q{rank}×kv{i % 7}"
        events.append({"ph": "X", "name": name, "pid": rank, "ts": ends[rank], "dur": length, "args": {"step": i}})
        ends[rank] += length
    return {"traceEvents": events}


def measure(file: Path, name: str) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Milliseconds to the first paint and to the whole page, and by action frames per second and their length."""
    with sync_playwright() as driver:
        browser = start(driver)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]")
        entries = page.evaluate(PAINT)
        rates = {what: page.evaluate(FRAMES, [selector, kind, 2]) for what, selector, kind in ACTS[name]}
        browser.close()
    return entries, rates


def start(driver: Any) -> Browser:
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("no chromium on this machine; apt-get install chromium")
    browser: Browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
    return browser


def median(values: Any) -> float:
    return statistics.median(list(values))


if __name__ == "__main__":
    main()

"""`ringspan bench … --html`: the page of a measurement shows the numbers of its JSON report."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_cli import run

from ringspan.bench.result import PARTS, PHASES, WAYS
from ringspan.planner.catalog import load_device
from ringspan.planner.cost import Shard, tile_s
from ringspan.planner.software import RINGSPAN
from support.page import payload_of

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SMALL = ["--ranks", "2", "--transport", "threads", "--tokens", "256", "--head-dim", "16"]


def measure(command: str, tmp_path: Path, *words: str) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """The JSON report, the sections of the page by id, and their order."""
    page = tmp_path / "page.html"
    done = run(*words, "--json", "--html", str(page), command=command)
    assert done.returncode == 0, done.stderr
    assert f"Wrote {page}" in done.stderr
    payload = payload_of(page.read_text(encoding="utf-8"))
    return json.loads(done.stdout), {one["id"]: one for one in payload["sections"]}, payload["sections"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The file of a calibrated machine, the report and the sections of its page."""
    folder = tmp_path_factory.mktemp("machine")
    file = folder / "mine.toml"
    report, sections, _ = measure("calibrate", folder, str(file), *SMALL, "--batch", "1")
    return file, report, sections


def test_calibrate_draws_its_points_beside_the_fitted_curves(
    machine: tuple[Path, dict[str, Any], dict[str, Any]],
) -> None:
    file, report, sections = machine
    tiles = sections["curves"]["charts"][0]
    device, shard = load_device(str(file)), Shard(1, 1, 1, 16, 16, 32, 4, "bf16", RINGSPAN)
    assert {line["name"] for line in tiles["lines"]} >= {"full tile", "causal tile", "causal backward tile"}
    for dots, line in zip(tiles["dots"], tiles["lines"], strict=True):
        kind = dots["name"].removesuffix(" tile")
        measured = [[n, seconds] for one, n, seconds in report["tiles"] if one == kind]
        assert [point[:2] for point in dots["points"]] == measured
        assert [point[0] for point in line["points"]] == [n for n, _ in measured]
        form = {"is_causal": "causal" in kind, "is_backward": "backward" in kind}
        assert [point[1] for point in line["points"]] == [tile_s(device, shard, n, n, **form) for n, _ in measured]


def test_attention_lays_the_measured_call_over_the_predicted_one(
    machine: tuple[Path, dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    report, sections, _ = measure("attention", tmp_path, *SMALL, "--predict", str(machine[0]), "--repeats", "2")
    measured, predicted = sections["time"]["charts"]
    tiles = {(rank, f"q{rank}×kv{owner}") for rank in (0, 1) for owner in (0, 1)}
    for chart in (measured, predicted):
        assert {(lane, label) for lane, kind, _, _, label, _ in chart["bars"] if kind == "compute"} >= tiles
        assert sum(kind == "message" for _, kind, *_ in chart["bars"]) == 2
    assert measured["overlay"] == [bar for bar in predicted["bars"] if bar[1] == "compute"]
    assert max(bar[3] for bar in predicted["bars"]) == pytest.approx(report["predicted_s"], rel=1e-4)
    assert [[row[0]["text"], row[1]["value"]] for row in sections["compared"]["rows"]] == [
        [f"rank {rank}", step] for rank in (0, 1) for step in (0, 1)
    ]
    for row in sections["compared"]["rows"]:
        assert row[4]["value"] == pytest.approx(row[2]["value"] / row[3]["value"])
    assert [row["values"] for row in sections["breakdown"]["rows"]] == [
        list(rank["breakdown"].values()) for rank in report["by_rank"]
    ]
    assert [row[1]["value"] for row in sections["bytes"]["rows"]] == [rank["sent_bytes"] for rank in report["by_rank"]]
    assert [row[1]["value"] for row in sections["times"]["rows"]] == [
        report[key]["median_s"] for key in ("one_device", "ranks", "ideal")
    ]


def test_attention_on_processes_draws_memory(tmp_path: Path) -> None:
    words = ("--ranks", "2", "--tokens", "256", "--head-dim", "16", "--repeats", "1")
    report, sections, order = measure("attention", tmp_path, *words)
    assert [row["values"] for row in sections["memory"]["rows"]] == [
        [rank["memory"]["input_bytes"], rank["memory"]["above_inputs_bytes"]] for rank in report["by_rank"]
    ]
    assert "compared" not in [one["id"] for one in order]


@pytest.mark.parametrize(("command", "names"), [("prefill", WAYS), ("decode", PARTS)])
def test_times_against_a_cache_are_curves_with_bands(command: str, names: tuple[str, ...], tmp_path: Path) -> None:
    report, sections, _ = measure(command, tmp_path, *SMALL, "--repeats", "2")
    lines = [line["points"] for chart in sections["curves"]["charts"] for line in chart["lines"]]
    shown = {tuple(point[1:]) for line in lines for point in line}
    timings = [point["times"][name] for point in report[command] for name in names]
    assert shown == {(one["median_s"], one["fastest_s"], one["slowest_s"]) for one in timings}
    assert len(sections["points"]["rows"]) == len(report[command])


def test_a_model_has_its_times_parts_and_memory(tmp_path: Path) -> None:
    words = ("--layers", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--mlp", "40", "--tokens", "99")
    report, sections, _ = measure("model", tmp_path, *words, "--ranks", "2", "--transport", "threads", "--repeats", "1")
    for phase in PHASES:
        parts = report["phases"][phase]["by_rank"]
        for row, part in zip(sections[f"parts-{phase}"]["rows"], parts, strict=True):
            assert sum(row["values"]) == pytest.approx(sum(part.values()))
    memory = [report["one_process_memory"], *report["memory_by_rank"]]
    assert [row["values"][0] for row in sections["memory-prefill"]["rows"]] == [one["weights"] for one in memory]
    for row, one in zip(sections["memory-train"]["rows"], memory, strict=True):
        assert sum(row["values"]) == one["weights"] + one["train_peak"]
    assert [row[3]["value"] for row in sections["predicted"]["rows"]] == [it["seconds"] for it in report["predicted"]]


def test_selfcheck_lists_every_path(tmp_path: Path) -> None:
    report, sections, _ = measure("selfcheck", tmp_path)
    assert [[cell["text"] for cell in row[:2]] for row in sections["paths"]["rows"]] == [
        [it["path"], it["status"]] for it in report["paths"]
    ]

"""One file with one record is an algorithm everywhere: simulator, validation, plan, timeline and command line."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ringspan as rs
from ringspan.algorithms import ALGORITHMS, Algorithm, build_schedule
from ringspan.cli.main import main
from ringspan.planner.catalog import load_device, load_model, parse_devices
from ringspan.planner.cost import Shard
from ringspan.planner.plan import Request, Setup, build_plan, count_memory, timeline_of
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import Ring, Sequence, attention_timeline, real_timeline
from ringspan.schedule import Schedule, Visible, validate, visible_blocks
from support import oracle
from support.cases import LAYOUTS, MASKS, WORLD_SIZES, make_arrays, make_mask
from support.toy import FOLDER, load_record, registered

DEVICE = load_device("h100")
SHARD = Shard(1, 8, 2, 128, 128, 512, 2, "bf16", RINGSPAN)
SEQ_LEN = 37


@pytest.fixture
def toy() -> Iterator[Algorithm]:
    with registered() as record:
        yield record


def invoke(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_simulation_and_validation(toy: Algorithm, subtests: pytest.Subtests, mask: str, world_size: int) -> None:
    described = make_mask(MASKS[mask])
    for name, make_layout in LAYOUTS.items():
        with subtests.test(layout=name):
            layout = make_layout(SEQ_LEN, world_size, described)
            q, k, v, dout = make_arrays(name, rs.Heads(8, 2), layout.num_positions, layout.num_positions)
            allowed = oracle.dense_mask(MASKS[mask], layout.all_positions(), layout.all_positions())
            out, lse = oracle.dense_attention(q, k, v, allowed)
            gradients = oracle.dense_gradients(q, k, v, allowed, dout)
            simulation = rs.simulate_attention(q, k, v, mask=described, layout=layout, algorithm=toy.name)
            np.testing.assert_allclose(simulation.out, out, atol=1e-12)
            np.testing.assert_allclose(simulation.lse, lse, atol=1e-12)
            visible = visible_blocks(described, layout)
            for side in ("kv", "q"):
                backward = build_schedule(toy.name, visible, backward=side)
                validate(backward, visible)
                found = simulation.gradients(dout, schedule=backward)
                for got, expected in zip((found.dq, found.dk, found.dv), gradients, strict=True):
                    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_two_blocks_travel_at_a_time(toy: Algorithm) -> None:
    schedule = build_schedule(toy.name, Visible.of(np.ones((8, 9))))
    assert schedule.num_steps == 5
    assert {len([one for one in step.transfers if one.src == 0]) for step in list(schedule.steps)[1:3]} == {2}


def test_the_timeline_is_that_of_the_real_schedule(subtests: pytest.Subtests, toy: Algorithm) -> None:
    """As much compute as in pass-KV, whose schedule has the same tiles, but for the host's time per step."""
    ring = Ring(8, 4)
    for layout in ("zigzag", "striped", "contiguous"):
        with subtests.test(layout=layout):
            for cached in (0, 8192):
                sequence = Sequence(8 * 4096, cached, True, layout)
                for is_backward in (False, True):
                    ours = attention_timeline(toy.name, ring, sequence, SHARD, DEVICE, is_backward=is_backward)
                    other = real_timeline(ALGORITHMS["pass_kv"], ring, sequence, SHARD, DEVICE, is_backward=is_backward)
                    assert ours.compute_s.sum() == pytest.approx(other.compute_s.sum(), rel=5e-3)
                    assert ours.makespan_s >= ours.compute_s.max()


def test_a_plan_has_its_row(toy: Algorithm) -> None:
    request = Request(load_model("llama-3.1-8b"), parse_devices("8xh100", None, None), "prefill", 2**17)
    options = [option for option in build_plan(request).options if option.setup.algorithm == toy.name]
    assert {option.setup.layout for option in options} == {"zigzag", "striped", "contiguous"}
    setup = Setup(toy.name, "zigzag", 1, 8)
    assert timeline_of(request, setup).makespan_s > 0
    ring = Setup("pass_kv", "zigzag", 1, 8)
    assert count_memory(request, setup).attention_buffers > count_memory(request, ring).attention_buffers


def test_a_training_step_is_planned(toy: Algorithm) -> None:
    request = Request(load_model("llama-3.1-8b"), parse_devices("8xh100", None, None), "train", 2**15, tp=1)
    setups = {option.setup.algorithm for option in build_plan(request).options}
    assert toy.name in setups


def test_beyond_128_ranks_it_is_not_priced(toy: Algorithm) -> None:
    request = Request(load_model("llama-3.1-8b"), parse_devices("32x8xh100", None, None), "prefill", 2**20, tp=1)
    plan = build_plan(request)
    assert toy.name not in {option.setup.algorithm for option in plan.options}
    (reason,) = (illegal.reason for illegal in plan.illegal if illegal.what == "pair-ring over 256 ranks")
    assert "not priced" in reason
    assert "128 ranks" in reason
    with pytest.raises(rs.UnsupportedError, match=r"not priced.*128 ranks"):
        attention_timeline(toy.name, Ring(256, 8), Sequence(2**20, 0, True, "zigzag"), SHARD, DEVICE)


def test_a_latent_model_is_not_priced(toy: Algorithm) -> None:
    shard = dataclasses.replace(SHARD, num_kv_heads=8, kv_elements=576)
    with pytest.raises(rs.UnsupportedError, match=r"not priced.*latent"):
        attention_timeline(toy.name, Ring(8, 8), Sequence(2**16, 0, True, "zigzag"), shard, DEVICE)


def test_the_command_line_runs_it(toy: Algorithm, tmp_path: Path) -> None:
    shown = " ".join(invoke("simulate", "--algorithm", "pair-ring").split())
    assert "pair ring: keys and values travel round the ring two blocks at a time" in shown
    assert "✓ All" in shown
    lesson = json.loads(invoke("simulate", "--algorithm", "pair_ring", "--json"))
    assert [run["algorithm"] for run in lesson["prefill"]["runs"]] == ["pair_ring"]
    assert lesson["is_verified"]
    args = ("plan", "--model", "llama-3.1-8b", "--devices", "4xh100", "--tokens", "128K", "--tp", "1")
    assert "pair-ring" in invoke(*args)
    assert "pair_ring" in {option["setup"]["algorithm"] for option in json.loads(invoke(*args, "--json"))["options"]}


def test_help_and_errors_name_it(toy: Algorithm) -> None:
    assert "pair-ring" in invoke("simulate", "--help")
    assert "pair-ring" in invoke("simulate", "--algorithm", "triple", code=2)
    with pytest.raises(rs.UnsupportedError, match=r"no such algorithm.*pair_ring"):
        rs.simulate_attention(*np.ones((3, 8, 4)), mask=rs.full(), layout=rs.zigzag(8, 2), algorithm="triple")
    with pytest.raises(rs.UnsupportedError, match="pair_ring takes no direction"):
        build_schedule(toy.name, Visible.of(np.ones((2, 3))), direction="reverse")


def test_what_was_registered_can_be_taken_back() -> None:
    with registered() as record:
        assert ALGORITHMS[record.name] is record
    assert record.name not in ALGORITHMS
    assert "pair-ring" not in invoke("simulate", "--help")
    with pytest.raises(rs.UnsupportedError, match="no such algorithm"):
        build_schedule(record.name, Visible.of(np.ones((2, 3))))
    with pytest.raises(rs.UnsupportedError, match="no such algorithm"):
        rs.algorithms.unregister(record.name)
    with pytest.raises(rs.UnsupportedError, match="stays"):
        rs.algorithms.unregister("pass_kv")


def _without_backward(visible: Visible) -> Schedule:
    raise AssertionError(visible)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "taken": ({"name": "pass_kv"}, "name='pass_kv': the name is taken"),
    "reserved": ({"name": "auto"}, "name='auto': the name is taken"),
    "spelling": ({"name": "Pair-Ring"}, "lower-case letters"),
    "no string": ({"name": 7}, "lower-case letters"),
    "no label": ({"label": " "}, "label=' '"),
    "no idea": ({"idea": ""}, "idea=''"),
    "no builder": ({"build": "ring"}, "build='ring': must be callable"),
    "no buffers": ({"buffer_bytes": 3}, "buffer_bytes=3"),
    "no loads": ({"loads": ()}, "loads="),
    "option": ({"options": frozenset({"turns"})}, "options=.*direction, heads, mesh, route"),
    "set": ({"options": {"mesh"}}, "frozenset"),
    "lacks option": ({"options": frozenset({"mesh"})}, "no parameter mesh"),
    "lacks backward": ({"build": _without_backward}, "no parameter backward"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_record_that_would_fail_later_is_refused(case: str) -> None:
    changes, message = REFUSED[case]
    record = dataclasses.replace(load_record(), **{"name": "other_ring", **changes})
    before = dict(ALGORITHMS)
    with pytest.raises(rs.UnsupportedError, match=message):
        rs.algorithms.register(record)
    assert dict(ALGORITHMS) == before


def test_only_a_record_is_registered(toy: Algorithm) -> None:
    with pytest.raises(rs.UnsupportedError, match=r"expected a ringspan.algorithms.Algorithm"):
        rs.algorithms.register(toy.build)  # type: ignore[arg-type]
    with pytest.raises(rs.UnsupportedError, match="taken"):
        rs.algorithms.register(toy)


def test_a_name_stays_with_its_record() -> None:
    """Prepared programs are cached by name: another record under it would run the old one's."""
    with registered() as record:
        pass
    with pytest.raises(rs.UnsupportedError, match="stood for another record"):
        rs.algorithms.register(dataclasses.replace(record, label="other"))


def test_a_builder_that_returns_no_schedule_is_refused() -> None:
    def build(visible: Visible, *, backward: str | None = None) -> None:
        return None

    rs.algorithms.register(dataclasses.replace(load_record(), name="empty_ring", build=build))
    try:
        with pytest.raises(rs.UnsupportedError, match=r"empty_ring.*NoneType; return a Schedule"):
            build_schedule("empty_ring", Visible.of(np.ones((2, 3))))
    finally:
        rs.algorithms.unregister("empty_ring")


def install(folder: Path, value: str) -> dict[str, str]:
    """What `pip install` leaves of the example, in a folder of its own, and the environment that finds it."""
    (folder / "pair_ring.py").write_text((FOLDER / "pair_ring.py").read_text())
    info = folder / "pair_ring-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pair-ring\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[ringspan.algorithms]\npair_ring = {value}\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def run(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringspan", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_line_finds_an_installed_one(tmp_path: Path) -> None:
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    environment = install(tmp_path, project["entry-points"]["ringspan.algorithms"]["pair_ring"])
    shown = run(environment, "simulate", "--algorithm", "pair-ring", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["parameters"]["algorithms"] == ["pair_ring"]
    assert "pair-ring" in run(environment, "simulate", "--help").stdout


@pytest.mark.parametrize("value", ["pair_ring:NO_SUCH_RECORD", "no_such_module:RECORD", "pair_ring:build_pair_ring"])
def test_a_broken_entry_point_is_one_line(tmp_path: Path, value: str) -> None:
    failed = run(install(tmp_path, value), "simulate")
    assert failed.returncode == 2
    (line,) = failed.stderr.splitlines()
    assert line.startswith(f"Error: entry point {value} of group ringspan.algorithms")
    assert "uninstall" in line

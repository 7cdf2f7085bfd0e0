"""`ringspan bench attention` and `selfcheck`: what they measure, that it is true and what they refuse."""

import dataclasses
import importlib.util
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import time
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ringspan.bench import result as results
from ringspan.bench.breakdown import judge
from ringspan.bench.launch import Done, Ended, Launched, Progress, RanksFailed, _collect, find_launcher
from ringspan.bench.settings import Job
from ringspan.cli import main
from ringspan.cli.bench import options as bench_options

PROGRAM = [
    sys.executable,
    "-c",
    "import atexit, sys\n"
    "from ringspan.cli import main\n"
    "atexit.register(lambda: 'torch' in sys.modules and print('the parent has loaded torch', file=sys.stderr))\n"
    "main()",
]
LONG = ["--ranks", "2", "--tokens", "64K"]  # still busy when it is interrupted
ENDS_WITHIN_S = 30.0  # on a busy machine; a few seconds on an idle one

pytestmark = pytest.mark.timeout(120)


def environment(**more: str) -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
    return {name: value for name, value in os.environ.items() if name not in launchers} | {"COLUMNS": "100", **more}


def run(
    *args: str, command: str = "attention", before: tuple[str, ...] = (), timeout_s: float = 100.0
) -> "subprocess.CompletedProcess[str]":
    arguments = [*before, *PROGRAM, "bench", command, *args]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment())


def invoke(*args: str, command: str = "attention") -> Result:
    """In this process; for what needs no ranks."""
    return CliRunner().invoke(main, ["bench", command, *args], env={"COLUMNS": "100", "NO_COLOR": "1"})


# What it measures


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON report of a small run on two gloo ranks, and its trace."""
    trace = tmp_path_factory.mktemp("bench") / "trace.json"
    options = "--ranks 2 --tokens 512 --batch 2 --heads 4 --kv-heads 2 --head-dim 16 --repeats 3 --seed 7"
    done = run(*shlex.split(options), "--json", "--trace", str(trace))
    assert (done.returncode, done.stderr) == (0, f"Wrote {trace}\n")
    return json.loads(done.stdout), json.loads(trace.read_text())


def test_json_says_what_was_run_and_that_it_is_right(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report, _ = measured
    expected = {
        "world_size": 2,
        "seq_len": 512,
        "batch": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "mask": "causal()",
        "layout": "zigzag",
        "algorithm": "pass_kv",
        "kernel": "sdpa_cpu",
        "transport": "gloo",
        "repeats": 3,
        "seed": 7,
    }
    assert expected.items() <= report["parameters"].items()
    assert report["is_verified"] is True
    assert 0 < report["check"]["max_error"] <= report["check"]["tolerance"] == 1e-5
    assert report["check"]["reference"] == report["one_device_method"] == "scaled_dot_product_attention"


def test_times_ratios_and_parts_are_consistent(measured: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report, _ = measured
    for timing in (report["one_device"], report["ideal"], report["ranks"]):
        assert len(timing["runs_s"]) == 3
        assert timing["median_s"] == sorted(timing["runs_s"])[1]
        assert min(timing["runs_s"]) > 0
    ratios = [a / b for a, b in zip(report["one_device"]["runs_s"], report["ranks"]["runs_s"], strict=True)]
    assert report["speedup"]["median"] == pytest.approx(sorted(ratios)[1])
    totals = [sum(rank["breakdown"].values()) for rank in report["by_rank"]]
    assert totals[0] == pytest.approx(totals[1])
    for rank in report["by_rank"]:
        assert rank["breakdown"]["attention_s"] > 0
        assert min(rank["breakdown"].values()) >= 0
    parts = [results.Breakdown(**rank["breakdown"]) for rank in report["by_rank"]]
    assert (report["bottleneck"], report["verdict"]) == judge(parts, report["ideal"]["median_s"])


def test_bytes_are_those_of_the_schedule_and_memory_is_counted(
    measured: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    report, _ = measured
    kv_block = 2 * (2 * 2 * 256 * 16) * 4  # k and v, (batch, KV heads, shard, head_dim), float32
    for number, rank in enumerate(report["by_rank"]):
        assert rank["rank"] == number
        assert rank["sent_bytes"] == rank["scheduled_bytes"] == kv_block
        assert rank["memory"]["input_bytes"] == kv_block + 2 * 4 * 256 * 16 * 4
        assert rank["memory"]["peak_bytes"] > rank["memory"]["above_inputs_bytes"] > 0


def test_the_trace_of_a_measured_run_has_the_tiles_and_hops_of_its_schedule(
    measured: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    report, trace = measured
    events = trace["traceEvents"]
    slices = [it for it in events if it["ph"] == "X"]
    assert {(it["pid"], it["name"]) for it in slices if it["cat"] == "attend"} == {
        (rank, f"q{rank}×kv{owner}") for rank in (0, 1) for owner in (0, 1)
    }
    assert {(it["pid"], it["name"], it["args"]["bytes"]) for it in slices if it["cat"] == "send"} == {
        (0, "send kv0 to 1", report["by_rank"][0]["sent_bytes"]),
        (1, "send kv1 to 0", report["by_rank"][1]["sent_bytes"]),
    }
    begins = {it["id"]: it for it in events if it["ph"] == "s"}
    ends = {it["id"]: it for it in events if it["ph"] == "f"}
    assert len(begins) == 2
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        assert (begin["pid"], ends[number]["pid"]) in ((0, 1), (1, 0))
        assert begin["ts"] <= ends[number]["ts"]
    assert trace["otherData"]["algorithm"] == "pass_kv"
    seconds = sum(it["dur"] for it in slices if it["cat"] == "attend" and it["pid"] == 0) / 1e6
    assert seconds == pytest.approx(report["by_rank"][0]["breakdown"]["attention_s"], rel=1e-3)


@pytest.fixture(scope="module")
def measured_backward(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON report of a small run with gradients on two gloo ranks, and its trace."""
    trace = tmp_path_factory.mktemp("bench") / "trace.json"
    options = "--backward --ranks 2 --tokens 512 --heads 4 --kv-heads 2 --head-dim 16 --batch 2 --repeats 3"
    done = run(*shlex.split(options), "--json", "--trace", str(trace))
    assert (done.returncode, done.stderr) == (0, f"Wrote {trace}\n")
    return json.loads(done.stdout), json.loads(trace.read_text())


def test_with_backward_gradients_are_checked_and_bytes_are_those_of_both_passes(
    measured_backward: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    report, _ = measured_backward
    assert report["parameters"]["has_backward"] is True
    assert report["is_verified"] is True
    assert 0 < report["check"]["max_error"] <= report["check"]["tolerance"] == 1e-5
    kv_block = 2 * (2 * 2 * 256 * 16) * 4  # k and v, (batch, KV heads, shard, head_dim), float32
    for rank in report["by_rank"]:
        # kv to the other rank in both passes, and its gradient home in the backward one
        assert rank["sent_bytes"] == rank["scheduled_bytes"] == 3 * kv_block
        assert rank["memory"]["input_bytes"] == kv_block + 2 * (2 * 4 * 256 * 16) * 4  # and q and dout
        assert min(rank["breakdown"].values()) >= 0
    assert sum(report["by_rank"][0]["breakdown"].values()) == pytest.approx(
        sum(report["by_rank"][1]["breakdown"].values())
    )


def test_reproducible_compares_bits_with_one_device() -> None:
    options = "--reproducible --backward --ranks 2 --tokens 2100 --heads 2 --head-dim 8 --batch 1 --repeats 1"
    done = run(*shlex.split(options), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["parameters"]["reproducible"] is True
    assert report["check"]["same_bits"] is True
    assert report["is_verified"] is True
    assert all(rank["sent_bytes"] == rank["scheduled_bytes"] for rank in report["by_rank"])
    refused = invoke("--reproducible", "--ranks", "2", "--layout", "striped")
    assert (refused.exit_code, "use --layout striped:512" in refused.output) == (2, True)


def test_other_bits_than_those_of_one_device_are_a_failure(
    measured: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    assert measured[0]["check"]["same_bits"] is None
    check = results.ResultCheck(0.0, 1e-5, "itself")
    assert check.is_passed
    assert not dataclasses.replace(check, same_bits=False).is_passed


def test_the_trace_with_backward_tells_its_messages_from_those_of_the_forward_pass(
    measured_backward: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, trace = measured_backward
    events = trace["traceEvents"]
    attended = [(it["pid"], it["name"]) for it in events if it["ph"] == "X" and it["cat"] == "attend"]
    names = {(rank, f"{q}{rank}×kv{owner}") for rank in (0, 1) for owner in (0, 1) for q in ("q", "q_grad")}
    assert set(attended) == names
    sends = sorted((it["name"], it["ts"]) for it in events if it["ph"] == "X" and it["cat"] == "send")
    assert [name for name, _ in sends] == [
        *("send dkv0 to 0", "send dkv1 to 1"),
        *("send kv0 to 1", "send kv0 to 1", "send kv1 to 0", "send kv1 to 0"),
    ]
    begins = {it["id"]: it["ts"] for it in events if it["ph"] == "s"}
    ends = {it["id"]: it["ts"] for it in events if it["ph"] == "f"}
    assert len(begins) == 6
    assert begins.keys() == ends.keys()
    assert all(begin <= ends[number] for number, begin in begins.items())
    assert len(set(ends.values())) == 6  # none ends at the wait for another


def test_gradients_of_a_half_type_and_of_a_mask_with_blind_rows_are_checked_against_wider_ones() -> None:
    done = run(
        *shlex.split("--backward --transport threads --ranks 3 --tokens 700 --batch 1 --heads 2 --repeats 1"),
        *shlex.split("--dtype bfloat16 --layout striped:16 --algorithm pass-q --mask window:-200:300"),
    )
    text = " ".join(done.stdout.split())
    assert (done.returncode, done.stderr) == (0, ""), text
    assert "Exact attention and its gradients on 3 ranks, measured" in text
    assert "off scaled_dot_product_attention in float32 with a dense mask" in text


@pytest.mark.parametrize("wrong", range(4), ids=["out", "dq", "dk", "dv"])
def test_any_wrong_result_is_found(wrong: int) -> None:
    import torch

    from ringspan.bench.baselines import check, draw, one_device

    jobs: list[Job] = []
    with pytest.MonkeyPatch.context() as patch:
        jobs = fake_run(patch, a_result())
        assert invoke("--backward", "--ranks", "1", "--tokens", "64", "--batch", "1").exit_code == 0
    settings = jobs[0].settings
    assert settings is not None
    drawn = draw(settings, settings.layout.all_positions(), torch.device("cpu"))
    right = one_device(settings, drawn).run()
    results = [x.clone() for x in right]
    assert check(settings, drawn, tuple(results), right).is_passed
    results[wrong][0, 0, 17, 3] += 1e-3
    assert not check(settings, drawn, tuple(results), right).is_passed


def test_the_text_on_ranks_that_are_threads_with_another_mask_layout_and_algorithm() -> None:
    done = run(
        *shlex.split("--transport threads --ranks 4 --tokens 1K --batch 1 --heads 4 --repeats 1 --layout striped:16"),
        *shlex.split("--algorithm hybrid --mesh 2x2 --direction reverse --kernel reference --dtype float64"),
        *("--mask", "causal & window:100"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for part in (
        "Exact attention on 4 ranks, measured",
        "1,024 tokens, batch 1, 4 heads over 4 KV heads, head_dim 64, float64, seed 0",
        "causal() & sliding_window(100, 0), layout striped:16",
        "hybrid, direction reverse, mesh 2×2, kernel reference, transport threads",
        "one device, ringspan on one rank",
        "speedup",
        "of the ideal",
        "The bottleneck is",
        "Ranks that are threads share a process",
        "✓ The result is right",
        "off scaled_dot_product_attention with a dense mask",
    ):
        assert part in text, part
    assert len(re.findall(r"[\d,]+ ✓", text)) == 4


def test_under_torchrun_it_starts_nothing_and_rank_0_prints() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    done = run("--tokens", "512", "--repeats", "1", "--json", before=tuple(torchrun))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)  # one report, not two
    assert report["is_verified"]
    assert (report["parameters"]["world_size"], report["parameters"]["transport"]) == (2, "gloo")


HAS_MPI = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")


@pytest.mark.skipif(not HAS_MPI, reason="mpirun or mpi4py is not installed")
def test_under_mpirun_it_starts_nothing_and_rank_0_prints() -> None:
    done = run("--tokens", "512", "--repeats", "1", "--json", before=MPIRUN)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_verified"]
    assert (report["parameters"]["world_size"], report["parameters"]["transport"]) == (2, "mpi")


def test_selfcheck_runs_what_can_run_here_and_says_why_the_rest_cannot() -> None:
    done = run("--json", command="selfcheck")
    paths = {it["path"]: it for it in json.loads(done.stdout)["paths"]}
    assert done.returncode == 0, done.stdout
    for path in ("kernel sdpa_cpu, bfloat16, cpu", "kernel reference, float64, cpu", "threads, 4 ranks, hybrid"):
        assert paths[path]["status"] == "ok", paths[path]
        assert paths[path]["max_error"] < 1e-5
    assert paths["kernel sdpa_cpu backward, bfloat16, cpu"]["status"] == "ok"
    assert 1e-4 < paths["kernel sdpa_cpu backward, bfloat16, cpu"]["max_error"] < 2e-2
    for direction in ("", " backward"):
        for path in ("threads, 4 ranks, double-ring", "gloo, 2 ranks, pass-kv", *(["mpi, 2 ranks, ulysses"] * HAS_MPI)):
            assert paths[path + direction]["status"] == "ok", path + direction
    import torch

    if not torch.cuda.is_available():
        kernels = ("kernel sdpa_flash, bfloat16, cuda", "kernel sdpa_cudnn backward, float16, cuda")
        for path in (*kernels, "nccl, 2 ranks"):
            assert (paths[path]["status"], paths[path]["note"]) == ("not available", "no GPU")


# What it says when something is wrong


def fake_run(monkeypatch: pytest.MonkeyPatch, outcome: object) -> list[Job]:
    """Let `run_job` start nothing and return or raise `outcome`; returns the jobs it is given."""
    jobs: list[Job] = []

    def run_job(job: Job, _progress: object) -> object:
        jobs.append(job)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(bench_options, "run_job", run_job)
    return jobs


def a_result(**changes: Any) -> results.Measured:
    timing = results.Timing.of([2.0, 2.5])
    part = results.Breakdown(1.9, 0.1, 0.1, 0.1, 0.1)
    rank = results.RankResult(0, part, 100, changes.pop("scheduled_bytes", 100), results.MeasuredMemory(10, 30, 20))
    values: dict[str, Any] = {
        "parameters": results.BenchParameters(
            world_size=1,
            seq_len=512,
            batch=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
            dtype="float32",
            mask="causal()",
            layout="zigzag",
            algorithm="pass_kv",
            direction=None,
            mesh=None,
            kernel="sdpa_cpu",
            has_backward=False,
            transport="gloo",
            repeats=2,
            seed=0,
            reproducible=False,
        ),
        "machine": results.MachineInfo("here", 2, "CPU", "3", "2"),
        "one_device": timing,
        "one_device_method": "scaled_dot_product_attention",
        "ideal": timing,
        "ranks": timing,
        "speedup": results.Ratio(1.0, 1.0, 1.0),
        "share_of_ideal": results.Ratio(1.0, 1.0, 1.0),
        "by_rank": (rank,),
        "bottleneck": "attention",
        "verdict": "The bottleneck is attention.",
        "check": results.ResultCheck(1e-7, 1e-5, "scaled_dot_product_attention"),
    }
    return results.Measured(results.Result(**values | changes), ())


@pytest.mark.parametrize(
    ("changes", "exit_code", "says"),
    [
        ({}, 0, "✓ The result is right: 1.0e-07 off"),
        (
            {"check": results.ResultCheck(1e-4, 1e-5, "truth")},
            1,
            "✗ Wrong: 1.0e-04 off truth; at most 1.0e-05 is accepted",
        ),
        ({"check": results.ResultCheck(None, 1e-5, "truth")}, 1, "✗ Wrong: not finite off truth"),
        ({"scheduled_bytes": 101}, 1, "✗ Wrong: the ranks did not send the bytes of the schedule."),
    ],
)
def test_a_wrong_result_or_byte_count_is_exit_code_1(
    changes: dict[str, Any], exit_code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_run(monkeypatch, a_result(**changes))
    done = invoke("--ranks", "1")
    assert done.exit_code == exit_code
    assert says in done.stdout
    done = invoke("--ranks", "1", "--json")
    assert done.exit_code == exit_code
    assert json.loads(done.stdout)["is_verified"] is (exit_code == 0)


def test_defaults_are_those_of_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = fake_run(monkeypatch, a_result())
    assert invoke().exit_code == 0
    settings = jobs[0].settings
    assert settings is not None
    shape = (settings.seq_len, settings.batch, settings.num_heads, settings.num_kv_heads, settings.head_dim)
    assert shape == (16384, 4, 1, 1, 64)
    assert (settings.dtype, str(settings.mask), settings.layout_name) == ("float32", "causal()", "zigzag")
    assert (settings.algorithm, settings.carrier, settings.repeats) == ("pass_kv", "gloo", 5)
    assert settings.world_size == len(os.sched_getaffinity(0))
    assert invoke("--tokens", "1M", "--heads", "8", "--ranks", "4").exit_code == 0
    settings = jobs[1].settings
    assert settings is not None
    assert (settings.seq_len, settings.num_kv_heads, settings.world_size) == (2**20, 8, 4)


@pytest.mark.parametrize(
    ("option", "value", "name", "means"),
    [
        *(("--algorithm", text, "algorithm", "pass_q") for text in ("pass-q", "pass_q", "pass-Q", "PASS_Q")),
        *(("--dtype", text, "dtype", "bfloat16") for text in ("bf16", "BF16", "BFloat16")),
        *(("--dtype", f"fp{bits}", "dtype", f"float{bits}") for bits in (16, 32, 64)),
    ],
)
def test_choices_have_the_spellings_of_python_the_reports_and_the_planner(
    option: str, value: str, name: str, means: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = fake_run(monkeypatch, a_result())
    assert invoke(option, value).exit_code == 0
    assert getattr(jobs[0].settings, name) == means


def test_a_failed_rank_is_exit_code_1_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch, RanksFailed("rank 3: RuntimeError: it broke"))
    done = invoke("--ranks", "4")
    assert (done.exit_code, done.stderr) == (1, "Error: rank 3: RuntimeError: it broke\n")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tokens", "0"], "--tokens 0: expected a number of tokens of at least 1; use a number such as 4096, 16K"),
        (["--mask", "triangle"], "--mask triangle: there is no such mask"),
        (["--layout", "spiral"], "--layout spiral: there is no such layout"),
        (["--tokens", "999999999999M"], "use at most 67,108,864"),
        (["--ranks", "100000"], "100000 is not in the range 1<=x<=1024"),
        (["--heads", "99999999999999", "--algorithm", "ulysses"], "is not in the range 1<=x<=1024"),
        (
            ["--heads", "3", "--kv-heads", "2"],
            "--kv-heads 2: every KV head serves the same number",
        ),
        (["--ranks", "2", "--algorithm", "ulysses"], "Ulysses over 2 ranks with 1 query head "),
        (["--ranks", "2", "--mesh", "1x2"], "--mesh 1x2: pass-kv has no mesh; leave it out, or use --algorithm hybrid"),
        (["--ranks", "2", "--algorithm", "hybrid"], "add --mesh OUTERxINNER, such as --mesh 1x2"),
        (["--ranks", "2", "--algorithm", "hybrid", "--mesh", "2x2"], "must be the 2 ranks of the group; use one of"),
        (["--algorithm", "ulysses", "--direction", "reverse"], "--direction reverse: ulysses has no direction"),
        (["--mask", "documents:5,6"], "--mask: its documents have 11 tokens, but --tokens is 16,384; add a document"),
        (["--transport", "mpi", "--ranks", "3"], "use mpirun -np 3 ringspan bench attention"),
        (["--transport", "nccl"], "every rank needs its own GPU, and there are 0"),
        (["--trace", "/nowhere/at/all.json"], "'/nowhere/at/all.json' cannot be written"),
        (["--trace", ""], "'--trace': a file needs a name; give one, or leave the option out"),
        (["--dtype", "Int_8"], "'Int_8' is not one of 'float64', 'float32', 'bfloat16', 'float16'"),
        (["--repeats", "0"], "--repeats"),
        (["--repeats", "x"], "'x' is not a whole number"),
        (["--timeout", "0"], "--timeout 0: expected a time in seconds; use a number above 0 and up to 1,000,000"),
        (["--timeout", "nan"], "--timeout nan: expected a time"),
        (["--timeout", "inf"], "--timeout inf: expected a time"),
        (["--timeout", "soon"], "--timeout soon: expected a time"),
        (["--predict", "none.toml"], "does not exist"),
        (
            ["--predict", "README.md"],
            "ringspan bench calibrate writes a .toml file; give that one",
        ),
        (["--predict", "pyproject.toml"], "--predict: pyproject.toml is not a calibrated device"),
        (["--predict", "pyproject.toml", "--reproducible"], "covers the default mode only; leave out --reproducible"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = fake_run(monkeypatch, a_result())
    monkeypatch.setattr(bench_options, "count_gpus", lambda: 0)
    done = invoke(*args)
    assert (done.exit_code, done.stdout, jobs) == (2, "", [])
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_torch_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = invoke()
    assert done.exit_code == 2
    assert "bench needs torch; install it, for example from a checkout with: pip install '.[torch]'" in done.stderr
    assert invoke("--help").exit_code == 0


@pytest.mark.parametrize(
    ("env", "launched"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, Launched("torchrun", 1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, Launched("mpirun", 3, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, Launched("mpirun", 0, 2)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, None),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            Launched("torchrun", 1, 2),
        ),
    ],
)
def test_a_launcher_is_known_by_its_environment(env: dict[str, str], launched: Launched | None) -> None:
    assert find_launcher(env) == launched


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='abc': this environment variable must be a"),
        ({"RANK": "", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='': this environment variable must be a whole"),
        ({"RANK": "0", "WORLD_SIZE": "0", "MASTER_ADDR": "a"}, "WORLD_SIZE='0': this environment variable must be"),
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': this environment variable must be a whole number"),
        ({"RANK": "x"}, "RANK='x': this environment variable must be a whole number of at least 0; unset it"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2: torchrun sets RANK too, and that is missing"),
        ({"RANK": "1", "MASTER_ADDR": "a"}, "RANK=1: torchrun sets WORLD_SIZE too, and that is missing; unset it"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='2': ranks count from 0 to WORLD_SIZE - 1 = 1"),
        ({"OMPI_COMM_WORLD_RANK": "²", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK='²': this environment"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 tasks, and each would run"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "run a single task with srun -n1"),
    ],
)
@pytest.mark.parametrize("command", ["attention", "selfcheck"])
def test_variables_of_a_launcher_that_make_no_sense_are_refused(
    env: dict[str, str], says: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = fake_run(monkeypatch, a_result())
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = invoke(command=command)
    assert (done.exit_code, done.stdout, jobs) == (2, "", [])
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--ranks", "3"], "torchrun has started 2; leave it out"),
        (["--transport", "threads"], "ranks that torchrun has started use gloo or nccl"),
        (["--transport", "mpi"], "ranks that torchrun has started use gloo or nccl"),
    ],
)
def test_options_that_contradict_the_launcher_are_refused(
    args: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    done = invoke(*args)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_refusal_that_only_ranks_can_know_is_exit_code_2() -> None:
    done = run("--ranks", "2", "--tokens", "64", "--kernel", "sdpa_flash")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: --kernel sdpa_flash: cannot compute torch.float32 on cpu")
    assert len(done.stderr.splitlines()) == 1


def test_an_error_on_a_rank_is_one_line_that_names_it() -> None:
    done = run("--ranks", "2", "--tokens", "1M", "--batch", "1000000", "--head-dim", "4096")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: rank [01]: RuntimeError: .*memory.*\n", done.stderr), done.stderr


def test_a_run_that_takes_too_long_is_ended() -> None:
    begin_s = time.monotonic()
    done = run(*LONG, "--timeout", "0.5")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no result within 0.5 s" in done.stderr
    assert "allow a longer timeout, or measure less" in done.stderr
    assert time.monotonic() - begin_s < ENDS_WITHIN_S


def test_time_can_run_out_though_some_ranks_are_done() -> None:
    inbox: queue.Queue[tuple[int, object]] = queue.Queue()
    for message in ((0, Progress(8, 9, "the check")), (1, Done(None)), (1, Ended())):
        inbox.put(message)
    job = Job("check_group", "gloo", 2, 0.1)
    with pytest.raises(RanksFailed, match=r"no result within 0\.1 s, while the check"):
        _collect([None, None], inbox, time.monotonic() + 0.1, job, lambda _: None)  # type: ignore[list-item]


def test_results_turn_into_json_as_they_are() -> None:
    values = dataclasses.asdict(a_result().result)
    assert json.loads(json.dumps(values, allow_nan=False))["by_rank"][0]["memory"]["peak_bytes"] == 30

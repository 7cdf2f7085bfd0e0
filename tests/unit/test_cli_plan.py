"""The command as a stranger would use it."""

import io
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from ringspan.bench.calibration import format_calibration
from ringspan.cli import main
from ringspan.cli.plan.command import EXAMPLES
from ringspan.cli.plan.text import print_plan
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.plan import Illegal, Request, build_plan

SMALL = ["--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "128K"]


def run(*words):
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(main, ["plan", *words])


def test_a_plan_answers_all_questions():
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    for text in (
        "time to first token",
        "tokens per second",
        "bottleneck",
        "KV cache",
        "✓ fits",
        "longest sequence that fits",
        "All ways, ranked",
        "Not possible: double-ring",
        "clearly faster than one device",
        "software  ringspan with fa2",
        "Too close to call",
        "reserved",
        "pass-Q",
        "rs.attention(",
    ):
        assert text in result.output
    assert "The formulas" not in result.output
    assert re.search(r"to first token +\S+ m?s to \S+ m?s", result.output)


def test_the_examples_of_the_help_run(subtests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from test_catalog import LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    lines = [line.strip() for line in EXAMPLES.splitlines() if line.strip().startswith("ringspan plan --model")]
    examples = [line for line in lines if "mine.toml" not in line]
    assert len(examples) == 6
    for line in examples:
        with subtests.test(line):
            result = run(*line.split()[2:])
            assert result.exit_code == 0, (line, result.output)


def test_explain_shows_numbers_in_formulas():
    output = run(*SMALL, "--explain").output
    assert "limit · d/(d + softmax_dims) · n/(n + ramp)" in output
    assert "FLOP/s (fa2)" in output


def test_json_has_every_option():
    data = json.loads(run(*SMALL, "--json").output)
    assert len(data["options"]) > 20
    best = data["options"][0]
    assert best["memory_bytes"]["total"] == pytest.approx(sum(list(best["memory_bytes"].values())[:-1]))
    assert best["low_s"] < best["total_s"] < best["high_s"]
    assert data["request"]["model"]["num_kv_heads"] == 8
    assert data["request"]["cluster"]["device"]["near"]["id"] == "nvlink4"
    assert best["setup"]["tp"] * best["setup"]["cp"] == 8


def test_the_trace_has_the_schema_of_measured_runs(tmp_path):
    path = tmp_path / "trace.json"
    assert run(*SMALL, "--tp", "1", "--trace", str(path)).exit_code == 0
    events = json.loads(path.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(8))
    assert {event["cat"] for event in slices} == {"attend", "send", "receive"}
    starts, ends = ([event["id"] for event in events if event["ph"] == kind] for kind in "sf")
    assert starts
    assert sorted(starts) == sorted(ends)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert names == {"compute", "communication"}


def test_the_plot_is_svg_with_a_line_for_every_algorithm(tmp_path):
    path = tmp_path / "plot.svg"
    assert run(*SMALL, "--plot", str(path)).exit_code == 0
    root = ET.fromstring(path.read_text())
    lines = root.findall(".//{http://www.w3.org/2000/svg}polyline")
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert 6 <= len(lines) <= 10
    assert {"tokens", "devices", "pass-kv", "ulysses"} <= texts
    for line in lines:
        numbers = [float(number) for number in re.split("[ ,]", line.get("points"))]
        assert all(0 <= number <= 840 for number in numbers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model is missing"),
        (["--model", "llama-3.1-8b"], "--devices is missing"),
        (["--model", "llama-3.1-8b", "--devices", "8xh100"], "--tokens is missing"),
        (["--model", "llama3", "--devices", "8xh100", "--tokens", "1K"], "did you mean llama-3."),
        (["--model", "llama-3.1-8b", "--devices", "8xh10", "--tokens", "1K"], "did you mean h100"),
        (
            ["--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "-5"],
            "--tokens -5: expected a number of tokens",
        ),
        ([*SMALL, "--batch", "-1"], "--batch"),
        ([*SMALL, "--batch", "1" + "0" * 400], "too many sequences; use at most 1,048,576"),
        (
            ["--model", "wan2.1-14b", "--devices", "8xh100", "--frames", "1" + "0" * 400],
            "too large; use at most 1,000,000",
        ),
        (["--model", "wan2.1-14b", "--devices", "8xh100", "--frames", "1" + "0" * 399 + "1"], "use at most 1,000,000"),
        ([*SMALL, "--tp", "3"], "--tp 3: tensor"),
        ([*SMALL, "--plot", "x.png"], "'x.png': this file is written as SVG; use x.svg"),
        ([*SMALL[:2], "--devices", "100000xh100", "--tokens", "1K"], "--devices 100000xh100: planning takes time"),
        ([*SMALL, "--fsdp"], "--fsdp: in prefill every layer's weights would be gathered"),
        ([*SMALL, "--fsdp"], "tensor parallelism or fp8 weights take less memory"),
        ([*SMALL, "--phase", "decode", "--cached", "1K"], "--cached 1024: in decode all tokens but one are cached"),
        ([*SMALL, "--phase", "decode", "--cached", "1K"], "give the length of the cache as the number of tokens"),
        ([*SMALL, "--phase", "train", "--weights", "fp8"], "--weights fp8: training is planned with weights in bf16"),
        ([*SMALL, "--no-recompute"], "are for --phase train"),
        (["--check", "--tp", "8"], "--tp has no meaning for --check"),
        (
            ["--model", "llama-3.1-8b", "--devices", "2xx.toml", "--tokens", "1K", "--kernel", "fa2"],
            "--kernel fa2: x.toml",
        ),
        (["--model", "wan2.1-14b", "--devices", "8xh100", "--size", "721x720"], "--size (height 721): a token"),
        (
            ["--model", "dense:layers=1,heads=1,head_dim=8,mlp=8,mlp_matrices=0", "--devices", "1xh100"],
            "mlp_matrices=0",
        ),
        (
            [*SMALL, "--network", "carrier-pigeon"],
            "Error: --network carrier-pigeon: the catalogue has no such link; use one of ",
        ),
        ([*SMALL, "--phase", "denoise"], "--phase denoise: llama-3.1-8b is a model for"),
        ([*SMALL, "--frames", "81"], "--frames: llama-3.1-8b is not a video model"),
        ([*SMALL, "--trace", "/no/such/place/x.json"], "cannot be written"),
        (["--model", "wan2.1-14b", "--devices", "8xh100", "--size", "big"], "--size big: expected a size"),
        (["--model", "wan2.1-14b", "--devices", "8xh100", "--frames", "80"], "--frames 80: the VAE"),
        (["--model", "wan2.1-14b", "--devices", "8xh100", "--frames", "81", "--tokens", "9"], "give one of them"),
        (["--model", "./none.json", "--devices", "8xh100", "--tokens", "1K"], "No such file"),
        (["--model", "llama-3.1-8b", "--devices", "64x8xh100", "--tokens", "1M", "--tp", "1", "--trace", "x"], "64"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(words, message):
    result = run(*words)
    assert result.exit_code == 2, result.output
    lines = result.output.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert message in lines[0]


@pytest.mark.parametrize(("word", "message"), [("--foo", "No such option"), ("--version=3", "does not take a value")])
def test_an_unknown_option_before_the_command_is_refused_in_one_line(word, message):
    result = CliRunner().invoke(main, [word])
    assert result.exit_code == 2
    lines = result.output.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    assert message in lines[0]
    assert lines[0].endswith("(see 'ringspan --help')")


def test_no_command_shows_the_help():
    assert "Commands:" in CliRunner().invoke(main, []).output


@pytest.mark.parametrize("config", ['{"vocab_size": 1' + "0" * 400 + "}", "[" * 100_000])
def test_a_config_that_is_too_large_or_too_deep_is_one_line(tmp_path, config):
    from test_catalog import LLAMA

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | json.loads(config)) if config.startswith("{") else config)
    result = run("--model", str(path), "--devices", "8xh100", "--tokens", "4K")
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1
    assert str(path) in result.output


def test_a_model_of_too_many_heads_is_planned_as_quickly_as_others():
    result = run("--model", "dense:layers=32,heads=99999999,head_dim=128,mlp=16384", *SMALL[2:])
    assert result.exit_code == 3, result.output
    assert "use 1, 3, 9, 11, 33, 73, 99, 101," in " ".join(result.output.split())


@pytest.mark.parametrize("cached", [[], ["--cached", "200000M"]])
def test_a_plot_goes_no_further_than_a_plan_may(tmp_path, cached):
    path = tmp_path / "plot.svg"
    result = run(*SMALL[:4], "--tokens", "300000M", *cached, "--plot", str(path))
    assert result.exit_code == 3, result.output
    assert ET.fromstring(path.read_text()).findall(".//{http://www.w3.org/2000/svg}polyline")


def test_a_file_is_named_as_it_was_typed():
    result = run("--model", "./double_ring.json", "--devices", "8xh100", "--tokens", "4K")
    assert result.exit_code == 2
    assert "double_ring.json: No such file" in result.stderr


def test_a_config_without_heads_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "x", "hidden_size": 64, "num_hidden_layers": 2}))
    result = run("--model", str(path), "--devices", "8xh100", "--tokens", "1K")
    assert result.exit_code == 2
    assert "num_attention_heads" in result.output


def test_what_does_not_fit_says_so_and_the_way_out():
    result = run("--model", "llama-3.1-405b", "--devices", "1xh100", "--tokens", "1K")
    assert result.exit_code == 3
    answer = result.output.split("1. The answer")[1].splitlines()[1]
    assert answer.startswith("✗ does not fit: 81")
    assert "The fewest h100-sxm that hold it are 16" in " ".join(result.output.split())
    assert "Use --weights fp8 or int4; or more devices, or such with more memory." in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (["--weights", "fp8", "--tp", "4"], "weights. Use --tp 8; or --weights int4; or more devices"),
        (["--weights", "int4", "--devices", "1xh100", "--tokens", "1K"], "weights. Use more devices"),
        (["--phase", "train"], "moments. Use --fsdp; or fewer --tokens; or more"),
        (["--phase", "train", "--fsdp"], "moments. Use fewer --tokens; or more devices"),
        (
            ["--phase", "decode", "--weights", "int4", "--tokens", "16M", "--batch", "4"],
            "cache. Use --kv-cache fp8; or a smaller --batch; or fewer",
        ),
        (
            ["--weights", "int4", "--tokens", "16M", "--kv-cache", "fp8"],
            "activations. Use --chunk 8K; or fewer --tokens; or more",
        ),
    ],
)
def test_the_remedy_names_only_options_that_were_not_tried(words, way_out):
    result = run("--model", "llama-3.1-405b", "--devices", "8xh100", "--tokens", "128K", *words)
    assert way_out in " ".join(result.output.split())


def test_the_answer_says_what_its_range_does_not_cover():
    output = " ".join(run("--model", "llama-3.1-8b", "--devices", "8xh800", "--tokens", "8K").output.split())
    assert "Short work: fewer than 8,192 new tokens on a rank" in output
    assert "h800: not confirmed: exponentials_per_s, peak" in output
    assert "Optimizer steps, data loading" in run(*SMALL, "--phase", "train", "--fsdp").output


def test_the_help_ends_with_the_names_of_the_catalogue():
    models, devices = run("--help").output.split("Models: ")[1].split("Devices: ")
    devices, software = devices.split("Software: ")
    assert {"ringspan", "usp", "megatron"} <= set(re.split(r",?\s+", software))
    assert {"llama-3.1-405b", "wan2.1-14b"} <= set(re.split(r",?\s+", models))
    assert {"h100", "mi300x"} <= set(re.split(r",?\s+", devices))
    assert "mochi-1" not in re.split(r",?\s+", models)  # the catalogue lacks figures of it


def table_rows(output):
    """Cells of the ranking, by line."""
    ranking = output.split("All ways, ranked")[1]
    return [re.split(r" {2,}", line.strip()) for line in ranking.splitlines() if line.endswith(("✓", "✗"))]


@pytest.mark.parametrize("model", ["wan2.1-14b", "llama-3.1-8b"])
def test_attention_and_the_rest_are_a_layer_in_the_ranking_too(model):
    tokens = [] if model == "wan2.1-14b" else ["--tokens", "64K"]
    output = run("--model", model, "--devices", "8xh100", *tokens).output
    attention, rest = re.search(r"forward +\S+ \S+: attention (\S+ \S+), the rest (\S+ \S+)", output).groups()
    best = " ".join(table_rows(output)[0])
    assert attention in best
    assert rest in best


def test_a_model_without_full_layers_shows_sliding_ones(tmp_path):
    from test_plan import MISTRAL

    path = tmp_path / "config.json"
    path.write_text(json.dumps(MISTRAL))
    output = " ".join(run("--model", str(path), "--devices", "8xh100", "--tokens", "64K").output.split())
    assert "are of one sliding layer, forward" in output
    assert "full layer" not in output


def test_what_is_left_out_of_the_impossible_ways_is_told():
    plan = build_plan(Request(load_model("llama-3.1-8b"), parse_devices("8xh100"), "prefill", 2**17))
    many = replace(plan, illegal=tuple(Illegal(f"way {i}", "no reason") for i in range(15)))
    file = io.StringIO()
    print_plan(many, Console(width=100, file=file))
    text = file.getvalue()
    assert text.count("Not possible: way") == 12
    assert "(and 3 more that are not possible; --json has them all)" in text


@pytest.mark.parametrize("option", ["--plot", "--trace"])
def test_a_file_without_a_name_is_refused(option):
    result = run(*SMALL, option, "")
    assert result.exit_code == 2
    assert option in result.output
    assert "a file needs a name" in result.output


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    from test_calibration import calibration
    from test_catalog import LLAMA

    config = json.dumps(LLAMA | {"model_type": "größer"}, ensure_ascii=False)
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    (tmp_path / "mine.toml").write_text("# größer\n" + format_calibration(calibration()), encoding="utf-8")
    words = ["plan", "--model", "config.json", "--devices", "2xmine.toml", "--tokens", "1K", "--plot", "plot.svg"]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "ringspan", *words],
        cwd=tmp_path,
        env=os.environ | ascii_only,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "größer, prefill" in (tmp_path / "plot.svg").read_text(encoding="utf-8")

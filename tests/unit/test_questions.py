"""Questions beside a plan: answers that hold, and the next smaller or larger ones that do not."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from click.testing import CliRunner

import ringspan as rs
from ringspan.cli import main
from ringspan.errors import RingspanError
from ringspan.planner.accuracy import BETWEEN, COMMON, SPREADS, Z80, is_tie, range_of, spread_between, spread_of
from ringspan.planner.catalog import load_device, parse_devices
from ringspan.planner.plan import (
    build_plan,
    cost_of,
    fewest_devices,
    largest_batch,
    longest_context,
    make_request,
    sweep,
)

SMALL = ["--model", "llama-3.1-8b", "--devices", "8xh100", "--tokens", "128K"]


def run(*words):
    return CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1"}).invoke(main, ["plan", *words])


def question(**options):
    return make_request(**{"model": "llama-3.1-8b", "devices": "8xh100", "tokens": 2**17, **options})


def test_the_fewest_devices_hold_it_and_one_size_less_does_not():
    request = question(model="llama-3.1-405b", devices="8xh100", weights="fp8")
    answer = fewest_devices(request)
    assert answer.option.fits
    assert answer.request.cluster.num_devices == 7 or answer.request.cluster.num_devices == 8
    less = replace(request, cluster=request.cluster._replace(per_node=4))
    assert not build_plan(less).best.fits


@pytest.mark.wide
def test_the_fewest_devices_reach_a_target_and_one_node_less_does_not():
    request = question(model="llama-3.1-70b", tokens=2**20)
    answer = fewest_devices(request, 60.0)
    cluster = answer.request.cluster
    assert (
        answer.option.prediction.total_s
        <= 60
        < build_plan(replace(request, cluster=cluster._replace(nodes=cluster.nodes - 1))).best.prediction.total_s
    )
    assert fewest_devices(request, 1e-3) is None


def test_the_longest_context_and_the_largest_batch_fit_and_more_do_not():
    longest = longest_context(question(phase="decode"))
    assert longest.option.fits
    more = replace(longest.request, tokens=int(longest.request.tokens * 1.01))
    assert not build_plan(more).best.fits
    largest = largest_batch(question(phase="decode"))
    assert largest.option.fits
    assert not build_plan(replace(largest.request, batch=largest.request.batch + 8)).best.fits


def test_a_sweep_answers_as_plans_do(subtests):
    request = question()
    answers = list(sweep(request, [2**16, 2**20], [request.cluster, parse_devices("2x8xh100", kernel="fa2")]))
    assert len(answers) == 4
    for answer in answers:
        with subtests.test(str(answer.request.tokens)):
            assert answer.option.setup == build_plan(answer.request).best.setup


def test_a_price_is_devices_times_hours():
    request = question()
    best = build_plan(request).best
    cost = cost_of(request, best, 2.5)
    assert cost.per_unit == pytest.approx(8 * 2.5 * best.prediction.total_s / 3600)
    assert cost.per_million_tokens == pytest.approx(cost.per_unit / 2**17 * 1e6)
    video = make_request(model="wan2.1-14b", devices="8xh100")
    step = build_plan(video).best
    assert cost_of(video, step, 2.5).per_video > 50 * cost_of(video, step, 2.5).per_unit
    with pytest.raises(RingspanError, match="price=-1"):
        cost_of(request, best, -1)


def test_chunks_cost_more_time_and_less_memory():
    whole, chunked = (build_plan(question(tp=1, chunk_tokens=size)) for size in (None, 8192))
    setup = whole.best.setup
    other = next(option for option in chunked.options if option.setup == setup)
    assert other.prediction.total_s > whole.best.prediction.total_s
    assert other.memory.activations == pytest.approx(whole.best.memory.activations / 16)
    assert other.memory.kv_cache == whole.best.memory.kv_cache
    exact = sum(
        build_plan(question(tp=1, tokens=8192, cached_tokens=i * 8192)).best.prediction.total_s for i in range(16)
    )
    assert min(option.prediction.total_s for option in chunked.options) == pytest.approx(exact, rel=0.05)


def test_a_cache_in_fp8_takes_half_and_is_read_in_half_the_time():
    plain, fp8 = (
        build_plan(question(model="llama-3.1-70b", phase="decode", tokens=2**20, batch=4, tp=8, kv_cache=kind)).best
        for kind in ("bf16", "fp8")
    )
    assert fp8.memory.kv_cache == plain.memory.kv_cache / 2
    assert fp8.prediction.attention_compute_s == pytest.approx(plain.prediction.attention_compute_s / 2, rel=0.02)


def test_passes_that_are_accumulated_add_up():
    once, four = (build_plan(question(phase="train", tp=8, accumulate=n)).best for n in (1, 4))
    assert four.prediction.forward.total_s == pytest.approx(4 * once.prediction.forward.total_s)
    assert four.memory == once.memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel": 2}, "pipeline_parallel=2: .*not modelled"),
        ({"expert_parallel": 8}, "expert_parallel=8: .*not modelled"),
        ({"offload": True}, "offload=True: .*not modelled"),
    ],
)
def test_features_that_are_not_modelled_are_refused_by_name(options, message):
    with pytest.raises(RingspanError, match=message):
        rs.plan(model="llama-3.1-8b", devices="8xh100", tokens=2**17, phase="train", **options)


def test_software_is_planned_with_what_it_has():
    found = rs.plan(model="hunyuanvideo", devices="8xh100", software="usp")
    assert {option.setup.algorithm for option in found.options if option.setup.cp > 1} == {
        "pass_kv",
        "ulysses",
        "hybrid",
    }
    assert dict(found.illegal)["all-gather"] == "usp has none"


def test_a_plan_in_python_is_the_plan_of_the_command_line():
    value = rs.plan(model="llama-3.1-8b", devices="8xh100", tokens=2**17)
    data = json.loads(run(*SMALL, "--json").output)
    assert [option["total_s"] for option in data["options"]] == [it.prediction.total_s for it in value.options]
    assert data["options"][0]["low_s"] == value.best.low_s
    assert len(data["tied"]) == len(value.tied)


def test_memory_of_wan_is_that_of_its_published_peaks(subtests):
    """`comp_effic.png`, A100, text encoder and transformer sharded: 52.5, 36.6 and 28.6 GB."""
    for devices, published in ((2, 52.5e9), (4, 36.6e9), (8, 28.6e9)):
        with subtests.test(f"{devices}, {published}"):
            plan = rs.plan(
                model="wan2.1-14b",
                devices=f"{devices}xa100",
                software="usp",
                is_resident=True,
                shards_weights=True,
                batch=1,
            )
            option = next(it for it in plan.options if it.setup.algorithm == "ulysses" and it.setup.tp == 1)
            used = option.memory.total - option.memory.reserve
            assert used == pytest.approx(published, rel=0.15)


def test_training_counts_logits_and_sliding_layers_their_window():
    train = rs.plan(model="llama-3.1-8b", devices="8xh100", tokens=2**17, phase="train", shards_weights=True, tp=1)
    assert train.best.memory.logits == 2**14 * 128256 * 10
    gemma = rs.plan(model="gemma-3-27b", devices="8xh100", tokens=2**17, tp=1, weights="fp8").best
    per_token = 2 * 16 * 128 * 2
    assert gemma.memory.kv_cache == per_token * (10 * 2**14 + 52 * 128)


def test_a_range_is_the_root_of_the_sum_of_squares():
    device = load_device("h100")
    parts = {"attention compute": 3.0, "messages of attention": 1.0}
    spread = math.hypot(0.75 * SPREADS["attention compute"], 0.25 * SPREADS["messages of attention"], COMMON)
    assert spread_of(parts, device) == pytest.approx(spread)
    low, high = range_of(parts, device)
    assert high == 1 / low == pytest.approx(math.exp(Z80 * spread))
    assert spread_of(parts, load_device("h20")) > spread


def test_what_two_ways_share_does_not_part_them():
    device = load_device("h100")
    first = {"attention compute": 1.0, "messages of attention": 0.1}
    assert spread_between(first, {name: 2 * seconds for name, seconds in first.items()}, device) == BETWEEN
    assert not is_tie(first, {"attention compute": 1.2, "messages of attention": 0.12}, device)
    assert is_tie(first, {"attention compute": 1.09}, device)


@pytest.mark.parametrize(
    ("words", "start", "code"),
    [
        (["--target-ttft", "1s"], "✓ 2x8", 0),
        (["--target-ttft", "1us"], "Error: ", 2),
        pytest.param(
            ["--target-ttft", "1ms"], "✗ no number of h100-sxm up to 1,024 reaches 1ms", 3, marks=pytest.mark.wide
        ),
        (["--target-ttft", "1s", "--phase", "decode"], "Error: --target-ttft is for prefill", 2),
        (["--max-context"], "✓ ", 0),
        (["--max-batch", "--phase", "decode"], "✓ ", 0),
        (["--max-batch", "--max-context"], "Error: --max-context and --max-batch are two questions", 2),
        (["--max-batch", "--trace", "x"], "Error: --trace has no meaning for --max-batch", 2),
        (["--price", "a100=2"], "Error: --price 'a100=2' is for a100", 2),
        (["--price", "h100=free"], "Error: --price 'h100=free': 'h100=free' is not DEVICE=PRICE", 2),
        (["--price", "abacus=2"], "Error: --price 'abacus=2': 'abacus' is not one of the devices", 2),
        (["--max-context", "--explain"], "Error: --explain has no meaning for --max-context", 2),
        (["--sweep", "tokens"], "Error: --sweep 'tokens'", 2),
        (["--sweep", "tokenz=4K"], "Error: --sweep 'tokenz=4K'", 2),
        (["--sweep", "tokens=4K,many"], "Error: --sweep tokens=many", 2),
        (["--sweep", "tokens=4K", "tokens=8K"], "Error: --sweep 'tokens=8K': tokens are given twice", 2),
        (["--sweep", "devices=8xh100,8xa100", "--price", "h100=2"], "Error: --price 'h100=2' has no price of a100", 2),
        (["devices=8xh100"], "Error: unexpected argument", 2),
        (["--rows", "."], "Error: --rows goes with --check", 2),
        (["--pp", "2"], "Error: --pp 2: ", 2),
        (["--link", "infiniband-hdr"], "Error: --link infiniband-hdr", 2),
        (["--software", "mine"], "Error: --software mine: it is not known", 2),
    ],
)
def test_answers_come_first_and_the_exit_code_says_whether_there_is_one(words, start, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*SMALL, *words)
    assert result.exit_code == code, result.output
    first = next(line for line in result.output.splitlines() if line.strip())
    if start == "✓ 2x8":
        assert " h100-sxm reach 1s" in first
    else:
        assert first.startswith(start), first
    if code == 2:
        assert len(result.output.strip().splitlines()) == 1


TTFT = ("--tokens", "64K", "--target-ttft", "1s")


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (["--devices", "8xh100", "--max-context"], ["--devices", "8xh100", "--max-context", "--tokens", "4K"]),
        (["--devices", "h100", *TTFT], ["--devices", "1xh100", *TTFT]),
        (
            ["--sweep", "tokens=64K,128K", "devices=8xh100"],
            ["--devices", "8xh100", "--tokens", "64K", "--sweep", "tokens=64K,128K"],
        ),
    ],
    ids=["max-context", "target-ttft", "sweep"],
)
def test_a_question_needs_no_option_that_it_answers(short, long):
    model = ("--model", "llama-3.1-8b", "--json")
    first, second = run(*model, *short), run(*model, *long)
    assert first.exit_code == 0, first.output
    assert json.loads(first.output) == json.loads(second.output)


def test_a_sweep_is_a_table_and_a_plot(tmp_path):
    path = tmp_path / "sweep.svg"
    words = ["--sweep", "tokens=64K,128K,1M", "devices=8xh100,2x8xh100", "--price", "h100=2", "--plot", str(path)]
    result = run(*SMALL, *words)
    assert result.exit_code == 0, result.output
    assert result.output.count("x8xh100-sxm") == 6
    lines = ET.fromstring(path.read_text()).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 2


def test_every_cluster_of_a_sweep_has_its_own_price_and_kernel():
    words = ("--model", "llama-3.1-8b", "--software", "megatron", "--price", "a100=1,h100=2", "--json")
    result = run(*words, "--sweep", "tokens=64K", "devices=8xh100,8xa100")
    assert result.exit_code == 0, result.output
    answers = json.loads(result.output)["answers"]
    assert [answer["device"] for answer in answers] == ["h100-sxm", "a100-sxm-80gb"]
    for answer, price in zip(answers, (2, 1), strict=True):
        assert answer["cost"]["per_unit"] == pytest.approx(8 * price * answer["option"]["total_s"] / 3600)
    alone = run(*words[:4], "--devices", "8xh100", "--tokens", "64K", "--json")
    assert answers[0]["option"]["total_s"] == json.loads(alone.output)["options"][0]["total_s"]


def test_a_batch_of_a_video_is_counted_in_forwards():
    output = run("--model", "wan2.1-14b", "--devices", "8xh100", "--max-batch").output
    assert "17 forwards are the largest batch that fits" in output
    assert "with guidance a video takes 2 of them: 8 videos" in " ".join(output.split())


def test_a_video_says_how_many_forwards_and_how_long_the_whole_takes():
    output = " ".join(run("--model", "wan2.1-14b", "--devices", "8xh100", "--price", "h100=2").output.split())
    assert "with guidance, a step is two forwards" in output
    assert "whole video about" in output
    assert "on one device, not parallel here" in output
    assert "cfg 2 × cp 4" in output
    assert "per video" in output


def test_the_fixed_part_of_a_video_grows_with_its_tokens():
    usual, twice = (rs.plan(model="wan2.1-1.3b", devices="1xh100", tokens=n).video for n in (32_760, 65_520))
    assert twice.fixed_s == pytest.approx(2 * usual.fixed_s)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tokens": "128K"}, "tokens: expected a whole number"),
        ({"batch": 0}, "batch=0: too small"),
        ({"batch": "2"}, "batch: expected a whole number"),
        ({"model": None}, "model: expected a name"),
        ({"devices": 8}, "devices: expected a name"),
        ({"nope": 1}, "plan has no argument nope; use one of phase"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(wrong, message):
    with pytest.raises(rs.RingspanError, match=message):
        rs.plan(**({"model": "llama-3.1-8b", "devices": "8xh100", "tokens": 1024} | wrong))

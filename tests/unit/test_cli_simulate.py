"""`ringspan simulate` as a user meets it: what it prints, and that it is true."""

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from ringspan import blocks, causal, chunks, documents, frame_causal, full, prefix, sliding_window
from ringspan.cli import main
from ringspan.cli.page import explain_grid
from ringspan.cli.values import parse_mask
from ringspan.schedule import parse_schedule
from ringspan.simulate.lesson.dense import check, dense_attention
from support.oracle import dense_attention as oracle_attention
from support.oracle import dense_mask

ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")


def simulate(*args: str, **env: str) -> Result:
    """The lesson, or JSON if that is asked for."""
    report = () if "--json" in args else ("--lesson",)
    return CliRunner().invoke(main, ["simulate", *report, *args], env={"COLUMNS": "100", "NO_COLOR": None, **env})


def simulate_json(*args: str) -> dict[str, Any]:
    result = simulate(*args, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# What it prints


def test_default_run_is_verified_and_explains_itself() -> None:
    result = simulate()
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "64 tokens, 8 heads over 2 KV heads, head_dim 32, float32, seed 0",
        "2,080 of 4,096 (51 %)",
        "0000000011111111222222223333333333333333222222221111111100000000",
        "0         16  0:8 56:64",
        "contiguous 1.74, zigzag 1.00",
        "rank r at step t has the block of rank (r - t) mod 4",
        "pass-KV          12  k, v      2×16×(32+32)×4    8,192        98,304",
        "17 17 17 17",
        "✓ All 10 results agree with dense attention.",
    ):
        assert part in result.stdout, part
    assert 100 <= len(result.stdout.splitlines()) <= 140
    errors = re.findall(r"✓ (\d\.\de-\d\d)", result.stdout)
    assert len(errors) == 10
    assert all(0 < float(error) < 1e-5 for error in errors)


def test_printed_grids_parse_back() -> None:
    grids = {run["algorithm"]: run["grid"] for run in simulate_json()["prefill"]["runs"]}
    lines = [line.strip() for line in simulate().stdout.splitlines()]
    starts = [i for i, line in enumerate(lines) if line == "4 ranks"]
    printed = []
    for start in starts:
        stop = next(i for i in range(start + 1, len(lines)) if "│" not in lines[i])
        printed.append(parse_schedule("\n".join(lines[start:stop])))
    assert printed[:2] == [parse_schedule(grids["pass_kv"]), parse_schedule(grids["pass_q"])]
    assert len(printed) == 3  # and that of decode


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--algorithm", "pass-q"),
        ("--layout", "contiguous"),
        ("--layout", "contiguous", "--algorithm", "pass-q", "--algorithm", "pass-kv"),
        ("--algorithm", "ulysses", "--heads", "4", "--kv-heads", "4"),
        ("--algorithm", "all-gather", "--algorithm", "hybrid", "--mesh", "2x2"),
        ("--devices", "1"),
        ("--devices", "20", "--mask", "window:-3:20"),
    ],
)
def test_legend_explains_what_is_in_the_grid_and_all_of_it(args: tuple[str, ...]) -> None:
    told: set[str] = set()
    for run in simulate_json(*args)["prefill"]["runs"]:
        legend = dict(explain_grid(run["grid"]))
        for topic, sentence in legend.items():
            example = sentence.split()[0].removesuffix(":")
            assert topic == "grid" or example in run["grid"], sentence
        told |= set(legend)
        kinds = set(re.findall(r"([a-z]+)\d+\S*→", run["grid"]))
        assert kinds <= told
        assert ("heads" in legend) == ("[" in run["grid"])


def test_legend_follows_the_options() -> None:
    def text(*args: str) -> str:
        return " ".join(simulate(*args).stdout.split())

    pass_q, contiguous = text("--algorithm", "pass-q"), text("--layout", "contiguous")
    assert "q0→1: meanwhile send the queries of rank 0 to rank 1" in pass_q
    assert "kv0→1:" not in pass_q
    assert "q1×kv0: attend the queries of rank 1 to the keys and values of rank 0" in contiguous
    ulysses = text("--algorithm", "ulysses", "--heads", "4", "--kv-heads", "4")
    assert "[1:2]: only head 1." in ulysses
    assert "direction" not in ulysses
    assert "Try also --layout contiguous, --mask 'causal & window:16', --devices 8." in ulysses


def test_follows_a_query_that_meets_several_blocks() -> None:
    query = simulate_json("--mask", "window:-3:20")["prefill"]["one_query"]
    assert len(query["meetings"]) == 4
    assert all(meeting["weight_fraction"] > 0 for meeting in query["meetings"])
    assert sum(meeting["weight_fraction"] for meeting in query["meetings"]) == pytest.approx(1)
    assert "Follow token" not in simulate("--mask", "window:0").stdout  # one block each: nothing to merge


def test_lines_in_a_file_end_where_their_text_ends(subtests: pytest.Subtests) -> None:
    for args in ((), ("--algorithm", "ulysses")):
        with subtests.test(f"{args}"):
            assert not [line for line in simulate(*args).stdout.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--algorithm", "ulysses", "--algorithm", "hybrid", "--mesh", "2x2", "--tokens", "301"),
        ("--devices", "17", "--layout", "striped:3", "--tokens", "200"),
    ],
)
def test_nothing_is_cut_off(width: int, args: tuple[str, ...]) -> None:
    result = simulate(*args, COLUMNS=str(width))
    assert result.exit_code == 0
    assert "…" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= width


def test_wide_grid_is_continued_below_without_loss() -> None:
    actions = [re.findall(r"\S+[×→↔]\S+", simulate(COLUMNS=width).stdout) for width in ("80", "200")]
    assert sorted(actions[0]) == sorted(actions[1])
    assert len(actions[1]) > 60


def test_many_ranks_are_left_to_json_and_said_so() -> None:
    result = simulate("--devices", "20")
    assert result.exit_code == 0
    assert "(and 4 more ranks; --json has them all)" in result.stdout
    assert "(10 of 20 steps, 8 of 20 ranks; --json has them all)" in result.stdout
    data = simulate_json("--devices", "20")
    assert len(data["prefill"]["shards"]) == 20
    assert parse_schedule(data["prefill"]["runs"][0]["grid"]).world_size == 20


def test_colour_only_where_it_is_wanted() -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert "\x1b" not in simulate().stdout
    assert ANSI_COLOUR.search(simulate(**terminal).stdout)
    assert not ANSI_COLOUR.search(simulate(**terminal, NO_COLOR="1").stdout)


def test_a_single_device_has_nothing_to_choose() -> None:
    result = simulate("--devices", "1")
    assert result.exit_code == 0
    assert "nothing to choose" in result.stdout
    assert simulate_json("--devices", "1")["choices"] is None


def test_documents_that_end_leave_no_next_token() -> None:
    ends, goes_on = (f"causal & documents:24,{n}" for n in (40, 44))
    assert "has no next token" in simulate("--mask", ends).stdout
    assert simulate_json("--mask", ends)["decode"]["one_sequence"] is None
    assert simulate_json("--mask", goes_on)["decode"]["one_sequence"]["mask"] == "causal() & documents([24, 44])"
    two_more = simulate_json("--mask", "causal & documents:24,42")["decode"]
    assert (len(two_more["one_sequence"]["steps"]), len(two_more["batch"]["steps"])) == (2, 4)


@pytest.mark.parametrize(
    ("args", "share"),
    [("--tokens 512 --mask prefix:511", "262,144 (> 99 %)"), ("--tokens 512 --mask window:0", "262,144 (< 1 %)")],
)
def test_a_share_is_not_rounded_to_all_or_nothing(args: str, share: str) -> None:
    assert share in simulate(*args.split()).stdout


# That it is true


def test_json_has_these_keys() -> None:
    data = simulate_json()
    assert set(data) == {
        "version", "parameters", "prefill", "decode", "choices", "num_checks", "failures", "other_bits", "is_verified",
    }  # fmt: skip
    assert data["parameters"] == {
        "world_size": 4, "seq_len": 64, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32, "dtype": "float32",
        "mask": "causal()", "layout": "zigzag", "algorithms": ["pass_kv", "pass_q"], "direction": "forward",
        "mesh": None, "seed": 0, "reproducible": False,
    }  # fmt: skip
    assert set(data["prefill"]) == {"shards", "work", "reference", "runs", "one_query", "one_device_digest"}
    assert set(data["prefill"]["runs"][0]) == {
        "algorithm", "num_steps", "grid", "steps", "traffic", "sent_bytes", "sent_bytes_per_rank",
        "largest_rank_step_bytes", "check", "bits",
    }  # fmt: skip
    assert set(data["decode"]) == {"one_sequence", "batch"}
    assert set(data["decode"]["batch"]["steps"][0]) == {
        "step", "new_token_ranks", "cache_tokens_per_rank", "sent_bytes", "check",
    }  # fmt: skip
    assert data["is_verified"] is True
    assert data["failures"] == []


def test_positions_and_work_are_those_of_the_definition() -> None:
    data = simulate_json("--tokens", "48", "--devices", "3")["prefill"]
    chunks = [list(range(8 * i, 8 * i + 8)) for i in range(6)]
    held = [chunks[rank] + chunks[5 - rank] for rank in range(3)]
    assert [shard["positions"] for shard in data["shards"]] == held
    blocks = {"contiguous": [list(range(16 * rank, 16 * rank + 16)) for rank in range(3)], "zigzag": held}
    assert [work["layout"] for work in data["work"]] == list(blocks)
    for work in data["work"]:
        tokens = blocks[work["layout"]]
        pairs = [[sum(kv <= q for q in tokens[r] for kv in tokens[(r - t) % 3]) for r in range(3)] for t in range(3)]
        assert work["pairs_per_step"] == pairs
        assert work["pairs_per_rank"] == [sum(column) for column in zip(*pairs, strict=True)]
        assert work["imbalance"] == pytest.approx(sum(map(max, pairs)) * 3 / (48 * 49 / 2))
    assert data["work"][1]["imbalance"] == 1.0
    assert data["reference"]["visible_pairs"] == 48 * 49 // 2


def test_reverse_turns_the_ring_and_the_work_with_it() -> None:
    data = simulate_json("--direction", "reverse", "--layout", "contiguous")["prefill"]
    first = data["runs"][0]["steps"]
    assert [cell["sends"][0]["dst"] for cell in first[0][:3]] == [3, 0, 1]
    tokens = [range(16 * rank, 16 * rank + 16) for rank in range(4)]
    pairs = [[sum(kv <= q for q in tokens[r] for kv in tokens[(r + t) % 4]) for r in range(4)] for t in range(4)]
    assert data["work"][0]["pairs_per_step"] == pairs
    assert data["work"][0]["imbalance"] == pytest.approx(sum(map(max, pairs)) * 4 / 2080)
    assert "previous rank, so rank r at step t has the block of rank (r + t) mod 4" in " ".join(
        simulate("--direction", "reverse").stdout.split()
    )


def test_bytes_are_those_of_the_tensors() -> None:
    pass_kv, pass_q = simulate_json("--tokens", "32", "--head-dim", "16", "--heads", "6", "--kv-heads", "3")["prefill"][
        "runs"
    ]
    kv, q, out = 2 * 3 * 8 * 16 * 4, 6 * 8 * 16 * 4, 6 * 8 * (16 + 1) * 4
    assert [(t["kind"], t["num_messages"], t["largest_bytes"]) for t in pass_kv["traffic"]] == [("kv", 12, kv)]
    assert [(t["kind"], t["num_messages"], t["largest_bytes"]) for t in pass_q["traffic"]] == [
        ("q", 12, q), ("out", 12, out),
    ]  # fmt: skip
    assert pass_kv["sent_bytes"] == 12 * kv
    assert pass_kv["sent_bytes_per_rank"] == [3 * kv] * 4
    assert pass_kv["largest_rank_step_bytes"] == kv
    assert pass_q["sent_bytes"] == 12 * (q + out)
    assert pass_q["largest_rank_step_bytes"] == q + out


def test_steps_say_the_same_as_the_grid() -> None:
    for run in simulate_json("--mask", "window:9", "--tokens", "50")["prefill"]["runs"]:
        schedule = parse_schedule(run["grid"])
        for t, step in enumerate(run["steps"]):
            for rank, cell in enumerate(step):
                actions = schedule.actions(rank, t)
                assert [f"{sent['block']}→{sent['dst']}" for sent in cell["sends"]] == list(map(str, actions.sends))
                assert [f"{tile['q']}×{tile['kv']}" for tile in cell["attends"]] == list(map(str, actions.attends))


def test_cache_stays_balanced_while_decoding() -> None:
    decode = simulate_json("--devices", "3", "--tokens", "48")["decode"]
    one, batch = decode["one_sequence"], decode["batch"]
    assert [step["new_token_ranks"] for step in one["steps"]] == [[0], [1], [2], [0]]
    assert [step["cache_tokens_per_rank"] for step in one["steps"]] == [
        [17, 16, 16], [17, 17, 16], [17, 17, 17], [18, 17, 17],
    ]  # fmt: skip
    assert one["unrotated_cache_tokens_per_rank"] == [20, 16, 16]
    assert [step["new_token_ranks"] for step in batch["steps"]] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [step["cache_tokens_per_rank"] for step in batch["steps"]] == [[n, n, n] for n in (17, 18, 19, 20)]
    assert all(step["check"]["is_verified"] for run in (one, batch) for step in run["steps"])


def test_one_query_adds_up_its_softmax_weight() -> None:
    data = simulate_json("--seed", "3")
    query = data["prefill"]["one_query"]
    assert (query["position"], query["rank"]) == (63, 0)
    assert [meeting["kv_owner"] for meeting in query["meetings"]] == [0, 3, 2, 1]
    rng = np.random.default_rng(3)
    q, k, _ = (rng.standard_normal((heads, 64, 32), dtype=np.float32)[0].astype(float) for heads in (8, 2, 2))
    weights = np.exp(q[63] @ k.T / np.sqrt(32))
    for meeting, shard in zip(query["meetings"], [0, 3, 2, 1], strict=True):
        share = weights[data["prefill"]["shards"][shard]["positions"]].sum() / weights.sum()
        assert meeting["weight_fraction"] == pytest.approx(share, abs=1e-12)
    assert query["added_error"] > 0.1


def test_rule_picks_pass_q_at_1_percent_and_pass_kv_at_15() -> None:
    choices = simulate_json()["choices"]
    assert (choices["num_keys"], choices["world_size"], choices["flops_per_byte"]) == (128_000, 4, 18_000)
    picks = {row["miss_rate"]: row["algorithm_5"] for row in choices["rows"]}
    assert list(picks) == [0.01, 0.025, 0.05, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0]
    assert (picks[0.01], picks[0.1], picks[0.15], picks[1.0]) == ("pass_q", "pass_q", "pass_kv", "pass_kv")
    for row in choices["rows"]:
        hidden = row["new_tokens"] >= 4 * 18_000 * 2 * 2 / (2 * 8)
        limit = 2 * 2 / 8 - 4 * row["new_tokens"] / (4 * 18_000 * 2)
        assert row["algorithm_5"] == ("pass_kv" if hidden or row["miss_rate"] >= limit else "pass_q")
        assert row["algorithm_1"] == ("pass_kv" if hidden or row["miss_rate"] >= 0.5 else "pass_q")
        assert row["reason_5"].startswith(row["algorithm_5"])
    text = simulate().stdout
    assert re.search(r" 1\.0 % +1,280 +pass-Q +1\.0 % < 46\.4 % ", text)
    assert re.search(r"15\.0 % +19,200 +pass-KV +KV hidden: 19,200 ≥ 18,000 ", text)


@pytest.mark.parametrize(
    "args",
    [
        ("--algorithm", "all-gather", "--algorithm", "ulysses"),
        ("--algorithm", "hybrid", "--algorithm", "double-ring", "--mesh", "2x2", "--direction", "reverse"),
        ("--tokens", "1"),
        ("--tokens", "3"),
        ("--devices", "5", "--tokens", "37", "--mask", "frames:5:3", "--layout", "striped:2"),
        (
            "--devices",
            "2",
            "--mask",
            "prefix:9 | window:3:3",
            "--layout",
            "balanced",
            "--tokens",
            "600",
            "--heads",
            "2",
        ),
        ("--heads", "1", "--kv-heads", "1", "--head-dim", "1", "--mask", "full", "--layout", "contiguous"),
    ],
)
def test_options_work_together(args: tuple[str, ...]) -> None:
    data = simulate_json(*args)
    algorithms = [value.replace("-", "_") for name, value in itertools.pairwise(args) if name == "--algorithm"]
    assert [run["algorithm"] for run in data["prefill"]["runs"]] == (algorithms or ["pass_kv", "pass_q"])
    assert data["is_verified"]
    assert simulate(*args).exit_code == 0


@pytest.mark.parametrize(("heads", "kv_heads"), [("1", 1), ("7", 1), ("6", 2), ("8", 2)])
def test_default_kv_heads_divide_the_query_heads(heads: str, kv_heads: int) -> None:
    assert json.loads(simulate("--heads", heads, "--json").stdout)["parameters"]["num_kv_heads"] == kv_heads


@pytest.mark.parametrize("name", ["all-gather", "all_gather", "All-Gather", "ALL_GATHER"])
def test_an_algorithm_may_be_spelled_as_python_or_the_report_does(name: str) -> None:
    assert json.loads(simulate("--algorithm", name, "--json").stdout)["parameters"]["algorithms"] == ["all_gather"]


def test_tokens_may_be_given_in_k() -> None:
    assert simulate_json("--tokens", "1k", "--heads", "1", "--kv-heads", "1")["parameters"]["seq_len"] == 1024


def test_seed_changes_the_numbers_and_nothing_else_does() -> None:
    first, again, other = (simulate_json("--seed", seed)["prefill"]["reference"] for seed in ("7", "7", "8"))
    assert first == again
    assert first["out_sample"] != other["out_sample"]


@pytest.mark.parametrize(
    ("text", "mask", "spec"),
    [
        ("full", full(), ("full",)),
        ("causal", causal(), ("causal",)),
        ("window:4", sliding_window(4, 0), ("sliding_window", 4, 0)),
        ("window:4:-2", sliding_window(4, -2), ("sliding_window", 4, -2)),
        ("prefix:5", prefix(5), ("prefix", 5)),
        ("documents:3,9", documents([3, 9]), ("documents", (3, 9))),
        ("frames:3", frame_causal(3), ("frame_causal", 3, 0)),
        ("frames:3:2", frame_causal(3, 2), ("frame_causal", 3, 2)),
        ("chunks:5", chunks(5), ("chunks", 5, 0)),
        (
            "causal|blocks:1,4:6,9",
            causal() | blocks([(1, 4), (6, 9)]),
            ("or", ("causal",), ("blocks", ((1, 4), (6, 9)))),
        ),
        (
            " window:2:2&documents:3,9 | prefix:1 ",
            sliding_window(2, 2) & documents([3, 9]) | prefix(1),
            ("or", ("and", ("sliding_window", 2, 2), ("documents", (3, 9))), ("prefix", 1)),
        ),
    ],
)
def test_masks_are_read_and_the_reference_is_right(text: str, mask: Any, spec: Any) -> None:
    assert parse_mask(text) == mask
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((heads, 12, 5)) for heads in (4, 2, 2))
    positions = np.arange(12)
    out, lse = dense_attention(q, k, v, mask, positions, positions, np.float64)
    true_out, true_lse = oracle_attention(q, k, v, dense_mask(spec, positions, positions))
    np.testing.assert_allclose(out, true_out, atol=1e-14)
    np.testing.assert_allclose(lse, true_lse, atol=1e-14)


def test_check_accepts_rounding_and_nothing_more(subtests: pytest.Subtests) -> None:
    out, lse = np.zeros((1, 3, 2)), np.array([[0.0, 1.0, -np.inf]])
    assert check(out + 9e-6, lse + 9e-6, out, lse).is_verified
    for wrong_out, wrong_lse in (
        (out + 2e-5, lse),
        (out, lse + 2e-5),
        (out + np.nan, lse),
        (out, np.array([[0.0, 1.0, -50.0]])),
        (out, np.array([[0.0, -np.inf, -np.inf]])),
    ):
        with subtests.test(f"{wrong_out}, {wrong_lse}"):
            assert not check(wrong_out, wrong_lse, out, lse).is_verified
    assert check(out + np.nan, lse, out, lse).out_error is None


def test_help_has_examples_and_version_is_told() -> None:
    assert "ringspan simulate --json" in simulate("--help").stdout
    assert CliRunner().invoke(main, ["--version"]).stdout.startswith("ringspan, version 0.")

"""Predictions held against published measurements: the limits are kept, and the check would notice if they were not."""

import csv
import json
from collections import Counter
from importlib.resources import files

import pytest
from click.testing import CliRunner

import ringspan.planner.published.check as check
from ringspan.cli import main
from ringspan.planner.catalog import load_model, parse_devices
from ringspan.planner.catalog.files import read_data
from ringspan.planner.plan import Request, Setup, predict
from ringspan.planner.plan.caveats import SHORT_RATIO
from ringspan.planner.published import MEDIAN_LIMIT, SOURCE_LIMIT, WINNERS_LIMIT, run_check
from ringspan.planner.published.rows import read_rows


@pytest.fixture(scope="module")
def result():
    return run_check()


def test_the_limits_are_kept(result):
    assert result.median_error <= MEDIAN_LIMIT == 0.12
    assert result.worst_source_error <= SOURCE_LIMIT == 0.25
    assert result.winners_right >= WINNERS_LIMIT == 0.85
    assert len(result.winners) > 100
    assert len(result.parameters) <= 25
    assert result.is_passed


def test_every_row_with_a_value_is_there_once():
    ids = Counter(row.id for row in read_rows())
    assert set(ids.values()) == {1}
    num_rows = 0
    for path in (files("ringspan.planner.published") / "data").iterdir():
        if path.name.endswith(".csv"):
            rows = list(csv.DictReader(path.read_text().splitlines()))
            num_rows += len([row for row in rows if row.get("status", "ok") in ("ok", "label_half_hidden")])
    assert sum(ids.values()) == num_rows


def test_no_row_that_is_to_validate_was_fitted():
    """As data/README.md marks the files: one-GPU rows of three of them calibrate, the others validate."""
    for row in read_rows():
        if row.table in ("prefill_ttft", "decode_ttit", "cp_attention_iters", "cp_speedup"):
            assert row.use in ("judged", "apart")
        if row.table in ("attention_kernel_throughput", "ring_step_time", "decode_attention_time"):
            assert row.use in ("fitted", "unused")
        if row.table in ("cp_attention_throughput", "dit_latency", "dit_step_time"):
            assert (row.use == "fitted") == (row.fields["n_gpus"] == "1")


@pytest.mark.parametrize(("model", "batch", "most"), [("hunyuanvideo", 1, 0.06), ("wan2.1-14b", 2, 0.01)])
def test_a_plan_takes_the_speed_of_a_pipeline_that_was_measured_on_one_device(model, batch, most):
    """The times that the speed was fitted to (two of HunyuanVideo), asked for as a user would."""
    row = next(row for row in read_rows() if row.use == "fitted" and row.fields.get("model") == model)
    size = [int(row.fields[key] or 0) for key in ("frames", "height_px", "width_px")]
    loaded = load_model(model)
    tokens = loaded.video.count_tokens(*(size if all(size) else loaded.video.usual))
    request = Request(loaded, parse_devices("1xh100", kernel="fa2"), "denoise", tokens, batch=batch)
    step_s = predict(request, Setup("pass_kv", "contiguous", 1, 1)).total_s
    assert int(row.fields["steps"] or 50) * step_s == pytest.approx(row.value, rel=most)


def test_short_work_may_take_as_long_as_a_plan_says(result):
    """Of the rows with fewer than 8,192 new tokens on a rank the slowest is that of 1,280 tokens by pass-Q."""
    slowest = max(row.time_ratio for row in result.rows if row.use == "judged")
    assert slowest == pytest.approx(SHORT_RATIO, abs=0.05)


def test_only_what_the_data_calls_erratic_or_inconsistent_stands_apart(result):
    apart = Counter(row.why for row in result.rows if row.use == "apart")
    assert apart["erratic: rows of 8K and shorter"] == 30
    assert apart["a ratio near 1"] == 59
    assert sum(apart.values()) == 30 + 59 + 5 + 3 + 1 + 1


def test_the_range_of_a_plan_is_as_wide_as_the_errors(result):
    accuracy = read_data("accuracy.toml")
    assert accuracy["low"] == pytest.approx(result.low, abs=0.01)
    assert accuracy["high"] == pytest.approx(result.high, abs=0.01)


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_a_planner_that_is_off_fails_the_check(monkeypatch, factor):
    exact = check.predict_row
    monkeypatch.setattr(check, "predict_row", lambda row: exact(row) * factor)
    assert not run_check().is_passed
    assert CliRunner().invoke(main, ["plan", "--check"]).exit_code == 1


def test_a_planner_that_favours_the_wrong_side_fails_the_check(monkeypatch):
    exact = check.predict_row
    monkeypatch.setattr(check, "predict_row", lambda row: row.value if row.use == "fitted" else 1 / exact(row))
    assert run_check().winners_right < 1 - WINNERS_LIMIT


def test_the_command_prints_every_row_and_the_misses():
    outcome = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(main, ["plan", "--check"])
    assert outcome.exit_code == 0
    assert "meta-t4-T1280-pass-q" in outcome.output
    assert "The 24 fitted parameters" in outcome.output
    assert "called wrong" in outcome.output
    data = json.loads(CliRunner().invoke(main, ["plan", "--check", "--json"]).output)
    assert len(data["rows"]) == len(list(read_rows()))

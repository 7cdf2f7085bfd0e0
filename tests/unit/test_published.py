"""Predictions held against published measurements: the limits are kept, and the check would notice if they were not."""

import csv
import json
from collections import Counter
from importlib.resources import files

import pytest
from click.testing import CliRunner

import ringspan.planner.published.check as check
from ringspan.cli import main
from ringspan.errors import UnsupportedError
from ringspan.planner.catalog import fitted, fitted_without
from ringspan.planner.catalog.constants import MOST_CONSTANTS, priors
from ringspan.planner.plan import plan
from ringspan.planner.published import (
    COVERAGE_LIMITS,
    MEDIAN_LIMIT,
    SOURCE_LIMIT,
    TIES_LIMIT,
    WIDTH_LIMIT,
    WINNERS_LIMIT,
    run_check,
)
from ringspan.planner.published.check import predict_row
from ringspan.planner.published.rows import Row, read_rows


@pytest.fixture(scope="module")
def result():
    return run_check()


def test_the_limits_are_those_of_the_documentation_and_are_kept(result):
    assert (MEDIAN_LIMIT, SOURCE_LIMIT, WINNERS_LIMIT, TIES_LIMIT, WIDTH_LIMIT) == (0.12, 0.30, 0.90, 0.25, 2.0)
    assert COVERAGE_LIMITS == (0.70, 0.90)
    assert result.median_error <= MEDIAN_LIMIT
    assert result.winners_right >= WINNERS_LIMIT
    assert result.ties <= TIES_LIMIT
    assert COVERAGE_LIMITS[0] <= result.coverage <= COVERAGE_LIMITS[1]
    assert result.width <= WIDTH_LIMIT
    assert len(result.winners) > 150


def test_there_are_at_most_25_fitted_constants_and_each_says_what_it_rests_on(result):
    assert len(result.constants) <= MOST_CONSTANTS == 25
    assert set(priors()) == set(result.constants)
    for name, prior in priors().items():
        assert prior.source, name
        assert prior.rows, name
        assert 0 < prior.spread <= 1


def test_every_row_with_a_value_is_there_once():
    ids = Counter(row.id for row in read_rows())
    assert set(ids.values()) == {1}
    num_rows = 0
    for path in (files("ringspan.planner.published") / "data").iterdir():
        if path.name.endswith(".csv"):
            rows = list(csv.DictReader(path.read_text().splitlines()))
            num_rows += len([row for row in rows if row.get("status", "ok") in ("ok", "label_half_hidden")])
    assert sum(ids.values()) == num_rows


def test_a_source_is_a_paper_or_repository_with_all_its_tables():
    sources = {row.source for row in read_rows()}
    assert "arXiv:2411.01783" in sources  # Tables 4 to 8 and an appendix
    assert "feifeibear/long-context-attention" in sources  # two pictures
    assert not any(" " in source or "Table" in source for source in sources)


def test_a_source_is_judged_without_its_own_rows(result):
    """The constants of a source differ from those of plans, and rows are predicted by them."""
    for source in result.sources:
        if source.use == "judged" and source.num_rows > 8:
            assert fitted_without(source.source) != fitted(), source.source
    row = next(row for row in read_rows() if row.source == "SandAI-org/MagiAttention" and row.use == "judged")
    judged = next(one for one in result.rows if one.id == row.id)
    assert judged.predicted == predict_row(row, fitted_without(row.source)).value != predict_row(row).value


def test_only_what_the_data_calls_erratic_or_inconsistent_stands_apart(result):
    apart = Counter(row.why for row in result.rows if row.use == "apart")
    assert apart == {
        "erratic: rows of 8K and shorter": 30,
        "a ratio near 1": 59,
        "a formula, not a measurement": 5,
        "printed twice in the source": 5,
        "disagrees with Table 7, and Table 8 supports Table 7": 1,
        "two sources disagree": 1,
    }


def test_rows_of_methods_that_are_not_modelled_are_refused_by_name(result):
    refused = {row.id: row.why or row.refused for row in result.rows if row.predicted is None}
    assert Counter(refused.values()) == {
        "no plan uses this kernel": 35,
        "its own schedule, dispatched by a solver, is not modelled": 8,
    }
    row = next(row for row in read_rows() if row.id in refused)
    with pytest.raises(UnsupportedError, match=row.id):
        predict_row(row)


def test_a_plan_is_what_the_check_checks():
    """The row of HunyuanVideo on 2 H100, asked for as a user would, with the software of the row."""
    row = next(row for row in read_rows() if row.id == "hunyuan-1280x720-h100-2")
    found = plan(model="hunyuanvideo", devices="2xh100", size=(129, 720, 1280), software="usp")
    step_s = row.value / int(row.fields["steps"])
    assert found.best.low_s <= step_s <= found.best.high_s
    assert found.best.prediction.total_s == pytest.approx(step_s, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 1.6])
def test_a_planner_that_is_off_fails_the_check(monkeypatch, factor):
    exact = check.predict_row

    def wrong(row, constants):
        found = exact(row, constants)
        return found._replace(value=found.value * factor)

    monkeypatch.setattr(check, "predict_row", wrong)
    assert not run_check().is_passed
    assert CliRunner().invoke(main, ["plan", "--check"]).exit_code == 1


def test_a_planner_that_favours_the_wrong_side_fails_the_check(monkeypatch):
    exact = check.predict_row

    def wrong(row, constants):
        found = exact(row, constants)
        return found._replace(parts={name: 1 / max(seconds, 1e-9) for name, seconds in found.parts.items()})

    monkeypatch.setattr(check, "predict_row", wrong)
    assert run_check().winners_right < WINNERS_LIMIT


def test_a_planner_that_calls_everything_a_tie_fails_the_check(monkeypatch):
    monkeypatch.setattr(check, "is_tie", lambda *_: True)
    found = run_check()
    assert found.ties == 1
    assert found.winners_right == 0  # ties between times that differ by more than 25 % are wrong
    assert not found.is_passed


def test_the_command_prints_every_row_and_the_misses():
    outcome = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(main, ["plan", "--check"])
    assert "meta-t4-T1280-pass-q" in outcome.output
    assert "fitted constants" in outcome.output
    assert "called wrong" in outcome.output
    assert "Refused: rows that no plan expresses" in outcome.output
    data = json.loads(CliRunner().invoke(main, ["plan", "--check", "--json"]).output)
    assert len(data["rows"]) == len(list(read_rows()))


def test_other_tables_with_the_same_columns_are_judged_too(tmp_path):
    """Each source by the constants fitted without it, as the tables of the package are."""
    table = "dit_latency.csv"
    text = (files("ringspan.planner.published") / "data" / table).read_text()
    (tmp_path / table).write_text(text)
    found = run_check(tmp_path)
    assert len(found.rows) == 24
    wan = next(row for row in read_rows() if row.source == "Wan-Video/Wan2.1")
    ours = next(row for row in found.rows if row.id == wan.id)
    assert ours.predicted == predict_row(wan, fitted_without(wan.source)).value != predict_row(wan, fitted()).value
    outcome = CliRunner().invoke(main, ["plan", "--check", "--rows", str(tmp_path), "--json"])
    assert len(json.loads(outcome.output)["rows"]) == 24


@pytest.mark.parametrize(
    ("name", "reason"), [("mochi-1", "mlp_ratio not found"), (None, "holds no tables with the names")]
)
def test_tables_of_which_no_row_can_be_judged_are_refused(tmp_path, name, reason):
    if name is not None:
        text = (files("ringspan.planner.published") / "data" / "dit_latency.csv").read_text()
        heading, first = text.splitlines()[:2]
        (tmp_path / "dit_latency.csv").write_text(f"{heading}\n{first.replace('hunyuanvideo', name)}\n")
    outcome = CliRunner().invoke(main, ["plan", "--check", "--rows", str(tmp_path)])
    assert outcome.exit_code == 2
    assert outcome.output.startswith("Error: ")
    assert "no row of it can be judged" in outcome.output
    assert reason in outcome.output


def test_the_host_counts_in_short_prefills_and_not_in_decode_from_a_graph():
    """Without it arXiv 2411.01783's arrivals of 1,280 tokens were predicted in a fifth of their time."""
    by_id = {row.id: row for row in read_rows()}
    for name in ("meta-t4-T1280-pass-q", "meta-t4-T1280-pass-kv", "meta-t4-T4160-pass-q"):
        row = by_id[name]
        predicted = predict_row(row, fitted_without(row.source))
        assert predicted.parts["the host issuing operations"] > 0.2 * predicted.value / 1e3
        assert predicted.value > 0.5 * row.value
    assert predict_row(by_id["meta-t7-tp16-ttit"]).parts["the host issuing operations"] == 0


def row_like(start, **fields):
    """A row of the package with other fields."""
    row = next(row for row in read_rows() if row.id.startswith(start))
    return Row(*row[:-1], {**row.fields, **fields})


@pytest.mark.parametrize(
    ("start", "fields", "reason"),
    [
        ("h100-fa3", {"kernel": "Triton"}, "names what is not known: KeyError.'Triton'"),
        ("usp-l20", {"scheme": "llama3"}, "names what is not known"),
        ("usp-l20", {"heads_q": ""}, "a field is missing"),
        ("magi-h100", {"mask": "varlen_causal"}, "mask='varlen_causal' is not modelled"),
        ("dfa-t1", {"model": "16H"}, "its heads are not in the table"),
        ("cogvideox5b-l40-u2", {"model": "llama-3.1-8b"}, "llama-3.1-8b is not a video model"),
    ],
)
def test_a_row_that_no_plan_expresses_is_refused_by_name(start, fields, reason):
    with pytest.raises(UnsupportedError, match=reason):
        predict_row(row_like(start, **fields))


def test_software_that_splits_heads_pads_33_of_them():
    """Megatron's 40 heads on 8 devices take 40/33 of the attention of a ring's 33, beside its dense work."""
    megatron, ring = (predict_row(row_like(f"dfa-t1-1x8-32K-7b-{name}", model="33H")) for name in ("megatron", "dfa"))
    usual, usual_ring = (predict_row(row_like(f"dfa-t1-1x8-32K-7b-{name}")) for name in ("megatron", "dfa"))
    compute = "attention compute"
    assert megatron.parts[compute] / usual.parts[compute] == pytest.approx(40 / 32, rel=1e-3)
    assert ring.parts[compute] / usual_ring.parts[compute] == pytest.approx(33 / 32, rel=1e-2)


def test_where_heads_do_not_divide_a_video_is_split_by_both_ulysses_and_ring():
    """12 heads on 8 devices: 4 × 2."""
    stated, derived = (
        predict_row(row_like("wan21-1.3b-t2v-4090-8", ulysses_degree=u, ring_degree=r)).value
        for u, r in (("4", "2"), ("", ""))
    )
    assert derived == stated

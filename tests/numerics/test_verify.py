"""Targets on ranks: this library, another correct attention, wrong ones, and what a report says of them."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch

import ringspan as rs
from ringspan.verify.cases import VerifyCase
from ringspan.verify.ranks import Hung, Refused, run_threads
from ringspan.verify.run import judge
from ringspan.verify.targets import Target, TargetCall, find_target
from support.gathering_attention import MISTAKES, GatheringTarget

CAUSAL = VerifyCase(2, "contiguous", ("causal",), 10)


def ring(q, k, v, *, causal, group):
    """A function as users have it: full or causal, nothing else."""
    layout = rs.contiguous(rs.gather(q[0, 0, :, 0], rs_layout(q, group), group, dim=0).shape[0], group.world_size)
    return rs.attention(q, k, v, mask=rs.causal() if causal else rs.full(), layout=layout, group=group)


def rs_layout(q, group):
    sizes = group.all_gather_bytes(q.shape[2].to_bytes(4, "little"), 10.0)
    return rs.contiguous(sum(int.from_bytes(size, "little") for size in sizes), group.world_size)


@pytest.mark.parametrize("world_sizes", [(1, 2), (3,), (4,)], ids=str)
def test_this_library_is_right(world_sizes):
    report = rs.verify.check("ringspan", world_sizes=world_sizes)
    assert report.counts()["right"] >= 25 * len(world_sizes)
    assert report.diagnosis is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9))
def test_no_false_alarm_on_this_library(seed):
    assert rs.verify.verify("ringspan", seed=seed).failures == ()


@pytest.mark.slow
def test_this_library_is_right_in_the_thorough_table():
    assert rs.verify.verify("ringspan", world_sizes=(2, 3, 8), thorough=True).failures == ()


@pytest.mark.parametrize("algorithm", ["pass_q", "ulysses"])
def test_one_algorithm_of_this_library(algorithm):
    report = rs.verify.check(f"ringspan:{algorithm}", world_sizes=(3,))
    assert report.target == f"ringspan:{algorithm}"


def test_another_correct_attention_is_right():
    report = rs.verify.check(GatheringTarget(), world_sizes=(2, 3))
    assert report.counts() == {"right": 54}


def examine_mistakes(names: list[str], world_size: int) -> int:
    """How many are named; all must be caught."""
    num_named = 0
    for name in names:
        report = rs.verify.verify(GatheringTarget(name), world_sizes=(world_size,))
        assert not report.has_passed, name
        assert report.diagnosis is not None
        num_named += report.diagnosis.mistake in MISTAKES[name]
    return num_named


@pytest.mark.wide
def test_mistakes_that_the_diagnosis_was_not_written_for():
    names = list(MISTAKES)[::4]
    assert examine_mistakes(names, 2) >= 0.7 * len(names)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_all_mistakes_that_the_diagnosis_was_not_written_for(world_size):
    assert examine_mistakes(list(MISTAKES), world_size) >= 0.7 * len(MISTAKES)


def test_a_function_is_asked_only_for_what_its_parameters_can_say():
    report = rs.verify.check(ring, world_sizes=(2,))
    assert report.counts()["right"] >= 5
    assert report.counts()["not asked"] >= 10
    asked = {part for verdict in report.verdicts if verdict.status == "right" for part in verdict.case.features}
    assert {"causal", "full", "gqa", "odd_length"} <= asked
    assert not asked & {"window", "sinks", "documents"}


class IgnoresWindow(Target):
    """Takes a window and drops it, and does not declare it."""

    features = ("causal", "full", "float32", "float64", "backward", "gqa", "odd_length", "few_heads")

    def attend(self, call):
        refused = call.case.features - {*self.features, "window"}
        if refused:
            raise NotImplementedError(f"cannot do {sorted(refused)}")
        mask = rs.causal() if call.is_causal else rs.full()
        return rs.attention(call.q, call.k, call.v, mask=mask, layout=call.layout, group=call.group)


def test_undeclared_features_must_be_refused_not_computed_wrongly():
    report = rs.verify.verify(IgnoresWindow(), world_sizes=(2,))
    assert not report.has_passed
    assert {verdict.missing for verdict in report.failures} == {("window",)}
    assert report.diagnosis is not None
    assert report.diagnosis.mistake == "window ignored"
    assert report.counts()["refused"] >= 8
    with pytest.raises(AssertionError, match=r"(?s)NOT right.*window ignored.*does not declare window"):
        rs.verify.check(IgnoresWindow, world_sizes=(2,))


def test_refusing_what_is_declared_is_an_error():
    outcome = Refused("ValueError", "no")
    assert judge(CAUSAL, outcome)[0].status == "error"
    assert not judge(CAUSAL, outcome)[0].has_passed
    assert judge(CAUSAL, outcome, ("causal",))[0].has_passed
    assert not judge(CAUSAL, Hung("late"), ("causal",))[0].has_passed


def test_a_target_that_refuses_everything_has_not_passed():
    class Refuses(Target):
        features = ()

        def attend(self, call: TargetCall):
            raise NotImplementedError("no")

    report = rs.verify.verify(Refuses(), world_sizes=(2,))
    assert report.failures == ()
    assert not report.has_passed
    assert "\n  refused: NotImplementedError: no\nno case was computed: nothing is known" in report.to_text()


def test_a_rank_that_hangs_ends_the_case():
    class Hangs(Target):
        def attend(self, call: TargetCall):
            if call.rank:
                call.group.all_gather_bytes(b".", 30.0)
            return call.q

    outcome = run_threads(Hangs(), CAUSAL, timeout_s=1.0)
    assert isinstance(outcome, Hung | Refused)


def test_no_more_cases_run_after_some_that_hang(monkeypatch):
    """Otherwise a table of a hundred cases takes a hundred time limits."""
    asked = []

    def hang(target, case):
        asked.append(case)
        return Hung("ranks [1] had not finished in time")

    monkeypatch.setattr("ringspan.verify.run.run_threads", hang)
    monkeypatch.setattr("ringspan.verify.run._MOST_LOST_S", 0.0)
    report = rs.verify.verify(lambda q, k, v: q, world_sizes=(2, 3), features=("full",))
    assert len(asked) == 1
    assert report.counts()["hung"] > 2
    assert "s were lost to cases without a result" in report.failures[-1].message


def test_a_target_that_processes_cannot_have_is_refused():
    with pytest.raises(rs.UnsupportedError, match="processes need a target that can be pickled"):
        rs.verify.verify(lambda q, k, v: q, world_sizes=(2,), ranks="processes")


def empty_inputs(q, k, v, *, causal, group):
    out = ring(q, k, v, causal=causal, group=group)
    k.data.zero_()
    return out


def exit_early(q, k, v):
    sys.exit(3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda q, k, v: None, "the target returned NoneType; return the tensor out, or (out, lse)"),
        (lambda q, k, v: (q, q, q), "the target returned (Tensor, Tensor, Tensor); "),
        (lambda q, k, v: q.detach().numpy(), "the target returned ndarray; "),
        (lambda q, k, v: q.long(), "the target returned out in torch.int64; "),
        (lambda q, k, v: q[:, :, 1:], "the target returned out of shape (2, 4, 8, 8); "),
        (empty_inputs, "the target changed its input k in place on rank "),
        (exit_early, "SystemExit: 3"),
    ],
    ids=["None", "three", "NumPy", "integers", "shape", "changes", "exits"],
)
def test_what_no_attention_does_is_an_error(function, message):
    outcome = run_threads(find_target(function), VerifyCase(2, "contiguous", ("full",), 18, dtype="float64"))
    verdict, _ = judge(VerifyCase(2, "contiguous", ("full",), 18, dtype="float64"), outcome)
    assert verdict.status == "error"
    assert message in verdict.message


def test_a_broken_result_is_an_error_in_a_case_that_may_be_refused():
    report = rs.verify.verify(lambda q, k, v: None, world_sizes=(2,), features=())
    assert report.counts()["error"] == len(report.failures) > 2


def test_zeros_are_not_right():
    report = rs.verify.verify(lambda q, k, v: torch.zeros_like(q) + 0 * q, world_sizes=(2,))
    assert not report.has_passed
    assert report.diagnosis is not None
    assert report.diagnosis.mistake == "output left at zero"


def test_a_wrong_shape_is_wrong():
    report = rs.verify.verify(lambda q, k, v: q.transpose(1, 2), world_sizes=(2,))
    assert not report.has_passed


def test_reports_are_text_json_and_junit():
    report = rs.verify.verify(GatheringTarget("output divided by ranks"), world_sizes=(2,))
    assert report.to_text().startswith("output divided by ranks: NOT right (27 wrong")
    assert "looks like: output scaled (by 0.5)" in report.to_text()
    read = json.loads(json.dumps(report.to_json()))
    assert (read["has_passed"], read["counts"], len(read["cases"])) == (False, {"wrong": 27}, 27)
    suite = ElementTree.fromstring(report.to_junit())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("27", "27", "0")
    assert suite.find("testcase/failure") is not None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no.such.module:f", "cannot be imported"),
        ("ringspan.verify:nothing", "has no nothing"),
        ("nobody", "module:function"),
        ("yunchang", "cannot be imported|no adapter"),
        (3, "a function or a Target"),
        (lambda q, k, v, secret: q, "does not know what to pass for secret"),
        (lambda: 1, "passes q, k and v by position: too many positional arguments"),
        ("torch:matmul", "no signature found"),
        (type("NeedsMore", (Target,), {"__init__": lambda self, x: None}), "cannot be called without arguments"),
    ],
)
def test_an_unknown_target_is_refused(target, message):
    with pytest.raises(rs.UnsupportedError, match=message):
        find_target(target)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("features", ("magic",), r"Odd.features=\['magic'\]: a feature is one of"),
        ("layouts", ("diagonal",), r"Odd.layouts=\('diagonal',\): a target is sharded in some of"),
        ("layouts", (), r"Odd.layouts=\(\): a target is sharded in some of"),
        ("ranks", "fibers", "Odd.ranks='fibers': ranks are threads or processes"),
    ],
)
def test_a_target_with_unknown_attributes_is_refused(attribute, value, message):
    with pytest.raises(rs.RingspanError, match=message):
        find_target(type("Odd", (Target,), {attribute: value}))


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def f(:", "SyntaxError"),
        ("exit(2)", "SystemExit: 2"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_refused(tmp_path, monkeypatch, text, cause):
    (tmp_path / "unloadable_target.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(rs.UnsupportedError, match=f"cannot be imported: {cause}"):
        find_target("unloadable_target:f")


def test_a_model_of_transformers_is_right_on_ranks():
    report = rs.verify.verify("transformers:qwen2", world_sizes=(2,))
    assert report.has_passed, report.to_text()
    assert report.counts() == {"right": 3}


@pytest.mark.parametrize(
    ("name", "message"), [("", "no model class"), ("Bogus", "no model class"), (".", "can be loaded from this folder")]
)
def test_a_model_that_is_none_is_refused(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rs.UnsupportedError, match=message):
        rs.verify.verify(f"transformers:{name}", world_sizes=(2,))


def test_a_model_that_cannot_run_on_ranks_is_reported_as_refused():
    report = rs.verify.verify("transformers:BloomForCausalLM", world_sizes=(2,))
    assert (report.has_passed, report.counts()) == (False, {"refused": 2})
    with pytest.raises(rs.UnsupportedError, match="no model class"):
        rs.verify.verify("transformers:Nothing", world_sizes=(2,))


def test_a_model_whose_gradients_are_not_summed_is_wrong(monkeypatch):
    from ringspan.adapters import transformers

    def forgetful(model, group):
        handle = parallelize(model, group)
        handle.reduce_gradients = lambda: None
        return handle

    parallelize = transformers.parallelize
    monkeypatch.setattr(transformers, "parallelize", forgetful)
    report = rs.verify.verify("transformers:LlamaForCausalLM", world_sizes=(2,))
    assert report.counts() == {"wrong": 3}
    assert "gradient of" in report.to_text()


def test_bad_arguments_are_refused():
    with pytest.raises(rs.ShapeError, match="from 1 to 8"):
        rs.verify.verify("ringspan", world_sizes=(9,))
    with pytest.raises(rs.ShapeError, match="a feature is one of"):
        rs.verify.verify(ring, features=["magic"])


def test_ranks_agree_names_the_odd_rank():
    def run(group):
        same = torch.arange(6.0)
        other = same.clone()
        other[3] += group.rank == 2
        shaped = torch.zeros(2, 3) if group.rank == 0 else torch.zeros(3, 2)
        nan = torch.tensor([float("nan")])
        return rs.verify.ranks_agree({"same": same, "other": other, "shaped": shaped, "nan": nan}, group)

    for agreement in rs.run_in_process(run, 4):
        assert not agreement
        assert str(agreement) == "other differs on rank 2; shaped differs on rank 0"
    assert all(rs.run_in_process(lambda group: rs.verify.ranks_agree([torch.ones(3)], group), 3))


def test_ranks_with_other_lists_of_tensors_are_refused():
    with pytest.raises(rs.ShapeError, match=r"ranks give \[1, 2\] tensors"):
        rs.run_in_process(lambda group: rs.verify.ranks_agree([torch.ones(1)] * (1 + group.rank), group), 2)


def test_compare_models_names_the_first_layer_that_differs():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    changed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Tanh())
    changed.load_state_dict(model.state_dict())
    layout = rs.zigzag(9, 2)
    x = torch.randn(2, 9, 4)

    def compare(group):
        part = {"input": layout.shard(x, group.rank, 1)}
        return rs.verify.compare_models(model, changed, {"input": x}, parallel_batch=part, layout=layout, group=group)

    assert rs.run_in_process(compare, 2) == [None, None]
    with torch.no_grad():
        changed[2].bias += 0.1
    for difference in rs.run_in_process(compare, 2):
        assert (difference.module, difference.num_compared) == ("2", 4)
        assert str(difference).startswith("2 differs first")


PLUGIN_TEST = """
import pytest, ringspan as rs

@pytest.mark.ringspan_verify(world_sizes=(2,))
def test_right(ringspan_verify):
    assert ringspan_verify("ringspan").has_passed

@pytest.mark.ringspan_verify(world_sizes=(2,))
def test_wrong(ringspan_verify):
    ringspan_verify(lambda q, k, v: q * 0)
"""


def test_the_pytest_plugin_fails_a_wrong_attention_with_the_report(tmp_path):
    (tmp_path / "test_mine.py").write_text(PLUGIN_TEST)
    options = ["-p", "ringspan.verify.pytest_plugin", "--strict-markers", "-W", "error", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *options, str(tmp_path)]
    # Installed or not, the plugin is loaded once.
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=env)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "looks like: output left at zero" in done.stdout


def test_the_pytest_plugin_loads_no_torch():
    program = "import sys, ringspan.verify.pytest_plugin, ringspan.verify; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"

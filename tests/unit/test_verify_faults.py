"""Every fault of the library is caught and named; the verifier without its oracle would notice nothing."""

import numpy as np
import pytest

import ringspan.verify.run
from ringspan.verify import faults, make_cases
from ringspan.verify.cases import VerifyCase
from ringspan.verify.diagnose import Diagnosis, diagnose
from ringspan.verify.faults import FAULTS, Fault, FaultyRing
from ringspan.verify.run import judge

SIZES = (2, 3, 4, 5)


def examine(ring: type[FaultyRing], cases: list[VerifyCase]) -> Diagnosis | None:
    judged = (judge(case, ring(case).run()) for case in cases)
    failures = [failure for _, failure in judged if failure is not None]
    return diagnose(failures) if failures else None


def examine_all(chosen: list[Fault], world_size: int) -> tuple[list[str], list[str]]:
    """The faults that were missed, and those that were given another name."""
    cases = make_cases([world_size])
    missed, misnamed = [], []
    for fault in chosen:
        found = examine(fault.ring, cases)
        if found is None:
            missed.append(fault.name)
        elif found.mistake not in fault.mistakes:
            misnamed.append(f"{fault.name}: {found}")
    return missed, misnamed


def test_there_are_many_faults_in_all_areas():
    assert len(FAULTS) >= 100
    areas = {"mask", "schedule", "wire", "kernel", "merge", "heads", "backward", "adapter"}
    assert {fault.area for fault in FAULTS.values()} == areas
    assert all(fault.about.endswith(".") for fault in FAULTS.values())


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [2, 3])
def test_faults_are_caught_and_named(world_size):
    """A quarter of the faults; all of them, on more ranks, in the slow test."""
    chosen = [fault for fault in list(FAULTS.values())[world_size::4] if fault.min_world_size <= world_size]
    missed, misnamed = examine_all(chosen, world_size)
    assert missed == []
    assert len(misnamed) <= 0.15 * len(chosen), misnamed


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SIZES)
def test_all_faults_are_caught_and_named(world_size):
    chosen = [fault for fault in FAULTS.values() if fault.min_world_size <= world_size]
    missed, misnamed = examine_all(chosen, world_size)
    assert missed == []
    assert len(misnamed) <= 0.05 * len(chosen), misnamed


@pytest.mark.slow
def test_no_false_alarm_in_two_thousand_correct_runs():
    alarms = [
        str(case)
        for seed in range(18)
        for case in make_cases((1, 2, 3, 4, 5), seed=seed)
        if not judge(case, FaultyRing(case).run())[0].has_passed
    ]
    assert alarms == []


def test_a_mistake_on_one_rank_and_head_is_named_with_its_place():
    class OneHead(FaultyRing):
        def deliver(self, rank, part):
            out = part.out.copy()
            out[:, 2] *= rank != 1
            return part._replace(out=out)

    found = examine(OneHead, make_cases([3]))
    assert found is not None
    assert found.mistake == "output left at zero"
    assert "ranks 1, heads 2" in found.where


def test_an_unheard_of_mistake_is_caught_and_not_given_a_name():
    class Noisy(FaultyRing):
        def finish(self, rank, part):
            noise = np.random.default_rng(rank).standard_normal(part.out.shape)
            return part._replace(out=part.out + noise)

    found = examine(Noisy, make_cases([2]))
    assert found is not None
    assert found.mistake == "unknown mistake"


def test_a_broken_oracle_is_noticed(monkeypatch):
    """The control: if the oracle left out the causal mask, the correct ring would fail."""
    case = make_cases([2])[0]
    assert judge(case, FaultyRing(case).run())[0].has_passed
    right = ringspan.verify.run.answer

    def broken(question):
        return right(question)._replace(out=right(question).out * 1.001)

    monkeypatch.setattr(ringspan.verify.run, "answer", broken)
    assert not judge(case, FaultyRing(case).run())[0].has_passed


def test_a_budget_that_is_too_wide_would_miss_a_fault(monkeypatch):
    """The control of the budget: a hundred thousand times wider, rounding on the wire passes."""
    case = make_cases([2])[0]
    computed = FAULTS["wire in float16"].run(case)
    assert not judge(case, computed)[0].has_passed
    real = ringspan.verify.run.budget

    def wide(*arguments):
        limits = real(*arguments)
        return limits._replace(**{name: 1e12 * getattr(limits, name) for name in ("out", "lse", "dq", "dk", "dv")})

    monkeypatch.setattr(ringspan.verify.run, "budget", wide)
    assert judge(case, computed)[0].has_passed


def test_a_fault_can_be_registered_once():
    with pytest.raises(ValueError, match="already"):
        faults.fault("mask ignored", "mask")(FaultyRing)

"""Does `validate` refuse what is wrong, accept what is not, and say where? First by hand, then with random faults."""

import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest

import ringspan as rs
from ringspan.schedule import Attend, Block, Step, Transfer, validate
from ringspan.schedule.compile import _compile_rank
from support.faults import FAULTS, Draft, Sample, harm, inject, make_samples

FULL = ((1, 1), (1, 1))
LOCAL = ((1, 0), (0, 1))  # every rank sees itself
CAUSAL = ((1, 0), (1, 1))
AHEAD = ((1, 1), (0, 1))
LOCAL_AND_ALL = ((1, 0, 1), (0, 1, 1))  # and the keys that all ranks hold


def grid(text: str) -> rs.Schedule:
    """Parse a schedule from its header and the cells of its steps."""
    header, *rows = text.splitlines()
    columns = " │ ".join(["step", *(f"rank {rank}" for rank in range(int(header.split()[0])))])
    return rs.schedule.parse_schedule("\n".join([header, columns, *(f"{t} │ {row}" for t, row in enumerate(rows))]))


def refusal(schedule: rs.Schedule, matrix: tuple) -> str:
    with pytest.raises(rs.ScheduleError) as caught:
        validate(schedule, rs.Visible.of(matrix))
    return str(caught.value)


def check_place(message: str) -> None:
    """Check that the message names step and rank, and that the grid below it marks that step only."""
    first, *lines = message.splitlines()
    named = re.match(r"step (\d+): .*\brank", first)
    assert named, f"no step or no rank in {first!r}"
    assert [line.split()[1] for line in lines if line.startswith("▶")] == [named[1]]


@pytest.mark.parametrize(
    ("text", "matrix"),
    [
        ("2 ranks\nq0×kv0 kv0→1 │ q1×kv1 kv1→0\nq0×kv1 │ q1×kv0", FULL),
        ("2 ranks\nq_grad0×kv0 kv0→1 │ q_grad1×kv1\n │ q_grad1×kv0\n │ dkv0→0", CAUSAL),
        ("2 ranks\nq*×kv0 │ q*×kv1\nout*↔all │ out*↔all", FULL),
        ("2 ranks\nq0×kv0 q0×kv* │ q1×kv*,kv1", LOCAL_AND_ALL),
        ("2 ranks\nq_grad0×kv0,kv* │ q_grad1×kv1 q_grad1×kv*", LOCAL_AND_ALL),
        ("2 ranks, heads 4/2\nq0[0:2]×kv0[0:1] q0[2:4]×kv0[1:2] │ q1×kv1", LOCAL),
        ("2 ranks, heads 4/1\nq0[0:2]×kv0[0:1] q0[2:4]×kv0 │ q1[0:1]×kv1 q1[1:4]×kv1", LOCAL),
        ("2 ranks\n │ ", ((0, 0), (0, 0))),
    ],
)
def test_valid_schedules_pass(text, matrix):
    validate(grid(text), rs.Visible.of(matrix))


class Refusal(NamedTuple):
    schedule: str
    message: str
    matrix: tuple = LOCAL


REFUSALS = {
    "dst is not a rank": Refusal(
        "2 ranks\nq0×kv0 kv0→2 │ q1×kv1", "step 0: kv0→2 from rank 0: dst 2 is not one of the 2 ranks"
    ),
    "owner is not a rank": Refusal(
        "2 ranks\nq0×kv0 kv7→1 │ q1×kv1", "step 0: kv7→1 from rank 0: owner 7 is not one of the 2 ranks"
    ),
    "send to itself": Refusal(
        "2 ranks\nq0×kv0 kv0→0 │ q1×kv1", "step 0: rank 0 sends kv0 to itself; remove the transfer"
    ),
    "send what is not held": Refusal(
        "2 ranks\nq0×kv0 kv1→1 │ q1×kv1", "step 0: rank 0 sends kv1, which has not been received"
    ),
    "send too early": Refusal(
        "3 ranks\nkv0→1 │ kv0→2 │", "step 0: rank 1 sends kv0, which arrives only in this step", ((1,) * 3,) * 3
    ),
    "attend what is not held": Refusal(
        "2 ranks\nq0×kv1 │ q1×kv1", "step 0: rank 0 attends kv1, which has not been received"
    ),
    "attend a block of no rank": Refusal(
        "2 ranks\nq0×kv9 │ q1×kv1", "step 0: rank 0 attends kv9, which has not been received"
    ),
    "attend too early": Refusal(
        "2 ranks\nq0×kv0 q0×kv1 │ q1×kv1 kv1→0",
        "step 0: rank 0 attends kv1, which arrives only in this step",
        AHEAD,
    ),
    "receive one's own": Refusal(
        "2 ranks\nq0×kv0 kv0→1 │ q1×kv1\n │ q1×kv0 kv0→0",
        "step 1: rank 0 receives kv0 from rank 1, but holds it already; send it once",
        CAUSAL,
    ),
    "receive what all hold": Refusal(
        "2 ranks\nq0×kv0 kv*→1 │ q1×kv1",
        "step 0: rank 1 receives kv* from rank 0, but holds it already; send it once",
        LOCAL_AND_ALL,
    ),
    "receive twice": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1 kv1→0\nq0×kv1 │ kv1→0",
        "step 1: rank 0 receives kv1 from rank 1, but holds it already; send it once",
        AHEAD,
    ),
    "receive some heads twice": Refusal(
        "2 ranks, heads 4/2\n │ q1×kv1 kv1[0:1]→0\nq0[0:2]×kv1[0:1] │ kv1→0",
        "step 1: rank 0 receives kv1 from rank 1, but holds it already; send it once",
        AHEAD,
    ),
    "receive and never read": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1 q1→0\n │ ", "step 0: rank 0 receives q1 in step 0 and never reads it; do not send it"
    ),
    "receive heads and never read them": Refusal(
        "2 ranks, heads 4/2\nq0×kv0 kv0[0:1]→1 │ q1×kv1 q1→0\nq1[2:4]×kv0[1:2] │ q1[0:2]×kv0[0:1]\nout1[2:4]→1 │ ",
        "step 0: rank 0 receives q1",
        CAUSAL,
    ),
    "attend sums": Refusal(
        "2 ranks\nq0×dkv0 │ q1×kv1", "step 0: rank 0 attends q0×dkv0; an attend takes blocks q×kv or q_grad×kv"
    ),
    "attend mixed kinds": Refusal(
        "2 ranks\nq0,q_grad0×kv0 │ q1×kv1",
        "step 0: rank 0 attends q0,q_grad0×kv0; an attend takes blocks q×kv or q_grad×kv",
    ),
    "attend different heads": Refusal(
        "2 ranks, heads 4/2\nq0[0:2],q1[2:4]×kv0 │ q1×kv1",
        "step 0: rank 0 attends q0[0:2],q1[2:4]×kv0; the blocks of one side of an attend have the same heads",
    ),
    "attend a block twice at once": Refusal(
        "2 ranks\nq0×kv0,kv0 │ q1×kv1", "step 0: rank 0 attends q0×kv0,kv0; a block appears twice"
    ),
    "attend the wrong KV heads": Refusal(
        "2 ranks, heads 4/2\nq0[0:2]×kv0[1:2] │ q1×kv1",
        "step 0: rank 0 attends q0[0:2]×kv0[1:2]; the KV heads do not belong to the query heads",
    ),
    "attend too many KV heads": Refusal(
        "2 ranks, heads 4/2\nq0[0:2]×kv0 q0[2:4]×kv0 │ q1×kv1",
        "step 0: rank 0 attends q0[0:2]×kv0; the KV heads do not belong to the query heads",
    ),
    "attend parts of two groups": Refusal(
        "2 ranks, heads 8/2\nq0[0:1]×kv0[0:1] q0[1:5]×kv0 q0[5:8]×kv0[1:2] │ q1×kv1",
        "step 0: rank 0 attends q0[1:5]×kv0; the KV heads do not belong to the query heads",
    ),
    "attend what sees nothing": Refusal(
        "2 ranks\nq0×kv0 kv0→1 │ q1×kv1\n │ q1×kv0",
        "step 1: rank 1 attends q1×kv0, but q1 has no visible pair there; leave it out",
    ),
    "attend twice": Refusal(
        "2 ranks\nq0×kv0 q0×kv0 │ q1×kv1", "step 0: rank 0 attends q0×kv0, but out0 there has kv0 already"
    ),
    "attend some heads twice": Refusal(
        "2 ranks, heads 4/2\nq0×kv0 q0[2:4]×kv0[1:2] │ q1×kv1",
        "step 0: rank 0 attends q0[2:4]×kv0[1:2], but out0[2:4] there has kv0 already for heads [2:4]",
    ),
    "attend forward and backward": Refusal("2 ranks\nq0×kv0 │ q_grad1×kv1", "step 0: rank 1 attends q_grad1×kv1"),
    "attend queries of one rank and of all": Refusal(
        "2 ranks\nq*×kv0 q0×kv0 │ q*×kv1\nout*↔all │ out*↔all", "step 0: rank 0 attends q0×kv0", FULL
    ),
    "attend gradients of queries of all": Refusal(
        "2 ranks\nq_grad0×kv0 q_grad*×kv0 │ q_grad1×kv1", "step 0: rank 0 attends q_grad*×kv0"
    ),
    "heads there are not": Refusal("2 ranks, heads 4/2\n │ \nq0[0:5]×kv0 │ q1×kv1", "step 1: rank 0"),
    "no heads at all": Refusal("2 ranks, heads 4/2\nq0×kv0 q0[2:2]×kv0[1:1] │ q1×kv1", "step 0: rank 0"),
    "heads in a schedule without": Refusal("2 ranks\nq0×kv0 │ q1[0:1]×kv1[0:1]", "step 0: rank 1"),
    "send no part": Refusal(
        "2 ranks\nq0×kv0 out1→1 │ q1×kv1", "step 0: rank 0 sends out1 to rank 1, but holds no part of it"
    ),
    "send a part twice": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1 q1→0\nq1×kv0 │ \nout1→1 out1→1 │ ",
        "step 2: rank 0 sends out1 to rank 1, but holds no part of it",
        CAUSAL,
    ),
    "send a part in two messages": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1 q1→0\nq1×kv0 │ \nout1→1 q1×kv* │ \nout1→1 │ ",
        "step 3: rank 0 sends",
        ((1, 0, 0), (1, 1, 1)),
    ),
    "send a part under another name": Refusal(
        "2 ranks, heads 4/2\nq0×kv0 kv0[1:2]→1 │ q1×kv1 q1[0:2]→0\nq1[0:2]×kv0[0:1] │ q1[2:4]×kv0[1:2]\nout1→1 │ ",
        "step 2: rank 0 sends out1",
        CAUSAL,
    ),
    "send one's own sum": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1\nout0→1 │ ", "step 1: rank 0 sends its own out0 away to rank 1"
    ),
    "send a sum that every rank keeps": Refusal(
        "2 ranks\nq*×kv0 │ q*×kv1\nout*→1 │ \nout*↔all │ out*↔all", "step 1: rank 0 sends out*", FULL
    ),
    "send a gradient that every rank keeps": Refusal(
        "2 ranks\nq_grad0×kv0 q_grad0×kv* │ q_grad1×kv1 q_grad1×kv*\ndkv*→1 │ ",
        "step 1: rank 0 sends dkv*",
        LOCAL_AND_ALL,
    ),
    "merge an input": Refusal(
        "2 ranks\nq0×kv0 kv*↔all │ q1×kv1 kv*↔all", "step 0: kv*↔all: an AllMerge takes a sum that every rank holds"
    ),
    "merge one rank's sum": Refusal(
        "2 ranks\nq0×kv0 out0↔all │ q1×kv1 out0↔all", "step 0: out0↔all: an AllMerge takes a sum that every rank holds"
    ),
    "merge nothing": Refusal("2 ranks\nq*×kv0 out*↔all │ q*×kv1 out*↔all\nout*↔all │ out*↔all", "step 0: ", FULL),
    "merge all twice": Refusal(
        "2 ranks\nq*×kv0 │ q*×kv1\nout*↔all │ out*↔all\nout*↔all │ out*↔all",
        "step 2: rank 0 merges out* from rank 1, but out* there has kv0, kv1 already",
        FULL,
    ),
    "merge what is there already": Refusal(
        "2 ranks\nq0×kv0 kv0→1 │ q1→0 q1×kv1\nq1×kv0 │ q1×kv0\nout1→1 │ ",
        "step 2: rank 1 merges out1 from rank 0, but out1 there has kv0 already",
        CAUSAL,
    ),
    "leave a part": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1 q1→0\nq1×kv0 │ ", "step 1: rank 0 ends with a part of out1; send it to rank 1", CAUSAL
    ),
    "lack a key": Refusal(
        "2 ranks\nq0×kv0 │ q1×kv1\n │ ", "step 1: after the last step out0 on rank 0 lacks kv1", AHEAD
    ),
    "lack some heads": Refusal(
        "2 ranks, heads 4/2\nq0[0:2]×kv0[0:1] │ q1×kv1",
        "step 0: after the last step out0 on rank 0 lacks kv0 for heads [2:4]",
    ),
    "lack a gradient": Refusal("2 ranks\nq_grad0×kv0 │ ", "step 0: after the last step dq1 on rank 1 lacks kv1"),
    "lack replicated keys": Refusal(
        "2 ranks\nq0×kv0 q0×kv* │ q1×kv1", "step 0: after the last step out1 on rank 1 lacks kv*", LOCAL_AND_ALL
    ),
    "add up what stays in parts": Refusal(
        "2 ranks\nq_grad0×kv0 q_grad0×kv* │ q_grad1×kv1 q_grad1×kv*\ndkv*↔all │ dkv*↔all",
        "step 1: rank 1 adds pairs to dkv* that another rank has added already",
        LOCAL_AND_ALL,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    text, wanted, matrix = REFUSALS[name]
    message = refusal(grid(text), matrix)
    assert message.startswith(wanted)
    check_place(message)


LOCAL_STEP = Step([[Attend((Block("q", rank),), (Block("kv", rank),))] for rank in range(2)])


def test_a_src_outside_the_group():
    wrong = Step([(), ()], [Transfer(Block("kv", 0), 5, 1)])
    message = refusal(rs.Schedule.of_steps(2, None, [LOCAL_STEP, wrong]), LOCAL)
    assert message.startswith("step 1: kv0→1 from rank 5: src 5 is not one of the 2 ranks")


def test_a_step_for_other_ranks():
    message = refusal(rs.Schedule.of_steps(2, None, [LOCAL_STEP, Step([()])]), LOCAL)
    assert message.startswith("step 1: the step has attends for 1 ranks; the schedule has 2")


def test_a_schedule_for_other_ranks():
    schedule = rs.Schedule.of_steps(2, None, [LOCAL_STEP])
    assert "2 ranks and visible has 3" in refusal(schedule, ((1,) * 3,) * 3)


def test_no_steps_at_all():
    assert "out0 on rank 0 lacks kv0" in refusal(rs.Schedule.of_steps(2, None, []), LOCAL)


def test_only_the_steps_around_the_fault_are_shown():
    visible = rs.Visible.of(np.ones((8, 8)))
    steps = list(rs.schedule.build_schedule("pass_kv", visible, heads=rs.Heads(1, 1)).steps)
    steps[4] = Step(steps[4].attends, steps[4].transfers[1:])
    message = refusal(rs.Schedule.of_steps(8, None, steps), ((1,) * 8,) * 8)
    assert message.startswith("step 5: rank 1 ")
    assert re.findall(r"^[ ▶] (\d+)", message, flags=re.MULTILINE) == ["3", "4", "5", "6", "7"]


# Random faults. `harm` runs a schedule and compares result and bytes with what they should be.

NUM_SAMPLES = 150


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return list(make_samples(2024, NUM_SAMPLES))


def mutants(samples: list[Sample]) -> Iterator[tuple[str, Sample, rs.Schedule]]:
    rng = random.Random(7)
    for sample in samples:
        for name, fault in FAULTS.items():
            if (mutant := inject(fault, rng, sample)) is not None:
                yield name, sample, mutant


def verdict(mutant: rs.Schedule, visible: rs.Visible) -> str | None:
    """Return the message of the refusal; None if the schedule is accepted."""
    try:
        validate(mutant, visible)
    except rs.ScheduleError as error:
        return str(error)
    return None


def explanation(sample: Sample, mutant: rs.Schedule, message: str) -> str | None:
    """Return why a schedule with a right result and no extra bytes is refused; None without a reason."""
    if unnamed_heads(mutant, sample.heads) == unnamed_heads(sample.schedule, sample.heads):
        return "all heads, by a name that does not fit those of the other blocks"
    reasons = {
        "ends with a part of": "attended again when the sum had left: work for nothing, lost before it does harm",
        "never reads it": "a message for nothing, in place of one that could be done without",
        "arrives only in this step": "the rank would wait for a message when it should compute",
    }
    return next((reason for pattern, reason in reasons.items() if pattern in message), None)


def unnamed_heads(schedule: rs.Schedule, heads: rs.Heads) -> rs.Schedule:
    """Replace ranges of all heads by None."""
    draft = Draft(schedule)
    for slot in draft.slots():
        num_heads = heads.num_kv_heads if slot.block.kind in ("kv", "dkv") else heads.num_heads
        if slot.block.heads == range(num_heads):
            slot.put(slot.block.whole)
    return draft.freeze()


@pytest.mark.wide
def test_samples_are_valid_and_various(subtests, samples):
    for sample in samples:
        with subtests.test(sample.name):
            assert harm(sample, sample.schedule) is None, sample.name
    names = {sample.name for sample in samples}
    assert len(names) == 14, names  # six algorithms forward and backward, and two forms of decode
    assert {sample.schedule.world_size for sample in samples} == set(range(2, 9))
    densities = [sample.visible.matrix[:, :-1].mean() for sample in samples]
    assert min(densities) < 0.3
    assert max(densities) == 1.0


@pytest.mark.wide
def test_faults(samples, monkeypatch):
    """Accepted schedules do no harm; refused ones do, or there is another reason to refuse them."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in FAULTS}
    wrong = []
    for name, sample, mutant in mutants(samples):
        _compile_rank.cache_clear()  # mutants are many, alike, and used once
        counts[name]["injected"] += 1
        message = verdict(mutant, sample.visible)
        if message is None:
            counts[name]["accepted"] += 1
            if damage := harm(sample, mutant):
                wrong.append(f"{name} in {sample.name}: accepted, but it {damage}")
            continue
        counts[name]["refused"] += 1
        check_place(message)
        with monkeypatch.context() as unchecked:
            unchecked.setattr("ringspan.program.prepare.validate", lambda *_: None)
            damage = harm(sample, mutant)
        if damage is None:
            counts[name]["refused, though harmless"] += 1
            if explanation(sample, mutant, message) is None:
                wrong.append(f"{name} in {sample.name}: harmless, but refused: {message.splitlines()[0]}")
    assert not wrong, "\n".join([f"{len(wrong)} in all", *wrong[:20]])
    assert sum(count["injected"] for count in counts.values()) >= 500
    for name, count in counts.items():
        assert count["injected"] >= 50, f"{name}: {count}"
        assert count["refused"] > count["refused, though harmless"], f"{name}: {count}"

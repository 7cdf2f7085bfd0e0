"""Are the planner's answers those of the calculations by hand in docs/plan_questions.md?

`tests/architecture/test_docs.py` runs the page's commands and snippets and compares what they print. Here the number by
hand is compared with the number of the planner.
"""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "plan_questions.md").read_text()
MOST_OFF = 0.12  # a calculation by hand leaves the host, most messages and merges out
COMPARED = re.compile(r"^([\d.]+)( .*)? by hand, ([\d.]+)( .*)? planned$", re.MULTILINE)
QUESTIONS = {title: body for title, _, body in (part.partition("\n") for part in PAGE.split("\n## ")[1:])}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_calculation_by_hand_gives_the_number_of_the_plan(subtests, question):
    body = QUESTIONS[question]
    assert "$ ringspan plan " in body
    compared = COMPARED.findall(body)
    assert compared
    for by_hand, hand_unit, planned, unit in compared:
        with subtests.test(f"{by_hand}, {hand_unit}, {planned}, {unit}"):
            assert hand_unit == unit
            assert float(by_hand) == pytest.approx(float(planned), rel=MOST_OFF)


@pytest.mark.parametrize(
    "option",
    [
        *("--target-ttft", "--max-context", "--max-batch", "--sweep", "--price", "--kv-cache fp8", "--chunk"),
        *("--phase train", "--fsdp", "--accumulate", "--pp", "--ep", "--offload", "--plot", "--link", "--resident"),
        *("--software", "config.json", "exits with 3"),
    ],
)
def test_every_question_is_on_the_page(option):
    assert option in PAGE

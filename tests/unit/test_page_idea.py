"""The explanation at the top of the lesson: its example is right, and it explains every notation of the pictures."""

import numpy as np
import pytest

from ringspan.page.idea import SCORES, TERMS, VALUES, attend, describe_merge, merge


def softmax_average(scores: np.ndarray, values: np.ndarray) -> float:
    weights = np.exp(scores - scores.max())
    return float((weights / weights.sum()) @ values)


def test_the_example_is_attention_in_one_piece() -> None:
    scores, values = np.concatenate(SCORES), np.concatenate(VALUES)
    rows = {row[0]["text"]: row for row in describe_merge()["rows"]}
    exact = softmax_average(scores, values)
    assert rows["merged"][3]["value"] == pytest.approx(exact, rel=1e-15)
    assert rows["in one piece"][3]["value"] == pytest.approx(exact, rel=1e-15)
    assert rows["only added"][3]["value"] == pytest.approx(
        sum(softmax_average(*block) for block in zip(SCORES, VALUES, strict=True))
    )
    assert rows["block 1"][5]["value"] + rows["block 2"][5]["value"] == pytest.approx(1)


@pytest.mark.parametrize("seed", range(5))
def test_parts_merge_to_the_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores, values = 3 * rng.standard_normal((2, 9))
    merged = merge(attend(scores[:4], values[:4]), attend(scores[4:], values[4:]))
    assert merged.out == pytest.approx(softmax_average(scores, values))
    assert merged.lse == pytest.approx(np.log(np.exp(scores).sum()))


@pytest.mark.parametrize("word", ["q2, kv2", "q2×kv1", "kv1→3", "step", "mask", "layout", "log-sum-exp (lse)", "idle"])
def test_the_words_of_the_pictures_are_explained(word: str) -> None:
    assert word in [term for term, _ in TERMS]

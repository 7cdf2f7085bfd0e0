"""Which conversation a prompt continues, and which go when the cache is full; by a plain model of the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.serve.slots import SPARE, SlotBook

ROOMY = 2**40


def run(book: SlotBook, tokens: list[int]) -> tuple[int, int, list[int]]:
    """As rank 0 does it: the slot, what was kept, and what was dropped."""
    place = book.place(tokens, len(tokens))
    assert place is not None
    book.extend(place.slot, tokens[place.keep :])
    book.release(place.slot)
    return place.slot, place.keep, [number for number, _ in place.evicted]


def test_a_longer_prompt_continues_its_conversation():
    book = SlotBook(2, 100, ROOMY)
    first, keep, _ = run(book, [1, 2, 3])
    assert keep == 0
    assert run(book, [1, 2, 3, 4, 5]) == (first, 3, [])


def test_the_same_prompt_computes_its_last_token():
    book = SlotBook(2, 100, ROOMY)
    first, _, _ = run(book, [1, 2, 3])
    assert run(book, [1, 2, 3]) == (first, 2, [])


def test_a_changed_end_is_computed_anew():
    book = SlotBook(2, 100, ROOMY)
    first, _, _ = run(book, [1, 2, 3, 4, 5])
    assert run(book, [1, 2, 3, 9, 9, 9]) == (first, 3, [])
    assert book.length(first) == 6


def test_a_shared_beginning_does_not_crop_a_long_conversation():
    book = SlotBook(2, 100, ROOMY)
    long, _, _ = run(book, [7, 7, *range(10, 60)])
    other, keep, _ = run(book, [7, 7, 1, 2])
    assert other != long
    assert keep == 0
    assert run(book, [7, 7, *range(10, 60), 5]) == (long, 52, [])


def test_a_conversation_that_would_lose_too_much_does_not_hide_one_that_can_be_continued():
    book = SlotBook(2, 100, ROOMY)
    run(book, [7, 7, *range(10, 60)])
    short, _, _ = run(book, [7, 7, 1])
    assert run(book, [7, 7, 2]) == (short, 2, [])


def test_the_least_recently_used_conversation_goes():
    book = SlotBook(1, 1, 3 * (SPARE + 13))
    a, b, c = (run(book, [n] * 10)[0] for n in (1, 2, 3))
    assert run(book, [1] * 10)[0] == a  # b is now the oldest
    assert run(book, [4] * 10)[2] == [b]
    assert run(book, [3] * 10) == (c, 9, [])


def test_what_was_evicted_is_computed_anew():
    book = SlotBook(1, 1, SPARE + 13)
    run(book, [1] * 10)
    run(book, [2] * 10)
    assert run(book, [1] * 10)[1] == 0


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_longest_conversation_fits_and_one_more_token_for_each_rank_does_not(num_ranks):
    book = SlotBook(num_ranks, 100, 100_000)
    run(book, [1] * book.max_tokens)
    assert book.nbytes <= 100_000
    assert book.place([2] * 5, book.max_tokens + 2 * num_ranks) is None


def test_a_slot_in_use_is_neither_continued_nor_evicted():
    book = SlotBook(1, 1, 2 * (SPARE + 25))
    first = book.place([1, 2, 3], 20)
    assert first is not None
    book.extend(first.slot, [1, 2, 3])
    second = book.place([1, 2, 3], 20)
    assert second is not None
    assert (second.slot != first.slot, second.keep) == (True, 0)
    book.extend(second.slot, [1, 2, 3])
    assert book.place([9], 20) is None  # both are in use
    book.release(first.slot)
    third = book.place([9], 20)
    assert third is not None
    assert [number for number, _ in third.evicted] == [first.slot]


def test_the_answer_that_may_come_is_counted_as_long_as_the_slot_is_in_use():
    book = SlotBook(2, 10, ROOMY)
    place = book.place([1] * 10, 810)
    assert place is not None
    book.extend(place.slot, [1] * 10)
    assert book.nbytes == 10 * (SPARE + 405 + 102)
    book.release(place.slot)
    assert book.nbytes == 10 * (SPARE + 5 + 2)


def test_a_slot_that_was_cancelled_before_its_first_chunk_is_forgotten():
    book = SlotBook(2, 10, ROOMY)
    place = book.place([1] * 10, 20)
    assert place is not None
    book.release(place.slot)
    assert book.nbytes == 0


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=30), st.integers(1, 3))
def test_any_history_keeps_the_budget_and_only_true_prefixes(prompts, num_ranks):
    budget = 3 * 10 * (SPARE + 40)
    book = SlotBook(num_ranks, 10, budget)
    held: dict[int, list[int]] = {}
    for prompt in prompts:
        slot, keep, dropped = run(book, prompt)
        assert keep < len(prompt)
        assert held.get(slot, [])[:keep] == prompt[:keep]
        for other in dropped:
            del held[other]
        held[slot] = prompt
        assert book.nbytes <= budget
        assert all(book.length(number) == len(tokens) for number, tokens in held.items())

"""Every field of a request is used, harmless, or refused with its name."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspan.serve.errors import ApiError
from ringspan.serve.fields import chat_wishes, completion_wishes, read_messages, read_prompt, read_tools
from ringspan.serve.stops import StopFinder

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [
        *(
            "messages",
            "prompt",
            "stop",
            "seed",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "stream",
        ),
        *("stream_options", "logprobs", "top_logprobs", "tools", "n", "logit_bias", "response_format", "tool_choice"),
    ]
)


def test_fields_are_read():
    wishes = chat_wishes(
        {"stream": True, "stream_options": {"include_usage": True}, "stop": "x", "max_completion_tokens": 7, "seed": 3}
        | {"temperature": 0.5, "top_p": 0.25, "logprobs": True, "top_logprobs": 2, "user": "u", "n": 1}
    )
    assert (wishes.stream, wishes.include_usage, wishes.stop, wishes.max_tokens) == (True, True, ("x",), 7)
    assert (wishes.temperature, wishes.top_p, wishes.seed, wishes.top_logprobs) == (0.5, 0.25, 3, 2)


def test_a_plain_completion_has_16_tokens_if_nothing_is_said():
    assert completion_wishes({}).max_tokens == 16
    assert chat_wishes({}).max_tokens is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", True),
        ("logit_bias", {"5": 1}),
        ("frequency_penalty", 0.5),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("audio", {}),
        ("temperature", 2.5),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("seed", 1.5),
        ("seed", 2**70),
        ("seed", 10**400),
        ("temperature", 10**400),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**400),
        ("max_tokens", float("inf")),
        ("stream", 1),
        ("stop", ["a"] * 5),
        ("stop", [""]),
        ("stop", ["a" * 300]),
        ("stream_options", {"include_usage": True}),
        ("top_logprobs", 3),
        ("top_k", 5),
        ("suffix", "x"),
        ("prompt", "only for completions"),
    ],
)
def test_fields_that_are_not_supported_are_refused_by_name(name, value):
    with pytest.raises(ApiError) as caught:
        chat_wishes({name: value})
    assert caught.value.status == 400
    assert caught.value.param == name
    assert name in caught.value.message


def test_logprobs_of_a_plain_completion_are_a_number():
    assert completion_wishes({}).top_logprobs is None
    assert completion_wishes({"logprobs": 0}).top_logprobs == 0
    assert completion_wishes({"logprobs": 3}).top_logprobs == 3
    for wrong in (True, 21, {}):
        with pytest.raises(ApiError, match="logprobs"):
            completion_wishes({"logprobs": wrong})


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        ["hello"],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": "user", "content": "x", "weight": 1}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_messages_that_are_none_are_refused(messages):
    with pytest.raises(ApiError, match="messages"):
        read_messages({"messages": messages})


def test_tools_that_may_not_be_chosen_stay_out_of_the_template():
    body = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    assert read_tools(body) == body["tools"]
    assert read_tools(body | {"tool_choice": "auto"}) == body["tools"]
    assert read_tools(body | {"tool_choice": "none"}) is None


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages({"messages": [{"role": "user", "content": parts}]}) == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [1, 2]])
def test_a_prompt_is_one_text(prompt):
    with pytest.raises(ApiError, match="prompt"):
        read_prompt({"prompt": prompt})


@pytest.mark.wide
@given(st.dictionaries(NAMES | st.text(max_size=10), JSON, max_size=6))
def test_no_body_gets_past_with_another_error(body):
    for read in (chat_wishes, completion_wishes, read_messages, read_prompt, read_tools):
        with suppress(ApiError):
            assert read(body) is not NotImplemented


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.text("abc", min_size=1, max_size=4))
def test_a_stop_string_ends_the_text_before_it_however_it_comes(pieces, stop):
    finder = StopFinder([stop])
    sent = ""
    for piece in pieces:
        sent += finder.add(piece)
        if finder.is_found:
            break
    whole = "".join(pieces)
    assert finder.is_found == (stop in whole)
    assert sent + finder.rest() == whole.split(stop)[0]


@given(st.lists(st.text("ab", max_size=3), max_size=12))
def test_without_stop_strings_nothing_is_held_back(pieces):
    finder = StopFinder([])
    assert [finder.add(piece) for piece in pieces] == pieces

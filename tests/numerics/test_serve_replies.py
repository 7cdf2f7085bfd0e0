"""Logprobs in the two forms of OpenAI's API, with characters that are split over tokens."""

from ringspan.serve.answers import Text, TokenLogprob
from ringspan.serve.replies import Reply

TOP = ((b" the", -0.5), (b" \xc3", -2.0))
# " é!" in three tokens: the second completes the character.
TOKENS = (
    TokenLogprob(b" \xc3", -2.0, TOP),
    TokenLogprob(b"\xa9", -0.1, ()),
    TokenLogprob(b"!", float("-inf"), ()),
)


def test_a_chat_has_an_entry_for_each_token_with_its_bytes():
    reply = Reply("chat", "tiny", is_stream=True, has_logprobs=True)
    first, second, third = reply.piece(Text(" é!", TOKENS))["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"]) == (" \ufffd", [0x20, 0xC3])
    assert [top["token"] for top in first["top_logprobs"]] == [" the", " \ufffd"]
    assert bytes(first["bytes"] + second["bytes"]).decode() == " é"
    assert (third["token"], third["logprob"]) == ("!", -9999.0)  # JSON has no infinity


def test_a_completion_has_lists_and_offsets_that_go_on_from_piece_to_piece():
    reply = Reply("completion", "tiny", is_stream=True, has_logprobs=True)
    first = reply.piece(Text(" é", TOKENS[:2]))["choices"][0]["logprobs"]
    assert first == {
        "tokens": [" \ufffd", "\ufffd"],
        "token_logprobs": [-2.0, -0.1],
        "top_logprobs": [{" the": -0.5, " \ufffd": -2.0}, None],
        "text_offset": [0, 1],
    }
    assert reply.piece(Text("!", TOKENS[2:]))["choices"][0]["logprobs"]["text_offset"] == [2]


def test_without_logprobs_there_are_none():
    reply = Reply("completion", "tiny", is_stream=True, has_logprobs=False)
    assert reply.piece(Text("é", ()))["choices"][0]["logprobs"] is None

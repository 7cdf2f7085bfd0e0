"""What do answers look like? Objects of OpenAI's API."""

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from ringspan.serve.answers import ServedAnswer, Text, TokenLogprob

Kind = Literal["chat", "completion"]
_OBJECTS = {
    ("chat", True): "chat.completion.chunk",
    ("chat", False): "chat.completion",
    ("completion", True): "text_completion",
    ("completion", False): "text_completion",
}


class Reply:
    """The objects of one answer, which share an id."""

    def __init__(self, kind: Kind, model: str, *, is_stream: bool, has_logprobs: bool) -> None:
        self._kind = kind
        self._has_logprobs = has_logprobs
        self._raw = b""  # of the answer up to the next token
        self._common = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "object": _OBJECTS[kind, is_stream],
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, texts: Sequence[Text], answer: ServedAnswer) -> dict[str, Any]:
        """The whole answer as one object."""
        text = "".join(each.text for each in texts)
        logprobs = self._logprobs([each for text in texts for each in text.logprobs])
        content = {"message": {"role": "assistant", "content": text}} if self._kind == "chat" else {"text": text}
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        return self._common | {"choices": [choice], "usage": answer.usage()}

    def first(self) -> dict[str, Any] | None:
        """The first chunk of a stream, without text."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}) if self._kind == "chat" else None

    def piece(self, text: Text) -> dict[str, Any]:
        """A chunk of text."""
        content = {"delta": {"content": text.text}} if self._kind == "chat" else {"text": text.text}
        return self._chunk(content, logprobs=self._logprobs(text.logprobs))

    def last(self, finish_reason: str) -> dict[str, Any]:
        """The last chunk, with the finish reason."""
        return self._chunk({"delta": {}} if self._kind == "chat" else {"text": ""}, finish_reason)

    def usage(self, answer: ServedAnswer) -> dict[str, Any]:
        """The chunk with the usage."""
        return self._common | {"choices": [], "usage": answer.usage()}

    def _chunk(
        self, content: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._common | {"choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._kind == "completion":
            return self._legacy_logprobs(tokens)
        entries = [
            _entry(token.raw, token.logprob) | {"top_logprobs": [_entry(*each) for each in token.top]}
            for token in tokens
        ]
        return {"content": entries}

    def _legacy_logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """In the form of plain completions: parallel lists, with the place of each token in the answer's text."""
        offsets = []
        for token in tokens:
            offsets.append(len(self._raw.decode("utf-8", "ignore")))
            self._raw += token.raw or b""
        own = [(_token_text(token.raw), _finite(token.logprob)) for token in tokens]
        return {
            "tokens": [text for text, _ in own],
            "token_logprobs": [logprob for _, logprob in own],
            "top_logprobs": [
                {_token_text(raw): _finite(logprob) for raw, logprob in token.top} | dict([one]) if token.top else None
                for token, one in zip(tokens, own, strict=True)
            ],
            "text_offset": offsets,
        }


def _entry(raw: bytes | None, logprob: float) -> dict[str, Any]:
    return {"token": _token_text(raw), "logprob": _finite(logprob), "bytes": None if raw is None else list(raw)}


def _token_text(raw: bytes | None) -> str:
    return "\ufffd" if raw is None else raw.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)

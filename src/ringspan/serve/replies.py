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
        entries = [
            _entry(token.raw, token.logprob) | {"top_logprobs": [_entry(*each) for each in token.top]}
            for token in tokens
        ]
        return {"content": entries}


def _entry(raw: bytes | None, logprob: float) -> dict[str, Any]:
    text = "\ufffd" if raw is None else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": None if raw is None else list(raw)}

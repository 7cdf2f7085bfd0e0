"""How does a request become an answer? Tokens in, pieces of text out, until the end, a stop string or a failure."""

import logging
import os
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from ringspan.serve.errors import ApiError
from ringspan.serve.fields import Wishes
from ringspan.serve.frames import Frame
from ringspan.serve.scheduler import Scheduler
from ringspan.serve.stops import StopFinder
from ringspan.serve.text import ModelText

log = logging.getLogger("ringspan.serve")


class TokenLogprob(NamedTuple):
    """A token's bytes, None if they are unknown, and log-probability, and those of the most likely alternatives."""

    raw: bytes | None
    logprob: float
    top: tuple[tuple[bytes | None, float], ...]


class Text(NamedTuple):
    """A piece of an answer, with the logprobs of its tokens if they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...]


class ServedAnswer:
    """One answer under way.

    Args:
        scheduler: The queue.
        text: The model's text side.
        tokens: The prompt.
        wishes: How to answer.
        continues: The answer continues the prompt's text; otherwise it is a message of its own.

    Attributes:
        num_prompt: Tokens of the prompt.
        num_cached: How many of them were cached already; known once `start` returns.
        algorithm: What computed the rest, and why.
        num_generated: Tokens so far.
        finish_reason: "stop" or "length", at the end.
    """

    def __init__(
        self, scheduler: Scheduler, text: ModelText, tokens: list[int], wishes: Wishes, *, continues: bool
    ) -> None:
        self._scheduler = scheduler
        self._text = text
        self._stream = text.decoder(tokens if continues else ())
        self._stops = StopFinder(wishes.stop)
        self.num_prompt = len(tokens)
        self.num_cached = 0
        self.algorithm = ""
        self.num_generated = 0
        self.finish_reason = "length"
        seed = int.from_bytes(os.urandom(7), "little") if wishes.seed is None else wishes.seed
        sampling = {
            "max_tokens": wishes.max_tokens,
            "temperature": wishes.temperature,
            "top_p": wishes.top_p,
            "seed": seed,
            "top_logprobs": wishes.top_logprobs,
            "eos": text.eos,
        }
        self._generation = scheduler.submit(tokens, sampling)

    async def start(self) -> None:
        """Return when the prompt is computed; a failure until then still gets its own HTTP status."""
        frame = await self._next()
        if frame["kind"] != "prefilled":
            raise ApiError("the request was cancelled", status=499, code="cancelled")
        metrics = self._scheduler.metrics
        self.num_cached = frame["cached"]
        metrics.add("prompt_tokens_total", self.num_prompt)
        metrics.add("cached_tokens_total", self.num_cached)
        for _, algorithm, _ in frame["turns"]:
            metrics.add("turns_total", algorithm=algorithm)
        # Turns of one prompt are alike; the first is the longest.
        self.algorithm = frame["turns"][0][2]
        log.info(
            "request %d: prompt of %d tokens, %d reused, %d computed in %.3f s; %s",
            self._generation.number,
            self.num_prompt,
            self.num_cached,
            self.num_prompt - self.num_cached,
            frame["seconds"],
            self.algorithm,
        )

    async def pieces(self) -> AsyncIterator[Text]:
        """Yield the text as it is generated."""
        logprobs: list[TokenLogprob] = []
        while (frame := await self._next())["kind"] == "token":
            self.num_generated += 1
            if "logprobs" in frame:
                logprobs.append(self._named(frame["logprobs"]))
            text = self._stops.add(self._stream.add(frame["token"]))
            if self._stops.is_found:
                self._scheduler.cancel(self._generation, "stop")
                self.finish_reason = "stop"
                yield Text(text, tuple(logprobs))
                return
            if text:
                yield Text(text, tuple(logprobs))
                logprobs = []
        self.finish_reason = frame["reason"]
        rest = self._stops.rest()
        if rest or logprobs:
            yield Text(rest, tuple(logprobs))

    def close(self) -> None:
        """Stop the ranks if they are still generating."""
        self._scheduler.cancel(self._generation)

    def usage(self) -> dict[str, Any]:
        """The token counts for the client."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_generated,
            "total_tokens": self.num_prompt + self.num_generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }

    async def _next(self) -> Frame:
        frame = await self._generation.inbox.get()
        if frame["kind"] == "failed":
            raise ApiError(f"the ranks failed: {frame['text']}", status=500, code="ranks_failed")
        if frame.get("reason") == "not_finite":
            raise ApiError("the model computed logits that are not finite", status=500, code="not_finite")
        return frame

    def _named(self, likely: list[list[Any]]) -> TokenLogprob:
        (raw, logprob), *top = ((self._text.token_bytes(token), logprob) for token, logprob in likely)
        return TokenLogprob(raw, logprob, tuple(top))

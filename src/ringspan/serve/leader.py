"""What does rank 0 decide? Which slot a prompt continues, what is computed next, and which token is sampled.

One request is answered at a time. Between two commands rank 0 looks whether the request was cancelled.
"""

import queue
import time
from collections.abc import Callable
from typing import Any

import torch

from ringspan.serve.commands import CommandLine, Op, RankCommand, RankModel
from ringspan.serve.frames import Frame
from ringspan.serve.sampling import Sampler, most_likely
from ringspan.serve.slots import SlotBook

HEARTBEAT_S = 1.0
"""Between two commands of an idle server, so that no rank's deadline passes."""


class Mailbox:
    """Messages of the front to rank 0; a thread puts them in."""

    def __init__(self) -> None:
        self._requests: queue.Queue[Frame] = queue.Queue()
        self._cancelled: set[int] = set()

    def put(self, message: Frame) -> None:
        """A message that came in."""
        if message["kind"] == "cancel":
            self._cancelled.add(message["number"])
        else:
            self._requests.put(message)

    def get(self, timeout_s: float) -> Frame | None:
        """The next message that is not a cancellation."""
        try:
            return self._requests.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def is_cancelled(self, number: int) -> bool:
        """Was this request cancelled?"""
        return number in self._cancelled

    def forget(self, number: int) -> None:
        """The front sends no more about it."""
        self._cancelled = {other for other in self._cancelled if other > number}


class Leader:
    """Rank 0's loop."""

    def __init__(
        self,
        model: RankModel,
        line: CommandLine,
        book: SlotBook,
        mailbox: Mailbox,
        tell: Callable[[Frame], None],
        obey: Callable[[RankCommand], torch.Tensor | None],
        prefill_chunk: int,
    ) -> None:
        self._model = model
        self._line = line
        self._book = book
        self._mailbox = mailbox
        self._tell = tell
        self._obey = obey
        self._prefill_chunk = prefill_chunk

    def serve(self) -> None:
        """Answer requests until told to end."""
        while True:
            message = self._mailbox.get(HEARTBEAT_S)
            if message is None:
                self._command(RankCommand(Op.NOTHING))
            elif message["kind"] == "end":
                self._command(RankCommand(Op.END))
                return
            else:
                reason, evicted = self._answer(message)
                self._mailbox.forget(message["number"])
                self._tell(
                    {
                        "kind": "done",
                        "number": message["number"],
                        "reason": reason,
                        "evicted": evicted,
                        "cache_bytes": self._book.nbytes,
                    }
                )

    def warm_up(self, num_tokens: int) -> None:
        """Run the model once as requests do: what it cannot do is found before the first request."""
        slot = 0
        self._command(RankCommand(Op.RUN, slot, 0, [0] * num_tokens))
        self._command(RankCommand(Op.RUN, slot, num_tokens, [0]))
        self._command(RankCommand(Op.DROP, slot))

    def _answer(self, asked: Frame) -> tuple[str, int]:
        """Prefill and decode; why it ended, and how many conversations were evicted."""
        number, tokens = asked["number"], asked["tokens"]
        start_s = time.monotonic()
        slot, cached = self._book.place(tokens)
        evicted, turns = 0, []
        logits = None
        for at in range(cached, len(tokens), self._prefill_chunk):
            if self._mailbox.is_cancelled(number):
                return "cancelled", evicted
            chunk = tokens[at : at + self._prefill_chunk]
            logits, dropped = self._step(slot, chunk)
            evicted += dropped
            turns.append([len(chunk), *self._model.chosen])
        assert logits is not None
        self._tell(
            {
                "kind": "prefilled",
                "number": number,
                "cached": cached,
                "turns": turns,
                "seconds": time.monotonic() - start_s,
            }
        )
        reason, dropped = self._decode(asked, slot, logits)
        return reason, evicted + dropped

    def _decode(self, asked: Frame, slot: int, logits: torch.Tensor) -> tuple[str, int]:
        number, evicted = asked["number"], 0
        sampler = Sampler(asked["temperature"], asked["top_p"], asked["seed"])
        for count in range(1, asked["max_tokens"] + 1):
            token = sampler.choose(logits)
            if token in asked["eos"]:
                return "stop", evicted
            self._tell({"kind": "token", "number": number, "token": token, **_logprobs(asked, logits, token)})
            if count == asked["max_tokens"]:
                break
            if self._mailbox.is_cancelled(number):
                return "cancelled", evicted
            logits, dropped = self._step(slot, [token])
            evicted += dropped
        return "length", evicted

    def _step(self, slot: int, tokens: list[int]) -> tuple[torch.Tensor, int]:
        """Run the model on new tokens of a slot; the logits, and how many conversations were evicted for it."""
        dropped = self._book.make_room(slot, len(tokens))
        for other in dropped:
            self._command(RankCommand(Op.DROP, other))
        logits = self._command(RankCommand(Op.RUN, slot, self._book.length(slot), tokens))
        assert logits is not None
        self._book.extend(slot, tokens)
        return logits, len(dropped)

    def _command(self, command: RankCommand) -> torch.Tensor | None:
        self._line.send(command)
        return self._obey(command)


def _logprobs(asked: Frame, logits: torch.Tensor, token: int) -> dict[str, Any]:
    count = asked["top_logprobs"]
    return {} if count is None else {"logprobs": most_likely(logits, token, count)}

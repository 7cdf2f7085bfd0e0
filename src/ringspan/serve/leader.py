"""What does rank 0 decide? The next computation, its conversations, and the sampled tokens.

Requests that were admitted run together. Each round is one decode step for all of them, then one chunk of prompts: a
long prompt delays the answers of others by a chunk at a time. Prompts take turns, and short ones share a chunk.

Between two commands rank 0 reads its mail, and a cancelled request gets no further part of a command.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ringspan.serve.commands import CommandLine, Op, RankCommand, SlotPart
from ringspan.serve.frames import Frame
from ringspan.serve.mailbox import Mailbox
from ringspan.serve.memory import ConversationMemory
from ringspan.serve.sampling import Sampler, most_likely

HEARTBEAT_S = 1.0
"""Between two commands of an idle server, so that no rank's deadline passes."""

log = logging.getLogger("ringspan.serve")


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that has a slot."""

    asked: Frame
    slot: int
    cached: int
    sampler: Sampler
    start_s: float
    turns: list[tuple[int, str, str]] = field(default_factory=list)
    num_generated: int = 0
    token: int | None = None
    """Sampled and not computed yet; None as long as the prompt is not through."""

    @property
    def number(self) -> int:
        return int(self.asked["number"])


class Leader:
    """Rank 0's loop.

    Args:
        line: To the other ranks.
        memory: The conversations in the cache and on disk.
        mailbox: From the front.
        tell: To the front.
        obey: Does a command on this rank.
        chosen: The algorithm of the last command, and why.
        prefill_chunk: Most tokens of prompts in one command.
    """

    def __init__(
        self,
        line: CommandLine,
        memory: ConversationMemory,
        mailbox: Mailbox,
        tell: Callable[[Frame], None],
        obey: Callable[[RankCommand], dict[int, torch.Tensor]],
        chosen: Callable[[], tuple[str, str]],
        prefill_chunk: int,
    ) -> None:
        self._line = line
        self._memory = memory
        self._mailbox = mailbox
        self._tell = tell
        self._obey = obey
        self._chosen = chosen
        self._prefill_chunk = prefill_chunk
        self._arrived: deque[Frame] = deque()
        self._prefilling: deque[RunningRequest] = deque()
        self._decoding: list[RunningRequest] = []

    def serve(self) -> None:
        """Answer requests until the server ends."""
        while self._read_mail():
            self._admit()
            for request in [*self._decoding, *self._prefilling]:
                if self._mailbox.is_cancelled(request.number):
                    self._finish(request, "cancelled")
            self._decode_step()
            self._prefill_step()
        self._memory.save_all(self.command)
        self.command(RankCommand(Op.END))

    def warm_up(self, num_tokens: int) -> None:
        """Run the model once as requests do, so that a failure is found before the first request."""
        self.command(RankCommand(Op.RUN, [SlotPart(0, 0, [0] * num_tokens)]))
        self.command(RankCommand(Op.RUN, [SlotPart(0, num_tokens, [0])]))
        self.command(RankCommand(Op.DROP, [SlotPart(0)]))

    def command(self, command: RankCommand) -> dict[int, torch.Tensor]:
        """Send a command to all ranks and execute it here too."""
        self._line.send(command)
        return self._obey(command)

    def _read_mail(self) -> bool:
        """Read the mailbox; wait if no request is running. False when the server ends."""
        is_idle = not (self._arrived or self._prefilling or self._decoding)
        message = self._mailbox.get(HEARTBEAT_S if is_idle else 0.0)
        if message is None and is_idle:
            self.command(RankCommand(Op.NOTHING))
        while message is not None:
            if message["kind"] == "end":
                return False
            self._arrived.append(message)
            message = self._mailbox.get(0.0)
        return True

    def _admit(self) -> None:
        """Give slots to waiting requests in order of arrival, while there is memory for their answers."""
        while self._arrived:
            asked = self._arrived[0]
            if self._mailbox.is_cancelled(asked["number"]):
                self._arrived.popleft()
                self._say_done(asked["number"], "cancelled")
                continue
            start_s = time.monotonic()
            tokens = asked["tokens"]
            place = self._memory.place(tokens, len(tokens) + asked["max_tokens"], self.command)
            if place is None:
                return
            self._arrived.popleft()
            sampler = Sampler(asked["temperature"], asked["top_p"], asked["seed"])
            self._prefilling.append(RunningRequest(asked, *place, sampler, start_s))

    def _decode_step(self) -> None:
        """Compute one token of every conversation whose prompt is computed."""
        if not self._decoding:
            return
        requests = [*self._decoding]
        logits = self._run([(request.slot, [request.token or 0]) for request in requests])
        for request in requests:
            self._sample(request, logits[request.slot])

    def _prefill_step(self) -> None:
        """Compute one chunk of one long prompt, or of several short ones."""
        room, requests, new = self._prefill_chunk, [], []
        while self._prefilling and room:
            request = self._prefilling.popleft()
            at = self._memory.length(request.slot)
            tokens = request.asked["tokens"][at : at + room]
            requests.append(request)
            new.append((request.slot, tokens))
            room -= len(tokens)
        if not new:
            return
        logits = self._run(new)
        for request, (slot, tokens) in zip(requests, new, strict=True):
            request.turns.append((len(tokens), *self._chosen()))
            if self._memory.length(slot) < len(request.asked["tokens"]):
                self._prefilling.append(request)
            else:
                self._begin_answer(request, logits[slot])

    def _begin_answer(self, request: RunningRequest, logits: torch.Tensor) -> None:
        self._tell(
            {
                "kind": "prefilled",
                "number": request.number,
                "cached": request.cached,
                "turns": request.turns,
                "seconds": time.monotonic() - request.start_s,
            }
        )
        self._decoding.append(request)
        self._sample(request, logits)

    def _run(self, new: list[tuple[int, list[int]]]) -> dict[int, torch.Tensor]:
        parts = [SlotPart(slot, self._memory.length(slot), tokens) for slot, tokens in new]
        logits = self.command(RankCommand(Op.RUN, parts))
        for slot, tokens in new:
            self._memory.extend(slot, tokens)
        return logits

    def _sample(self, request: RunningRequest, logits: torch.Tensor) -> None:
        """Choose the next token, send it, and end the answer if it was the last."""
        asked = request.asked
        logits = logits.float()
        if not logits.max().isfinite():  # NaN or overflow in the model: this request fails, not the server
            self._finish(request, "not_finite")
            return
        request.token = token = request.sampler.choose(logits)
        if token in asked["eos"]:
            self._finish(request, "stop")
            return
        request.num_generated += 1
        self._tell({"kind": "token", "number": request.number, "token": token, **_logprobs(asked, logits, token)})
        if request.num_generated == asked["max_tokens"]:
            self._finish(request, "length")

    def _finish(self, request: RunningRequest, reason: str) -> None:
        if request in self._decoding:
            self._decoding.remove(request)
        if request in self._prefilling:
            self._prefilling.remove(request)
        self._memory.release(request.slot)
        self._say_done(request.number, reason)

    def _say_done(self, number: int, reason: str) -> None:
        self._mailbox.forget(number)
        self._tell({"kind": "done", "number": number, "reason": reason, **self._memory.figures()})


def _logprobs(asked: Frame, logits: torch.Tensor, token: int) -> dict[str, Any]:
    count = asked["top_logprobs"]
    return {} if count is None else {"logprobs": most_likely(logits, token, count)}

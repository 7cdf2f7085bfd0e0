"""Rank 0's loop over a played model: cancelled requests, and logits that no token can be chosen from."""

import random
from array import array
from typing import Any

import pytest
import torch

from ringspan.serve.archive import Archive
from ringspan.serve.commands import Op, RankCommand, saved_folder
from ringspan.serve.leader import Leader
from ringspan.serve.mailbox import Mailbox
from ringspan.serve.memory import ConversationMemory, Remembered
from ringspan.serve.sampling import Sampler
from ringspan.serve.slots import SPARE, SlotBook

CHUNK = 8
VICTIM, OTHER = 1, 2


class PlayedRanks:
    """Gives the same logits for every command; a request can be cancelled during one of them."""

    def __init__(self, logits: torch.Tensor, cancel_during: int = 0) -> None:
        self.mailbox = Mailbox()
        self.told: list[dict[str, Any]] = []
        self.runs: list[RankCommand] = []
        self._logits = logits
        self._cancel_during = cancel_during
        self._num_left = 0
        memory = ConversationMemory(SlotBook(2, 16, 2**30), None)
        chosen = ("pass_kv", "pass_kv: played.")
        self._leader = Leader(self, memory, self.mailbox, self.tell, self.obey, lambda: chosen, CHUNK)

    def send(self, command: RankCommand) -> None:
        """To ranks that are not there."""

    def obey(self, command: RankCommand) -> dict[int, torch.Tensor]:
        if command.op is Op.RUN:
            self.runs.append(command)
            if len(self.runs) == self._cancel_during:
                self.mailbox.put({"kind": "cancel", "number": VICTIM})
        return {part.slot: self._logits for part in command.parts}

    def tell(self, frame: dict[str, Any]) -> None:
        self.told.append(frame)
        self._num_left -= frame["kind"] == "done"
        if not self._num_left:
            self.mailbox.put({"kind": "end"})

    def serve(self, *requests: dict[str, Any]) -> dict[int, str]:
        """How each request ended."""
        self._num_left = len(requests)
        for request in requests:
            self.mailbox.put(request)
        self._leader.serve()
        return {frame["number"]: frame["reason"] for frame in self.told if frame["kind"] == "done"}

    def num_tokens(self, number: int) -> int:
        return sum(frame["kind"] == "token" and frame["number"] == number for frame in self.told)


def request(number: int, tokens: list[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "top_p": 1.0, "seed": 0, "top_logprobs": None}
    return {"kind": "generate", "number": number, "tokens": tokens, "max_tokens": max_tokens, "eos": [], **sampling}


@pytest.mark.parametrize("seed", range(100))
def test_a_cancelled_request_gets_at_most_one_more_token_or_chunk(seed):
    rng = random.Random(seed)
    ranks = PlayedRanks(torch.arange(50.0), cancel_during=rng.randint(1, 20))
    # Nothing of the other's is in the victim's slot, so the victim's parts are known by the slot.
    victim = request(VICTIM, [1000 + i for i in range(rng.randint(1, 100))], 40)
    ended = ranks.serve(*rng.sample([victim, request(OTHER, [5] * rng.randint(1, 60), 60)], 2))
    assert ended == {VICTIM: "cancelled", OTHER: "length"}
    assert ranks.num_tokens(OTHER) == 60
    slots = {part.slot for run in ranks.runs for part in run.parts if part.tokens[0] >= 1000}
    after = ranks.runs[ranks._cancel_during :]
    assert sum(part.slot in slots for run in after for part in run.parts) <= 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_their_request_and_nothing_else(bad):
    logits = torch.zeros(50)
    logits[3] = bad
    assert PlayedRanks(logits).serve(request(1, [1, 2], 5), request(2, [3], 5)) == {1: "not_finite", 2: "not_finite"}


@pytest.mark.parametrize("temperature", [5e-324, 1e-320, 1e-30])
def test_a_very_low_temperature_takes_the_most_likely_token(temperature):
    logits = torch.tensor([-float("inf"), 2.0, 100.0, -100.0])
    assert Sampler(temperature, 1.0, 0).choose(logits) == 2


def test_a_saved_conversation_that_has_no_room_any_more_is_computed_anew(tmp_path):
    archive = Archive(tmp_path, "model")
    saved = array("q", range(1, 301))
    saved_folder(tmp_path, 5).mkdir()
    archive.note(5, 1, saved)
    prompt = [*saved[:200], 7]

    def place(num_tokens: int) -> tuple[Remembered | None, list[Op]]:
        """With room for a number of tokens."""
        ops: list[Op] = []

        def command(command: RankCommand) -> dict[int, torch.Tensor]:
            ops.append(command.op)
            return {part.slot: torch.ones(1) for part in command.parts}

        memory = ConversationMemory(SlotBook(1, 1, SPARE + num_tokens + num_tokens // 4), archive)
        return memory.place(prompt, 210, command), ops

    assert place(400) == ((1, 200), [Op.LOAD])
    assert place(240) == ((1, 0), [])
